"""Snapshots of states: at which blocks of a prompt they are kept, and how prompts are cut so that they end there."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_tandem.engine.cost import unpadded_length
from mlx_tandem.engine.prefix_keys import PrefixKeys
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.prefix import PrefixCache

SNAPSHOT_TOKENS = 512
"""Fewest tokens before a boundary that gets a snapshot only because it is a power of two of blocks."""


class Snapshots:
    """The snapshots of the groups that have any. `caches` and `keys`: as in `BlockManager`."""

    def __init__(self, groups: Iterable[CacheGroup], caches: Iterable[PrefixCache], keys: PrefixKeys):
        self._groups = tuple(groups)
        self._caches = tuple(caches)
        self._keys = keys
        self._size = self._groups[0].pool.block_size
        self._indices = [i for i, group in enumerate(self._groups) if group.snapshots]

    def boundaries(self, s: Sequence) -> set[int]:
        """Return at the end of which blocks a snapshot of the state of `s`, which begins, is worth keeping.

        These are where it was found, where the prompt and its last message end, where its adapter begins to apply,
        where another prompt with the same beginning went another way, and powers of two. A message ends with a token
        that may end an answer. What follows it in the prompt begins the answer, and need not be there when the
        conversation goes on.
        """
        if not (self._indices and self._caches):
            return set()
        last = (len(s.tokens) - 1) // self._size
        shared = [
            len(cache.whole(self._keys.chain(s), s.content, last)) for cache in self._caches if cache.group.keeps_all
        ]
        powers = {1 << n for n in range(last.bit_length()) if (1 << n) * self._size >= SNAPSHOT_TOKENS}
        prompt = s.tokens[: s.prompt_length - 1]
        message = next((end for end in range(len(prompt), 0, -1) if prompt[end - 1] in s.stop_ids), 0)
        ends = s.scheduled, message, min(s.adapter_start, len(prompt)), len(prompt)
        return {*powers, *shared, *(end // self._size for end in ends)} - {0}

    def thin(self, s: Sequence) -> None:
        """Give back the states of `s` that no later position needs and that are not worth a snapshot.

        No row of `s` may be in the plan that is being made.
        """
        computed = min(s.scheduled, len(s.tokens) - 1)
        for i in self._indices:
            pool = self._groups[i].pool
            table, gone = self._groups[i].give_back(s.tables[i], computed, s.boundaries)
            if not gone:
                continue
            s.tables = (*s.tables[:i], table, *s.tables[i + 1 :])
            if self._caches:
                self._caches[i].drop([b for b in gone if pool.count[b] == 1])
            pool.release(gone)

    def chunk(self, s: Sequence, tokens: int) -> int:
        """Return how many of the next `tokens` of the prompt of `s` one row may have.

        With states, rows have no padding, end with the block in which they begin within, and end at boundaries that
        are worth a snapshot.
        """
        if not self._indices:
            return tokens
        size, start = self._size, s.scheduled
        ends = [b * size - start for b in (s.boundaries if start % size == 0 else {start // size + 1})]
        tokens = unpadded_length(min([tokens, *(end for end in ends if end > 0)]))
        return tokens // size * size or tokens
