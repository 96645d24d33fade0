"""How keys and values lie in the pool: as the model computed them, or in few bits on a grid for each group of numbers.

A row is one head's key or value at one position; an array of the pool has one line for each row. Quantised, a row is
two lines of 32-bit words: the numbers' codes, the first in the lowest bits, and one word a group for its grid, with the
distance of its points in the upper half and its lowest point in the lower, both bfloat16:
number = code · distance + lowest. (docs/decisions/int8-kv.md)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

_UP = 1 + 2.0**-8
"""Rounding to bfloat16 takes at most this factor away."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The rows of a layer's keys, or of its values: `heads` of them a position, each of `dim` numbers of `dtype`.

    bits: of a code, 4 or 8; 0 keeps the numbers as they are. group: how many numbers share a grid, at least, where a
    row has so many; rows are cut into equal groups, so a group may have up to twice as many, or be the whole row.
    """

    heads: int
    dim: int
    dtype: mx.Dtype
    bits: int = 0
    group: int = 0

    @property
    def groups(self) -> int:
        most = max(1, self.dim // self.group)
        return next(n for n in range(most, 0, -1) if self.dim % n == 0)

    def lines(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """Width and type of a row's line in each of the arrays."""
        if not self._coded:
            return ((self.dim, self.dtype),)
        return (-(-self.dim * self.bits // 32), mx.uint32), (self.groups, mx.uint32)

    def bytes_per_token(self) -> int:
        return self.heads * sum(width * dtype.size for width, dtype in self.lines())

    def encode(self, rows: mx.array) -> list[mx.array]:
        """[n, dim] to one array [n, width] for each line.

        Every finite number is at most half a distance from its point on the grid. A group with a number that is not
        finite, or spans more than bfloat16 can, comes back as NaN: it must not become a harmless number here.
        """
        if not self._coded:
            return [rows]
        top = (1 << self.bits) - 1
        x = rows.astype(mx.float32).reshape(-1, self.groups, self.dim // self.groups)
        least = x.min(-1, keepdims=True)
        # Whatever isn't finite makes the sum so; least and greatest pass over NaN on some devices.
        lowest = (least - mx.abs(least) * (_UP - 1) + 0 * x.sum(-1, keepdims=True)).astype(mx.bfloat16)
        low = lowest.astype(mx.float32)
        # The grid is laid after rounding and covers the group, so its rounding costs resolution and never offset.
        distance = mx.maximum((x.max(-1, keepdims=True) - low) * (_UP / top), 1e-30).astype(mx.bfloat16)
        codes = mx.round((x - low) / distance.astype(mx.float32)).astype(mx.uint8).reshape(-1, self.dim)
        if short := -self.dim * self.bits % 32:
            codes = mx.pad(codes, [(0, 0), (0, short // self.bits)])
        if self.bits == 4:
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        grids = _word(distance) << 16 | _word(lowest)
        return [codes.view(mx.uint32), grids.reshape(-1, self.groups)]

    def decode(self, lines: Sequence[mx.array]) -> mx.array:
        """One array [..., width] for each line to [..., dim]."""
        if not self._coded:
            return lines[0]
        words, grids = lines
        codes = words.view(mx.uint8)
        if self.bits == 4:
            codes = mx.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        # The halves of a word are float32 by their bits: a conversion from bfloat16 would be made for each number.
        distance, lowest = (grids & 0xFFFF0000).view(mx.float32), (grids << 16).view(mx.float32)
        codes = codes[..., : self.dim].reshape(*grids.shape, -1)
        x = codes.astype(mx.float32) * distance[..., None] + lowest[..., None]
        return x.reshape(*grids.shape[:-1], self.dim).astype(self.dtype)

    @property
    def _coded(self) -> bool:
        return bool(self.bits and self.dim)


def _word(x: mx.array) -> mx.array:
    return x.view(mx.uint16).astype(mx.uint32)
