"""The offload as a whole: its saves, its reads, and the form of a block on the drive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mlx_tandem.engine.kv_offload.drive import Drive, Link
from mlx_tandem.engine.kv_offload.reads import READ_SECONDS, KVReads
from mlx_tandem.engine.kv_offload.saves import KVSaves
from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.prefix import PrefixCache

STEP_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20, "metal": 16 << 20}
"""Bytes that one step reads for the drive, and that one step writes from it, at least one block. On a CPU they take
30 ms."""


class KVOffload:
    """The offload between the drive and the prefix caches of all cache groups; it does nothing until it has a drive."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        caches: Sequence[PrefixCache],
        *,
        write_through: bool = False,
        step_bytes: int = STEP_BYTES["cpu"],
        read_seconds: float = READ_SECONDS,
    ):
        self._parts = [group.block_bytes for group in groups]
        self._write_through = write_through
        pools, size = [group.pool for group in groups], sum(self._parts)
        self.link = Link(size, max(1, step_bytes // size))
        self.saves = KVSaves(self.link, pools, caches, write_through=write_through)
        self.reads = KVReads(self.link, pools[0].block_size, read_seconds)

    def open(self, drive: Drive, base: bytes) -> None:
        """Begin to use a drive. `base`: the digest of everything that its blocks have in common."""
        self.link.open(drive, base)
        if self._write_through:
            self.saves.save_all()

    def parts(self, payload: memoryview) -> list[memoryview]:
        """Return the parts of a block's payload, one for each pool."""
        ends = list(accumulate(self._parts))
        return [payload[end - size : end] for end, size in zip(ends, self._parts, strict=True)]
