"""The keys by which the prefix cache finds the blocks of sequences."""

from __future__ import annotations

from collections.abc import Sequence as Several

from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.hashing import Chain
from mlx_tandem.kv.prefix import PrefixCache


class PrefixKeys:
    """The keys of blocks of so many tokens. All caches of a model use the same."""

    def __init__(self, caches: Several[PrefixCache], block_size: int):
        self._caches = caches
        self._size = block_size

    def chain(self, s: Sequence) -> Chain:
        """Return the keys of the blocks of `s`: the base's up to the block in which its adapter starts, then the
        adapter's.
        """
        if s.chain is None:
            s.chain = self._caches[0].chain(s.adapter_digest or "", s.adapter_start)
        return s.chain

    def key(self, s: Sequence, block: int) -> bytes:
        """Return the key of a full block of `s`."""
        return self.chain(s).key(block, s.content, self._size)
