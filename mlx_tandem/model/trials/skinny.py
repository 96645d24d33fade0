"""The kernel for products of few rows beside MLX's own product on this device: whether it is right, and hardly
slower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.skinny import EIGHTHS, Form, Skinny, forms
from mlx_tandem.model.linears.products import Call, Kind, Meter, input_of
from mlx_tandem.model.linears.skinny import FewRows, Shape
from mlx_tandem.model.trials.lora import TOLERANCE, floats

log = logging.getLogger(__name__)

SHARE, SHARE_ADAPTED = 0.25, 0.75
"""Of the time that a product by the kernel spares the host, what it may take the device longer. In a compiled step
MLX's product takes the host ten to thirty microseconds, the kernel three, and with few rows steps wait for the host as
often as for the device; those with adapters, which have twice as many operations, nearly always."""

_ENDS = 512  # outputs at either end that are compared


class Choice(NamedTuple):
    few: FewRows | None  # None: all products are MLX's
    reason: str  # for people


def choose(
    modules: Sequence[nn.Module],
    make: dialect.Make | None = None,
    meter: Meter | None = None,
    room: int | None = None,
) -> Choice:
    """Which products of these linears the kernel takes over. `make`, `meter`, and `room` in bytes: if not those of the
    device."""
    if make is None:
        if "cuda" not in dialect.available():
            return Choice(None, "this device has no kernel for them")
        make = dialect.maker("cuda")
    room = dialect.most_room() if room is None else room
    if forms(1)[0].room(1) > room:
        return Choice(None, "a block of this device has too little memory of its own")
    try:
        return _choose(modules, _Trial(Skinny(make), meter or Meter(), room))
    except Exception as e:  # whatever a compiler or a driver says
        log.warning("the kernel for few rows failed its check", exc_info=True)
        return Choice(None, f"the kernel is not taken: {type(e).__name__}: {e}".strip()[:500])
    finally:
        mx.clear_cache()


def _choose(modules: Sequence[nn.Module], trial: _Trial) -> Choice:
    kinds: dict[Shape, Kind] = {}
    for module in modules:
        shape = Shape.of(module)
        kinds.setdefault(shape, Kind(shape.inputs, module["weight"].nbytes, [])).modules.append(module)
    if not kinds:
        return Choice(None, "no linear has a type and shape for the kernel")
    spared = trial.spared(min(kinds.values(), key=lambda kind: kind.nbytes))
    log.info("the kernel for few rows spares the host %.1f µs a product", spared * 1e6)
    timed = {shape: trial.forms(shape, kind, spared * SHARE_ADAPTED) for shape, kind in kinds.items()}
    base, adapted = (_within(timed, spared * share) for share in (SHARE, SHARE_ADAPTED))
    if not any(adapted.values()):
        return Choice(None, "the kernel is slower")
    told = ", ".join(_told(shape, base[shape], own) for shape, own in adapted.items() if own)
    return Choice(FewRows(trial.kernel, base, adapted), f"the kernel is taken for {told}")


def _within(timed: Mapping[Shape, Sequence[Timed]], allowed: float) -> dict[Shape, dict[int, Form]]:
    """Up to as many tokens as it takes no longer for."""
    return {
        shape: {one.eighths: one.form for one in takewhile(lambda one: one.longer <= allowed, own)}
        for shape, own in timed.items()
    }


def _told(shape: Shape, base: Mapping[int, Form], adapted: Mapping[int, Form]) -> str:
    most, more = 8 * max(base, default=0), 8 * max(adapted)
    beside = f" ({more} with adapters)" if more > most else ""
    return f"{shape.outputs} x {shape.inputs} up to {most} tokens{beside}"


class Timed(NamedTuple):
    """The best form for so many tokens, and the seconds that it takes the device longer than MLX's product."""

    eighths: int
    form: Form
    longer: float


@dataclass(frozen=True)
class _Trial:
    kernel: Skinny
    meter: Meter
    room: int

    def spared(self, kind: Kind) -> float:
        """Seconds of the host for a product."""
        x, linears = input_of(kind, kind.modules[0]["weight"].dtype, 8), kind.several()
        ways = partial(_product, self.kernel, forms(1)[0]), _plain
        kernel, plain = (self.meter.host_seconds([partial(way, each) for each in linears], x) for way in ways)
        return max(0.0, plain - kernel) / len(linears)

    def forms(self, shape: Shape, kind: Kind, allowed: float) -> list[Timed]:
        """Up to how many tokens the kernel takes no longer than `allowed` more. Raises ValueError where it is wrong."""
        linears: list[Any] = kind.several()
        dtype = linears[0]["weight"].dtype
        best: list[Timed] = []
        for many in EIGHTHS:
            tokens = 8 * many
            x = input_of(kind, dtype, tokens)
            times: dict[Form, float] = {}
            for form in forms(many):
                if form.room(many) > self.room:
                    continue
                error = _error(partial(_product, self.kernel, form, linears[0]), linears[0], x[: tokens - 3])
                if not error <= TOLERANCE[dtype]:
                    raise ValueError(f"wrong by {error:.1e} in {shape.outputs} x {shape.inputs}, {tokens} tokens")
                times[form] = self._seconds(partial(_product, self.kernel, form), linears, x)
            if not times:
                break
            form = min(times, key=times.__getitem__)
            best.append(Timed(many, form, times[form] - self._seconds(_plain, linears, x)))
            if best[-1].longer > allowed:
                break
        return best

    def _seconds(self, way: Callable[[Any, mx.array], mx.array], linears: Sequence[Any], x: mx.array) -> float:
        """Of a product, on the device."""
        return self.meter.device_seconds([partial(way, each) for each in linears], x) / len(linears)


def _product(kernel: Skinny, form: Form, linear: Any, x: mx.array) -> mx.array:
    return kernel(x, linear["weight"], linear.get("bias"), form)


def _plain(linear: Any, x: mx.array) -> mx.array:
    y: mx.array = linear.as_linear(x) if isinstance(linear, nn.Embedding) else linear(x)
    return y


def _error(product: Call, linear: Any, x: mx.array) -> float:
    """Of the first and last outputs, of the largest of their numbers (either may be padding, with weights of zero);
    float32 sums on the host: a GPU may round what it multiplies."""
    y, weight = product(x), linear["weight"]
    apart = largest = 0.0
    for part in (slice(0, _ENDS), slice(-_ENDS, None)):
        want = floats(x) @ floats(weight[part]).T
        if "bias" in linear:
            want += floats(linear["bias"][part])
        off = float(np.abs(floats(y[..., part]) - want).max())
        apart = max(apart, off if np.isfinite(off) else np.inf)
        largest = max(largest, float(np.abs(want).max()))
    return apart / (largest or 1.0)
