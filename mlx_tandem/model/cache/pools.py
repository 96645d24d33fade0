"""All KV pools of a model: layers that see every position share one pool, layers that see a window another.

There are two such pools at most: layers whose windows differ share a pool with the longest window. The states of
recurrent layers have another, the last. A model without attention has a first pool without layers. Blocks are numbered
through all pools, as in kv/pool.py; the first block of each pool is its scratch block.

The arrays of the KV pool, and the operations on whole blocks: copying, reading as bytes, writing from bytes.

Every array is [heads · blocks · block_size, width], head-major, and is written in place (`inplace.py`). On some devices
this requires that an array is the only reference to its data, so a read and a write of it never go into one evaluation.
On others the pool's `Order` orders all reads and writes. Blocks are read and written in pieces of two bytes, of which
every type of an array consists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import Bytes
from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.cache.states import StateShape, put
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import Order, after, write


class ArrayForm(Protocol):
    """The form of one thing that a layer stores."""

    @property
    def heads(self) -> int:
        """Number of runs of lines, one for each head."""

    def lines(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """Return width and type of a line in each of its arrays."""


class Stored(Protocol):
    """Everything that one layer stores: keys and values, or the arrays of a state."""

    @property
    def halves(self) -> tuple[ArrayForm, ...]:
        """The forms of its parts."""


class KVArrays:
    """The arrays of one pool.

    `layers` holds each layer's arrays, keys before values; a step takes them all and gives them back. `order`: the
    order of all reads and writes of them. A pool of states has blocks of one line.
    """

    def __init__(self, shapes: Sequence[Stored], num_blocks: int, block_size: int, order: Order | None = None):
        self._shapes = shapes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._order = order or Order()
        self.clear()

    def clear(self) -> None:
        """Make all arrays anew, filled with zeros."""
        self.layers: list[list[mx.array]] = []  # frees the old arrays first
        tokens = self.num_blocks * self.block_size
        self.layers = [
            [mx.zeros((half.heads * tokens, w), dtype) for half in shape.halves for w, dtype in half.lines()]
            for shape in self._shapes
        ]
        mx.eval(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for arrays in self.layers for a in arrays)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all arrays."""
        return self.nbytes // self.num_blocks

    def copy(self, copies: Sequence[tuple[int, int]]) -> tuple[list[mx.array], list[mx.array]]:
        """Copy blocks, given as pairs (from, to). Return the arrays to evaluate, and those to evaluate after them."""
        sources, targets = zip(*copies, strict=True)
        rows = self._rows(sources)
        read = [array[rows[heads]] for array, heads in self._each()]
        return read, self._write(targets, read)

    def read(self, blocks: Sequence[int]) -> list[mx.array]:
        """Return arrays that `bytes_of` turns into bytes. They have to be evaluated before the next write."""
        rows = self._rows(blocks)
        read = [array[rows[heads]].view(mx.uint16) for array, heads in self._each()]
        self._order.follow(read)
        return read

    def bytes_of(self, read: Sequence[mx.array], count: int) -> list[bytes]:
        """Return `block_bytes` bytes for each of the `count` blocks that were read: array by array, head by head."""
        parts = [
            np.asarray(a).reshape(heads, count, -1).swapaxes(0, 1).reshape(count, -1)
            for a, (_, heads) in zip(read, self._each(), strict=True)
        ]
        return [block.tobytes() for block in np.concatenate(parts, 1)] if parts else [b""] * count

    def write(self, loads: Sequence[tuple[int, Bytes]]) -> list[mx.array]:
        """Write contents that `bytes_of` returned into blocks. Return the arrays to evaluate.

        Raises ValueError when the number of bytes is not that of a block.
        """
        if any(len(content) != self.block_bytes for _, content in loads):
            raise ValueError(f"a block of this cache has {self.block_bytes} bytes")
        blocks = [block for block, _ in loads]
        whole = np.frombuffer(b"".join(content for _, content in loads), np.uint16).reshape(len(loads), -1)
        start = 0
        written = []
        for array, heads in self._each():
            width = array.shape[1] * array.dtype.size // 2
            end = start + heads * self.block_size * width
            lines = whole[:, start:end].reshape(len(loads), heads, -1).swapaxes(0, 1).reshape(-1, width)
            written.append(mx.array(lines).view(array.dtype))
            start = end
        return self._write(blocks, written)

    def _write(self, blocks: Sequence[int], lines: Sequence[mx.array]) -> list[mx.array]:
        """Write new lines into each of the arrays. Return arrays to evaluate, which share no memory with the pool."""
        rows = self._rows(blocks)
        written = [write(array, rows[heads], new) for (array, heads), new in zip(self._each(), lines, strict=True)]
        each = iter([array for array, _ in written])
        self.layers = [[next(each) for _ in arrays] for arrays in self.layers]
        touched = [array[:1, :1] + 0 if zero is None else zero for array, zero in written]
        self._order.follow(touched)
        return touched

    def _each(self) -> list[tuple[mx.array, int]]:
        """Return all arrays with their numbers of heads."""
        heads = [half.heads for shape in self._shapes for half in shape.halves for _ in half.lines()]
        return list(zip((a for arrays in self.layers for a in arrays), heads, strict=True))

    def _rows(self, blocks: Sequence[int]) -> dict[int, mx.array]:
        """Return by number of heads the indices of these blocks' lines, ordered after all earlier
        uses of the arrays.
        """
        at = np.array(blocks)[:, None] * self.block_size + np.arange(self.block_size)
        stride = self.num_blocks * self.block_size
        return {
            n: after(
                self._order.zeros,
                mx.array((np.arange(n)[:, None, None] * stride + at).reshape(-1).astype(np.int32)),
            )
            for n in {heads for _, heads in self._each()}
        }


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
