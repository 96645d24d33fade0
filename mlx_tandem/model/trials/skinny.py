"""The kernel for products of few rows beside MLX's own product on this device: whether it is right, and hardly
slower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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

SHARE = 0.25
"""Of the time that a product by the kernel spares the host, what it may take the device longer. In a compiled step
MLX's product takes the host ten to thirty microseconds, the kernel three, and with few rows steps wait for the host as
often as for the device."""

_ENDS = 512  # outputs at either end that are compared

Forms = dict[Shape, dict[int, Form]]


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
    allowed = trial.spared(min(kinds.values(), key=lambda kind: kind.nbytes)) * SHARE
    log.info("the kernel for few rows may take %.1f µs longer than MLX's product", allowed * 1e6)
    chosen = {shape: trial.forms(shape, kind, allowed) for shape, kind in kinds.items()}
    return Choice(FewRows(trial.kernel, chosen) if any(chosen.values()) else None, _told(chosen))


def _told(chosen: Forms) -> str:
    parts = [f"{shape.outputs} x {shape.inputs} up to {8 * max(own)} tokens" for shape, own in chosen.items() if own]
    return f"the kernel is taken for {', '.join(parts)}" if parts else "the kernel is slower"


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

    def forms(self, shape: Shape, kind: Kind, allowed: float) -> dict[int, Form]:
        """Up to how many tokens the kernel is right and takes no longer than `allowed` more, and in which form. Raises
        ValueError where it is wrong."""
        linears: list[Any] = kind.several()
        dtype = linears[0]["weight"].dtype
        best: dict[int, Form] = {}
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
            if not times or min(times.values()) > self._seconds(_plain, linears, x) + allowed:
                break
            best[many] = min(times, key=times.__getitem__)
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
