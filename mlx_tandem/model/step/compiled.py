"""The compiled steps of a runner. Each is traced once for its key, and the last used are kept."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import mlx.core as mx

from mlx_tandem.model import backend
from mlx_tandem.model.device import machine_bytes
from mlx_tandem.model.inputs import Numbers, specs
from mlx_tandem.model.ops.sampling.sampler import SamplingFlags
from mlx_tandem.model.step.draw import Drawing
from mlx_tandem.model.step.forward import Forward, Ranges, Step
from mlx_tandem.model.step.operands import StepKey
from mlx_tandem.model.step.pauses import Pause

LAYER_BYTES = 220_000
"""The host's memory that a compiled step takes for each layer, measured on the built-in model."""

COMPILED_BYTES, COMPILED_SHARE = 192 << 20, 0.01
"""Memory for compiled steps: COMPILED_BYTES, or COMPILED_SHARE of the machine's memory if that is more. The last used
steps are kept. Shapes and sampling flags have few values each, but many combinations."""

FEWEST_COMPILED, MOST_COMPILED = 64, 256
"""Bounds of the number of compiled steps that are kept. A mix of requests has about FEWEST_COMPILED kinds of steps at a
time. Tracing a step again takes milliseconds."""

KEPT_DRAWINGS = 64
"""Most compiled functions for draws after a forward that are kept. The last used ones are."""

USUAL = 3
"""Number of times that a rare kind of step runs before it is traced. Most such kinds occur only a few times."""

MET = 1024
"""Most rare kinds of steps that are counted."""


def kept_steps(layers: int, memory: int) -> int:
    """Return how many compiled steps of a model with so many layers are kept on a machine with `memory` bytes."""
    most = max(COMPILED_BYTES, int(COMPILED_SHARE * memory))
    return min(max(most // (LAYER_BYTES * max(layers, 1)), FEWEST_COMPILED), MOST_COMPILED)


class CompiledSteps:
    """The steps and draws of a forward, compiled by their keys.

    Attributes:
        most: Most steps that are kept.
        first_uses: Number of steps since the start that were traced, or that ran untraced since their kind is rare.
        untraced: Number of times that a kind of mixed steps runs before it is traced. It is 0 where tracing costs
            little, unless the owner changes it.
        compiles: Whether steps are compiled.
    """

    def __init__(self, forward: Forward):
        self.untraced = 0 if backend.current().steps.tracing_is_cheap else USUAL
        self.most = kept_steps(forward.num_layers, machine_bytes())
        self.first_uses = 0
        self.compiles = True
        self._forward = forward
        self._steps: OrderedDict[StepKey, Step] = OrderedDict()
        self._drawings: OrderedDict[tuple[SamplingFlags, int], Drawing] = OrderedDict()
        self._met: Counter[StepKey] = Counter()  # rare kinds of steps

    def kept(self) -> list[StepKey]:
        """Return the keys of the steps that are kept; the last used one is the last."""
        return list(self._steps)

    def clear(self) -> None:
        """Drop all steps, for example since the adapters' arrays have new shapes."""
        self._steps.clear()

    def reset(self) -> None:
        """Drop everything compiled."""
        self._steps.clear()
        self._drawings.clear()

    def step(self, key: StepKey, numbers: Sequence[Numbers], in_place: Ranges, pause: Pause, *, untraced: int) -> Step:
        """Return the step with this key, compiled unless it pauses or is of one of too many kinds to trace each.

        numbers: its inputs, whose specs follow from the key; pause: how it waits for the device while it is built;
        untraced: how often its kind runs before it is traced.
        """
        eager = not self.compiles or any(in_place) or bool(key.common_offset) or bool(pause.layers)
        if eager or (untraced and not self._is_usual(key, untraced)):
            self.first_uses += bool(untraced)
            return self._forward.step(key, specs(numbers), in_place, pause)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = mx.compile(self._forward.step(key, specs(numbers), in_place, pause))
            self.first_uses += 1
            if len(self._steps) > self.most:
                self._met.pop(self._steps.popitem(last=False)[0], None)
        self._steps.move_to_end(key)
        return found

    def has(self, key: StepKey) -> bool:
        """Return whether the step with this key is compiled."""
        return key in self._steps

    def drawing(self, flags: SamplingFlags, num_new: int) -> Drawing:
        """Return the compiled function that draws with these flags by masks, of which the device lacks so many."""
        key = flags, num_new
        if key not in self._drawings:
            draw = self._forward.drawing(flags, num_new)
            self._drawings[key] = mx.compile(draw) if self.compiles else draw
            if len(self._drawings) > KEPT_DRAWINGS:
                self._drawings.popitem(last=False)
        self._drawings.move_to_end(key)
        return self._drawings[key]

    def _is_usual(self, key: StepKey, untraced: int) -> bool:
        """Count a kind of step; return whether it is traced already or has run often enough to be worth tracing."""
        if len(self._met) >= MET:
            self._met.clear()
        self._met[key] += 1
        return key in self._steps or self._met[key] > untraced
