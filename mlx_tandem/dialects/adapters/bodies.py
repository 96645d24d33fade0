"""The bodies of requests about adapters and aliases."""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.config import ABTest, Arm


class AdapterBody(Struct, forbid_unknown_fields=True):
    """The body of a request to load a folder as the next version of `name`."""

    name: str
    path: str | None = None  # under the adapter root; absent: the known folder of the name
    pin: bool = False


class AliasBody(Struct, forbid_unknown_fields=True):
    """The body of a request to set the arms of an alias."""

    arms: list[Arm]
    ab_test: ABTest | None = None  # how the arms are tested; absent: the weights stay as they are
