"""Pauses of a forward while it is built, which bound how many of its layers are in memory at once.

MLX's back end for a GPU keeps the inputs of every operation until the graph or the command buffer of the operation is
done. Without pauses the activations of all layers of a long chunk, and the keys and values that all of them gather,
would be in memory together. On Metal a dispatch also ends the command buffer; macOS would stop a command buffer that
takes too long. Which forwards pause is said by the device (`model/backend/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.model import backend
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.ops.attention.paged import MOST_QUERIES

_ANY = 1 << 62


class Pause(NamedTuple):
    """The pauses of one forward.

    Attributes:
        layers: Number of layers with keys and values in a group. A group is dispatched as soon as it is built. 0: no
            pauses.
        ahead: Whether the host dispatches a group before it waits for the group before, so that the device always has
            work. If not, the host waits for each group before it builds the next one.
    """

    layers: int = 0
    ahead: bool = True


NO_PAUSE = Pause()
"""The pauses of a forward that is built without any."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """The rule that decides which forwards of a runner pause.

    Attributes:
        tokens: Fewest tokens, with padding, of a long forward, which always pauses, however much it gathers.
        length: Fewest tokens of each row of a long forward.
        group: Most layers of a group of a long forward.
        positions: Most positions whose gathered keys and values may be in memory, summed over all layers in flight.
        layers: Number of the model's layers with keys and values.
    """

    tokens: int
    length: int = 1
    group: int = 1
    positions: int = _ANY
    layers: int = 0

    def of(self, rows: int, length: int, gathered: int) -> Pause:
        """Return the pauses of a forward of tokens [rows, length] whose layers gather `gathered` positions each."""
        fits = self.positions // max(gathered, 1)
        is_long = length >= self.length and rows * length >= self.tokens
        if not is_long and fits >= self.layers:
            return NO_PAUSE
        return Pause(max(1, min(self.group if is_long else self.layers, fits // 2)), ahead=fits >= 2)

    def may_be(self, tokens: int, gathered: int) -> bool:
        """Return whether a forward with these numbers of prompt tokens and gathered positions, without padding, may
        pause.
        """
        # A chunk may be padded to four times as many tokens, and a table to twice as many positions.
        return 4 * tokens >= self.tokens or 2 * gathered * self.layers > self.positions


def of_device(limits: StepLimits, layers: int) -> Pauses | None:
    """Return the pauses of forwards of a model with `layers` layers with keys and values; None: no forward pauses.

    There are no pauses if MLX's own operations write the pool: they would copy arrays that the runner still holds while
    a forward is built.
    """
    long = backend.current().steps.long_forward
    if long is None or inplace.writing().store is None:
        return None
    if not long.gathers:
        return Pauses(long.tokens, group=long.group)
    return Pauses(long.tokens, MOST_QUERIES + 1, long.group, limits.positions, layers)


class Pacer:
    """The pauses of one forward while it is built. All caches of the forward share one Pacer."""

    def __init__(self, pause: Pause):
        self.pause = pause
        self._layers = 0
        self._computing: mx.array | None = None

    def arrive(self, x: mx.array) -> None:
        """Count a layer, given an array `x` that the layer has computed. At the end of each group dispatch `x`, and
        wait as `Pause.ahead` says.
        """
        self._layers += 1
        if not self.pause.layers or self._layers % self.pause.layers:
            return
        mx.async_eval(x)
        before, self._computing = (self._computing, x) if self.pause.ahead else (x, None)
        if before is not None:
            mx.eval(before)
