"""Rotary positions with several axes: a token of an image has a time, a line and a column.

A token of text has the same number on all axes. Behind an image this number differs from the token's index, because an
image takes only as many numbers as its longer side has placeholders. The groups of a video's frames have the same lines
and columns, and differ in their times. So each row says by how much its positions are shifted, and rows with images
have three positions for each token. Rows without images or shifts use the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_tandem.engine.plan import Row
from mlx_tandem.errors import ModelError
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model_folder import CONFIG

AXES = 3
"""Time, line and column."""


def consecutive(sections: Sequence[int]) -> list[int]:
    """Return the axis of each frequency if those of the time come first, then those of lines, then those of columns.

    sections: the number of frequencies of each axis.
    """
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


def alternating(sections: Sequence[int]) -> list[int]:
    """Return the axis of each frequency if the axes take turns.

    Where lines or columns have no frequency left, the frequency belongs to the time. sections: as above.
    """
    turns = [n % AXES for n in range(sum(sections))]
    return [axis if n < AXES * sections[axis] else 0 for n, axis in enumerate(turns)]


ORDERS: Mapping[str, Callable[[Sequence[int]], list[int]]] = {"consecutive": consecutive, "alternating": alternating}
"""The functions that return the axis of each frequency, by the orders that `VisionFamily.axes` names."""


def positions_of(rows: Sequence[Row], count: int, length: int) -> npt.NDArray[np.int32]:
    """Return the positions [AXES, count, length] of the tokens of rows, padded with 0."""
    positions = np.zeros((AXES, count, length), np.int32)
    for i, row in enumerate(rows):
        own = positions[:, i]
        own[:] = row.start + row.shift + np.arange(length, dtype=np.int32)
        for shown in row.images:
            at, end = shown.at, shown.at + shown.count
            number = np.arange(shown.first, shown.first + shown.count, dtype=np.int32)
            begin = row.start + at - shown.first + shown.shift
            if shown.columns:
                own[:, at:end] = begin
                own[0, at:end] += shown.time
                own[1, at:end] += number // shown.columns
                own[2, at:end] += number % shown.columns
            own[:, end:] = row.start + shown.after + np.arange(end, length, dtype=np.int32)
    return positions


class AxisPositions:
    """The positions of the forward that is being traced, which the ropes of a model read.

    `axes` has the axis of each frequency of a head. The constructor raises ModelError if their number is not that of
    the ropes' frequencies.
    """

    def __init__(self, model: nn.Module, axes: Sequence[int]):
        self._axis_of = mx.array(np.array(axes, np.int32))
        self._given: mx.array | None = None
        self._moved: tuple[mx.array, mx.array] | None = None  # an offset, and that offset with the shifts
        self._made: dict[tuple[int, float, float], tuple[mx.array, mx.array]] = {}
        for module in model.modules():
            if isinstance(module, nn.RoPE):
                rope: Any = module
                if rope.dims != 2 * len(axes):
                    raise ModelError(
                        f"{CONFIG}: mrope_section must add up to {rope.dims // 2}, the frequencies of a head",
                        param="mrope_section",
                    )
                rope._axis_positions = self
                if not isinstance(rope, _AxisRope):
                    mix_in(rope, _AxisRope)

    def bind(self, given: mx.array | None) -> None:
        """Set the positions of the forward that follows.

        given: the shifts of rows [rows], or the positions of tokens [AXES, rows, length]; None: positions are indices.
        """
        self._given, self._moved = given, None
        self._made.clear()

    def turn(self, rope: Any, x: mx.array, offset: Any, plain: Callable[[mx.array, Any], mx.array]) -> mx.array:
        """Return queries or keys x [rows, heads, length, dim], rotated. plain: the rope's own code."""
        if self._given is None:
            return plain(x, offset)
        if self._given.ndim == 1:
            if self._moved is None or self._moved[0] is not offset:
                self._moved = offset, offset + self._given
            return plain(x, self._moved[1])
        cos, sin = self._angles(rope.dims, rope.base, rope.scale)
        half = rope.dims // 2
        a, b = x[..., :half].astype(mx.float32), x[..., half : rope.dims].astype(mx.float32)
        turned = [(a * cos - b * sin).astype(x.dtype), (a * sin + b * cos).astype(x.dtype)]
        return mx.concatenate([*turned, x[..., rope.dims :]], axis=-1)

    def _angles(self, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
        """Return cosines and sines [rows, 1, length, dims / 2] of the tokens' positions."""
        key = dims, base, scale
        if key not in self._made:
            assert self._given is not None
            half = dims // 2
            frequency = mx.exp(mx.array(-np.arange(half, dtype=np.float32)) * (np.log(base).item() / half))
            position = mx.moveaxis(self._given[self._axis_of], 0, -1)[:, None].astype(mx.float32) * scale
            self._made[key] = mx.cos(position * frequency), mx.sin(position * frequency)
        return self._made[key]


class _AxisRope:
    """The mix-in for a rope, which takes its positions from AxisPositions."""

    _axis_positions: AxisPositions

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Return x [rows, heads, length, dim], rotated."""
        return self._axis_positions.turn(self, x, offset, super().__call__)  # type: ignore[misc]
