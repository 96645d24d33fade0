"""The format of keys and values in the pool (as the model computed them, or quantised in groups), and a layer's share.

A row is one head's key or value at one position; an array of the pool has one line for each row. A quantised row is two
lines of 32-bit words: the numbers' codes, the first in the lowest bits, and one word for the grid of each group. That
word has the distance of the grid's points in its upper half and the lowest point in its lower half, both as bfloat16:
number = code · distance + lowest. (docs/decisions/int8-kv.md)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

_UP = 1 + 2.0**-8
"""Largest factor by which rounding to bfloat16 makes a number smaller."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The format of a layer's keys, or of its values: `heads` rows for each position, each of `dim` numbers of `dtype`.

    bits: of a code, 4 or 8; 0 keeps the numbers as they are. group: the least number of numbers that share a grid. Rows
    are cut into equal groups, so a group may be larger, up to the whole row.
    """

    heads: int
    dim: int
    dtype: mx.Dtype
    bits: int = 0
    group: int = 0

    @property
    def groups(self) -> int:
        """Number of groups in a row."""
        most = max(1, self.dim // self.group)
        return next(n for n in range(most, 0, -1) if self.dim % n == 0)

    def lines(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """Return width and type of a row's line in each of the arrays."""
        if not self._coded:
            return ((self.dim, self.dtype),)
        return (-(-self.dim * self.bits // 32), mx.uint32), (self.groups, mx.uint32)

    def bytes_per_token(self) -> int:
        """Return the bytes of all heads at one position."""
        return self.heads * sum(width * dtype.size for width, dtype in self.lines())

    def encode(self, rows: mx.array) -> list[mx.array]:
        """Return rows [n, dim] as one array [n, width] for each line.

        Every finite number is at most half a distance from its point on the grid. A group with a number that is not
        finite, or with a span too large for bfloat16, decodes to NaN, so that the failure stays visible.
        """
        if not self._coded:
            return [rows]
        top = (1 << self.bits) - 1
        x = rows.astype(mx.float32).reshape(-1, self.groups, self.dim // self.groups)
        least = x.min(-1, keepdims=True)
        # A number that is not finite makes the sum so; on some devices, min and max skip NaN.
        lowest = (least - mx.abs(least) * (_UP - 1) + 0 * x.sum(-1, keepdims=True)).astype(mx.bfloat16)
        low = lowest.astype(mx.float32)
        # The grid is computed after rounding and covers the group, so rounding costs resolution but adds no offset.
        distance = mx.maximum((x.max(-1, keepdims=True) - low) * (_UP / top), 1e-30).astype(mx.bfloat16)
        codes = mx.round((x - low) / distance.astype(mx.float32)).astype(mx.uint8).reshape(-1, self.dim)
        if short := -self.dim * self.bits % 32:
            codes = mx.pad(codes, [(0, 0), (0, short // self.bits)])
        if self.bits == 4:
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        grids = _word(distance) << 16 | _word(lowest)
        return [codes.view(mx.uint32), grids.reshape(-1, self.groups)]

    def decode(self, lines: Sequence[mx.array]) -> mx.array:
        """Return the rows [..., dim] of one array [..., width] for each line."""
        if not self._coded:
            return lines[0]
        words, grids = lines
        codes = words.view(mx.uint8)
        if self.bits == 4:
            codes = mx.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        # The bits of each half make a float32; a conversion from bfloat16 would be repeated for each number.
        distance, lowest = (grids & 0xFFFF0000).view(mx.float32), (grids << 16).view(mx.float32)
        codes = codes[..., : self.dim].reshape(*grids.shape, -1)
        x = codes.astype(mx.float32) * distance[..., None] + lowest[..., None]
        return x.reshape(*grids.shape[:-1], self.dim).astype(self.dtype)

    @property
    def _coded(self) -> bool:
        return bool(self.bits and self.dim)


def _word(x: mx.array) -> mx.array:
    """Return the bits of bfloat16 numbers as uint32."""
    return x.view(mx.uint16).astype(mx.uint32)


@dataclass(frozen=True, slots=True)
class Asks:
    """The attention that a layer's code asks for, where it does so through `attend`."""

    heads: int  # heads of queries
    sinks: bool
    casts: bool = False  # whether queries have another type than the keys, so that no kernel answers them


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The keys and values that one layer caches, whose heads and widths differ in latent attention.

    window: how many positions the layer sees, the last of them the query's own; None: all.
    """

    keys: RowFormat
    values: RowFormat
    asks: Asks | None = None
    window: int | None = None

    @property
    def halves(self) -> tuple[RowFormat, RowFormat]:
        """The formats of keys and values."""
        return self.keys, self.values

    def bytes_per_token(self) -> int:
        """Return the bytes of keys and values at one position."""
        return sum(half.bytes_per_token() for half in self.halves)

    def quantised(self, bits: int, group: int) -> LayerShape:
        """Return the shape of the same layer with keys and values in so many bits, in groups of at least `group`."""
        keys, values = (replace(half, bits=bits, group=group) for half in self.halves)
        return replace(self, keys=keys, values=values)
