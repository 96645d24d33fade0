"""Whole blocks of prompts that are being read, which nobody else may find yet.

Until a token has been drawn from these blocks, their values may not be finite. A sequence that is preempted before then
sets its blocks aside. Only that sequence finds them when it starts again, unless they have been reused.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_tandem.engine.block_writes import BlockWrites
from mlx_tandem.engine.prefix_keys import PrefixKeys
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.prefix import PrefixCache


class Unpublished:
    """The unpublished blocks of all sequences. The arguments are those of `BlockManager`."""

    def __init__(self, caches: Iterable[PrefixCache], keys: PrefixKeys, writes: BlockWrites, block_size: int):
        self._caches = tuple(caches)
        self._keys = keys
        self._writes = writes
        self._size = block_size

    def has_any(self, s: Sequence) -> bool:
        """Return whether `s` has computed whole blocks that it could publish."""
        return bool(self._caches) and s.is_pure and s.scheduled // self._size > s.published

    def set_aside(self, s: Sequence) -> None:
        """Set aside the blocks that `s` has computed and not published. The caller is about to free them."""
        if s.has_drawn or s.reads_whole_prompt or not self.has_any(s) or self._writes.is_loading(s.tables):
            return
        s.aside = b"aside" + s.id.to_bytes(8)
        for cache, table in zip(self._caches, s.tables, strict=True):
            cache.set_aside(s.aside, self._keys.chain(s), s.content[: s.scheduled], table)

    def forget(self, s: Sequence, *, are_finite: bool = False) -> None:
        """Keep nothing aside for `s` any longer. Blocks that it has published stay."""
        for cache in self._caches if s.aside else ():
            blocks = cache.forget_aside(s.aside)
            if not are_finite:
                self._writes.scrub(blocks)
        s.aside = b""
