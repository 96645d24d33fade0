"""The bodies of requests about adapters and aliases."""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.config import Arm


class AdapterBody(Struct, forbid_unknown_fields=True):
    """A folder to be read as the next version of `name`."""

    name: str
    path: str | None = None  # under the adapter root; absent: the folder that the name is known by
    pin: bool = False


class AliasBody(Struct, forbid_unknown_fields=True):
    """The arms that an alias stands for."""

    arms: list[Arm]
