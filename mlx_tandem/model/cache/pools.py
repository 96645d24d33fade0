"""All pools of a model: the layers that see every position share one, those that see a window of them another.

Two at most: layers whose windows differ share the pool of the longest. Blocks are numbered through, as in kv/pool.py: a
pool's first is its scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlx_tandem.engine.plan import Bytes
from mlx_tandem.model.cache.blocks import KVArrays
from mlx_tandem.model.cache.inplace import Order
from mlx_tandem.model.cache.kvcache import LayerShape


def windows_of(shapes: Iterable[LayerShape]) -> tuple[int | None, ...]:
    """The window of each pool; the one without comes first."""
    windows = {s.window for s in shapes}
    longest = max((w for w in windows if w is not None), default=None)
    return tuple(dict.fromkeys((None, longest) if None in windows else (longest,)))


class KVPools:
    """`num_blocks`: of each pool, in the order of `windows_of`; `order`: of all who use the arrays."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: Sequence[int], block_size: int, order: Order | None = None
    ):
        order = order or Order()
        self.windows = windows_of(shapes)
        self.pool_of = [0 if s.window is None else len(self.windows) - 1 for s in shapes]  # by layer
        self.firsts = [sum(num_blocks[:i]) for i in range(len(num_blocks))]
        self.pools = [
            KVArrays([s for s, own in zip(shapes, self.pool_of, strict=True) if own == i], n, block_size, order)
            for i, n in enumerate(num_blocks)
        ]

    @property
    def layers(self) -> list[list[mx.array]]:
        """Each layer's arrays, keys before values; a step takes them all and gives them back."""
        each = [iter(pool.layers) for pool in self.pools]
        return [next(each[own]) for own in self.pool_of]

    @layers.setter
    def layers(self, layers: Sequence[list[mx.array]]) -> None:
        for i, pool in enumerate(self.pools):
            pool.layers = [arrays for arrays, own in zip(layers, self.pool_of, strict=True) if own == i]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def clear(self) -> None:
        for pool in self.pools:
            pool.clear()

    def copy(self, copies: Sequence[tuple[int, int]]) -> tuple[list[mx.array], list[mx.array]]:
        """Give each second block the contents of the first, which is of the same pool. Returns what to evaluate, and
        what after that.
        """
        read: list[mx.array] = []
        touched: list[mx.array] = []
        for (pool, own), first in zip(self._each([b for _, b in copies]), self.firsts, strict=True):
            if own:
                before, after = pool.copy([(copies[i][0] - first, b) for i, b in own])
                read += before
                touched += after
        return read, touched

    def read(self, blocks: Sequence[int]) -> list[mx.array]:
        """What `bytes_of` makes bytes of, once it is evaluated; that must be before the next write."""
        return [array for pool, own in self._each(blocks) if own for array in pool.read([b for _, b in own])]

    def bytes_of(self, read: Sequence[mx.array], blocks: Sequence[int]) -> list[bytes]:
        """Of each of the blocks that were read."""
        found: dict[int, bytes] = {}
        rest = iter(read)
        for pool, own in self._each(blocks):
            arrays = [next(rest) for layer in pool.layers for _ in layer] if own else []
            found |= zip((i for i, _ in own), pool.bytes_of(arrays, len(own)) if own else (), strict=True)
        return [found[i] for i in range(len(blocks))]

    def write(self, loads: Sequence[tuple[int, Bytes]]) -> list[mx.array]:
        """Give blocks the contents that `bytes_of` made of some block of their pool. Returns what to evaluate.

        Raises ValueError when the bytes are not one block's.
        """
        each = self._each([b for b, _ in loads])
        return [array for pool, own in each if own for array in pool.write([(b, loads[i][1]) for i, b in own])]

    def _each(self, blocks: Sequence[int]) -> list[tuple[KVArrays, list[tuple[int, int]]]]:
        """Of each pool the blocks among these: their places here and their numbers there."""
        return [
            (pool, [(i, b - first) for i, b in enumerate(blocks) if first <= b < first + pool.num_blocks])
            for pool, first in zip(self.pools, self.firsts, strict=True)
        ]
