"""What a machine knows of its leader from the moment when it joined, in the folder of its side of the cluster."""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.training.cluster.wire import Base, Version

JOINED = "leader.json"
"""The name of the file."""


class Joined(Struct, frozen=True):
    """The leader as it was when this machine joined it last."""

    url: str
    id: str  # of this machine, by which the leader recognises it
    base: Base
    model: str  # folder of the base on this machine
    newest: int = 0  # highest number of a version of the trained adapter
    beginning: Version | None = None  # with which a trainer has begun; None: a fresh adapter
