"""The bodies of requests about adapters and aliases."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from mlx_tandem.config import ABTest, Arm
from mlx_tandem.limits import bounds


class AdapterBody(Struct, forbid_unknown_fields=True):
    """The body of a request to load a folder as the next version of `name`, or to let it stand for an earlier one."""

    name: str
    path: str | None = None  # under the adapter root; absent: the known folder of the name
    version: Annotated[int, bounds("version")] | None = None  # the one that the name stands for; no folder is read then
    pin: bool = False


class AliasBody(Struct, forbid_unknown_fields=True):
    """The body of a request to set the arms of an alias."""

    arms: list[Arm]
    ab_test: ABTest | None = None  # how the arms are tested; absent: the weights stay as they are
