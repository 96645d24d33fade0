"""The arrays of the KV pool, and the operations on whole blocks: copying, reading as bytes, writing from bytes.

Every array is [heads · blocks · block_size, width], head-major, and is written in place (`inplace.py`). On some devices
this requires that an array is the only reference to its data, so a read and a write of it never go into one evaluation.
On others the pool's `Order` orders all reads and writes. Blocks are read and written in pieces of two bytes, of which
every type of an array consists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import Bytes
from mlx_tandem.model.ops.inplace import Order, after, write


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
