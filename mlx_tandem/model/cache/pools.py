"""All KV pools of a model: layers that see every position share one pool, layers that see a window another.

There are two such pools at most: layers whose windows differ share a pool with the longest window. The states of
recurrent layers have another, the last. A model without attention has a first pool without layers. Blocks are numbered
through all pools, as in kv/pool.py; the first block of each pool is its scratch block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlx_tandem.engine.plan import Bytes
from mlx_tandem.model.cache.blocks import KVArrays
from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.cache.states import StateShape, put
from mlx_tandem.model.ops import inplace
from mlx_tandem.model.ops.inplace import Order, after


def windows_of(shapes: Iterable[LayerShape]) -> tuple[int | None, ...]:
    """Return the window of each pool; the pool without a window (None) comes first."""
    windows = {s.window for s in shapes}
    longest = max((w for w in windows if w is not None), default=None)
    return tuple(dict.fromkeys((None, longest) if None in windows else (longest,)))


class KVPools:
    """The pools of a model on the device.

    `num_blocks`: the number of blocks of each pool, in the order of `windows_of`, and then of states; `order`: the
    order of all users of the arrays; `states`: those of recurrent layers.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: Sequence[int],
        block_size: int,
        order: Order | None = None,
        states: Sequence[StateShape] = (),
    ):
        self._order = order = order or Order()
        self.windows = windows_of(shapes)
        self.pool_of = [0 if s.window is None else len(self.windows) - 1 for s in shapes]  # index of each layer's pool
        self.firsts = [sum(num_blocks[:i]) for i in range(len(num_blocks))]
        self.pools = [
            KVArrays([s for s, own in zip(shapes, self.pool_of, strict=True) if own == i], n, block_size, order)
            for i, n in enumerate(num_blocks[: len(self.windows)])
        ]
        if states:
            self.pool_of += [len(self.pools)] * len(states)
            self.pools.append(KVArrays(states, num_blocks[-1], 1, order))

    @property
    def layers(self) -> list[list[mx.array]]:
        """Each layer's arrays, keys before values, and then those of each state; a step takes them all and gives them
        back.
        """
        each = [iter(pool.layers) for pool in self.pools]
        return [next(each[own]) for own in self.pool_of]

    @layers.setter
    def layers(self, layers: Sequence[list[mx.array]]) -> None:
        for i, pool in enumerate(self.pools):
            pool.layers = [arrays for arrays, own in zip(layers, self.pool_of, strict=True) if own == i]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.pools)

    def clear(self) -> None:
        """Make all arrays anew, filled with zeros."""
        for pool in self.pools:
            pool.clear()

    def copy(self, copies: Sequence[tuple[int, int]]) -> tuple[list[mx.array], list[mx.array]]:
        """Copy blocks within their pools, given as pairs (from, to).

        Return the arrays to evaluate, and those to evaluate after them.
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
        """Return arrays that `bytes_of` turns into bytes. They have to be evaluated before the next write."""
        return [array for pool, own in self._each(blocks) if own for array in pool.read([b for _, b in own])]

    def bytes_of(self, read: Sequence[mx.array], blocks: Sequence[int]) -> list[bytes]:
        """Return the bytes of each of the blocks that were read."""
        found: dict[int, bytes] = {}
        rest = iter(read)
        for pool, own in self._each(blocks):
            arrays = [next(rest) for layer in pool.layers for _ in layer] if own else []
            found |= zip((i for i, _ in own), pool.bytes_of(arrays, len(own)) if own else (), strict=True)
        return [found[i] for i in range(len(blocks))]

    def write(self, loads: Sequence[tuple[int, Bytes]]) -> list[mx.array]:
        """Write contents that `bytes_of` returned for blocks of the same pool into blocks. Return the arrays to
        evaluate.

        Raises ValueError when the number of bytes is not that of a block.
        """
        each = self._each([b for b, _ in loads])
        return [array for pool, own in each if own for array in pool.write([(b, loads[i][1]) for i, b in own])]

    def put_states(self, rows: mx.array, lines: Sequence[mx.array]) -> list[mx.array]:
        """Write the lines of `StateView` into rows [n] of the pool of states. Return the arrays to evaluate."""
        layers = self.pools[-1].layers
        every = [array for own in layers for array in own]
        if inplace.writing().store is not None:
            rows = after(self._order.zeros, rows)
            written = [inplace.write(array, rows, new) for array, new in zip(every, lines, strict=True)]
            self._order.follow([zero for _, zero in written if zero is not None])
            return [zero for _, zero in written if zero is not None]
        arrays, done = put(every, rows, lines)
        each = iter(arrays)
        self.pools[-1].layers = [[next(each) for _ in own] for own in layers]
        return [done]

    def _each(self, blocks: Sequence[int]) -> list[tuple[KVArrays, list[tuple[int, int]]]]:
        """Return for each pool its blocks among these: their indices in `blocks` and their numbers in the pool."""
        return [
            (pool, [(i, b - first) for i, b in enumerate(blocks) if first <= b < first + pool.num_blocks])
            for pool, first in zip(self.pools, self.firsts, strict=True)
        ]
