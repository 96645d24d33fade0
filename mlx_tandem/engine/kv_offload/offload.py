"""The offload as a whole: its saves, its reads, and the forms of its records."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.engine.kv_offload.drive import Drive, Link
from mlx_tandem.engine.kv_offload.forms import forms_of
from mlx_tandem.engine.kv_offload.reads import READ_SECONDS, KVReads
from mlx_tandem.engine.kv_offload.saves import KVSaves
from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.prefix import PrefixCache

STEP_BYTES = 8 << 20
"""Bytes that one step reads for the drive, and that one step writes from it, at least one record, unless the owner
says otherwise."""


class KVOffload:
    """The offload between the drive and the prefix caches of all cache groups; it does nothing until it has a drive."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        caches: Sequence[PrefixCache],
        *,
        write_through: bool = False,
        step_bytes: int = STEP_BYTES,
        read_seconds: float = READ_SECONDS,
        ranks: int = 1,
    ):
        """Create an offload without a drive. `ranks`: how many ranks compute the model together."""
        self._write_through = write_through
        self.link = Link(*forms_of(groups, ranks), step_bytes)
        self.saves = KVSaves(self.link, [group.pool for group in groups], caches, write_through=write_through)
        self.reads = KVReads(self.link, caches, read_seconds)

    def open(self, drive: Drive, base: bytes) -> None:
        """Begin to use a drive. `base`: the digest of everything that its records have in common."""
        self.link.open(drive, base)
        if self._write_through:
            self.saves.save_all()
