"""Linears whose products of few rows are computed by the kernel of `skinny.py` or `wgmma.py` and not by MLX.

At start a kernel must agree with the host and cost the device little more than MLX does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from msgspec import Struct

from mlx_tandem.model import backend
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.checking import TOLERANCE, Choice, Rejected, checked, floats
from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.modules import clone, kind_of, mix_in
from mlx_tandem.model.ops.products.measure import HOST_SHARE, Call, Kind, Meter, input_of
from mlx_tandem.model.ops.products.merged import Merged, TransposedLinear
from mlx_tandem.model.ops.products.skinny import EIGHTHS, Form, Skinny, eighths, fits, forms
from mlx_tandem.model.ops.products.wgmma import Product, Wgmma, WideForm, wide_form

log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """The sizes of a linear's weights."""

    outputs: int
    inputs: int
    biased: bool

    @staticmethod
    def of(linear: Any) -> Shape:
        """Return the shape of a linear."""
        outputs, inputs = linear["weight"].shape
        return Shape(outputs, inputs, "bias" in linear)


AnyForm = Form | WideForm
"""Form of one of the kernels."""

Forms = Mapping[Shape, Mapping[int, AnyForm]]
"""Forms by shape and number of tokens (in `eighths`)."""


class FormsByShape(NamedTuple):
    """Forms by number of tokens (in `eighths`) for linears of one shape: those of `skinny.py`, and those of
    `wgmma.py` (`wide`).
    """

    shape: Shape
    forms: dict[int, Form]
    wide: dict[int, WideForm]


class Products(Struct, frozen=True, forbid_unknown_fields=True):
    """The products that the kernel for few rows computes, in steps of the base and in steps with adapters."""

    reason: str
    base: tuple[FormsByShape, ...] = ()
    adapted: tuple[FormsByShape, ...] = ()


def by_shape(forms: Forms) -> tuple[FormsByShape, ...]:
    """Return the forms by shape, divided by kernel, as they are saved."""

    def only(kind: type[Any], own: Mapping[int, AnyForm]) -> dict[int, Any]:
        return {eighths: form for eighths, form in own.items() if isinstance(form, kind)}

    return tuple(FormsByShape(shape, only(Form, own), only(WideForm, own)) for shape, own in forms.items())


def forms_of(kept: Sequence[FormsByShape]) -> Forms:
    """Return the forms that `by_shape` divided."""
    return {one.shape: {**one.forms, **one.wide} for one in kept}


class FewRows:
    """The kernels and the forms in which they are used: in steps of the base, and in steps with adapters.

    Steps with adapters are traced between `begin` and `end`.
    """

    def __init__(self, make: Make, base: Forms | None = None, adapted: Forms | None = None):
        self.base, self.adapted = base or {}, adapted or {}
        self._skinny, self._wgmma = Skinny(make), Wgmma(make)
        self._forms = self.base
        self._newest: Product | None = None

    @property
    def divides(self) -> bool:
        """Whether some outputs are sums of parts."""
        forms = [form for by_shape in (self.base, self.adapted) for own in by_shape.values() for form in own.values()]
        return any(isinstance(form, WideForm) and form.parts > 1 for form in forms)

    def begin(self) -> None:
        """Begin a step with adapters."""
        self._forms, self._newest = self.adapted, None

    def end(self) -> None:
        """End a step with adapters."""
        self._forms, self._newest = self.base, None

    def product(self, linear: Any, x: mx.array) -> mx.array | None:
        """Return the output of a linear with `weight` and optional `bias` for x; None if MLX is to compute it."""
        weight = linear["weight"]
        if x.dtype != weight.dtype:
            return None
        tokens = x.size // x.shape[-1]
        if tokens == 1:  # MLX has a kernel of its own for one token, which is as fast
            return None
        form = self._forms.get(Shape.of(linear), {}).get(eighths(tokens))
        return None if form is None else self.compute(x, weight, linear.get("bias"), form)

    def compute(self, x: mx.array, weight: mx.array, bias: mx.array | None, form: AnyForm) -> mx.array:
        """Return x @ weight.T + bias by the kernel in this form."""
        if isinstance(form, Form):
            return self._skinny(x, weight, bias, form)
        product = self._wgmma(x, weight, bias, form)
        self._newest = None if product.parts is None else product
        return product.y

    def take_parts(self, y: mx.array) -> mx.array | None:
        """Return the parts [parts, *y.shape], float32, of which y is the sum; None unless y is the newest output by
        `wgmma`, was divided, and has no bias.

        Each call forgets the output. MLX never computes y if only its parts are used.
        """
        newest, self._newest = self._newest, None
        return newest.parts if newest is not None and newest.y is y else None


class SkinnyLinear:
    """Mixin of a linear that asks the kernel first."""

    _few: FewRows

    def __call__(self, x: mx.array) -> mx.array:
        """Return the linear's output."""
        y = self._few.product(self, x)
        return super().__call__(x) if y is None else y  # type: ignore[misc]


class SkinnyEmbedding:
    """Mixin of an embedding that is also the output head."""

    _few: FewRows

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits for x [rows, length, width]."""
        y = self._few.product(self, x)
        return super().as_linear(x) if y is None else y  # type: ignore[misc]


def candidates(model: nn.Module, merged: Iterable[Merged]) -> list[nn.Module]:
    """Return the modules of a model that the kernel could compute: linears, merged linears, the output head."""
    merged = list(merged)
    parts = {id(member) for one in merged for member in one.members}
    modules = list({id(m): m for _, m in reversed(model.named_modules()) if id(m) not in parts}.values())
    kinds = (nn.Linear,) if any("lm_head" in m for m in model.modules()) else (nn.Linear, nn.Embedding)
    modules += [one.linear for one in merged]
    own = [m for m in modules if kind_of(m) in kinds or isinstance(m, TransposedLinear)]
    return [m for m in own if fits(m["weight"], m.get("bias"))]


def find_few_rows(module: nn.Module) -> FewRows | None:
    """Return the kernels that the linears within a module use; None if they use none."""
    return next((few for m in module.modules() if (few := getattr(m, "_few", None)) is not None), None)


def speed_up(modules: Iterable[nn.Module], merged: Iterable[Merged], few: FewRows) -> None:
    """Have each of these modules, which `candidates` found, ask `few` first.

    A clone of the model that was made before keeps MLX's products, since the kernel has no gradient.
    """
    chosen = {id(module): module for module in modules}
    for one in merged:
        if chosen.pop(id(one.linear), None) is not None:
            linear = clone(one.linear)
            _mix(linear, few)
            one.give_to_members(linear)
    for module in chosen.values():
        _mix(module, few)


def _mix(module: Any, few: FewRows) -> None:
    module._few = few
    mix_in(module, SkinnyEmbedding if isinstance(module, nn.Embedding) else SkinnyLinear)


# --- The choice at start ---------------------------------------------------------------------------------------------

SHARE_ADAPTED = 0.75
"""The time by which the kernel may take the device longer in steps with adapters, as a share of the host time saved.

In a compiled step MLX's product takes the host ten to thirty microseconds and the kernel three. Steps with adapters
have twice as many operations as others and nearly always wait for the host. In other steps the share is HOST_SHARE.
"""

NOISE = 0.03
"""Share of the time of MLX's product up to which a difference on the device is noise.

Without it, the products of equal speed that fill most of a step of 16 rows were chosen at some starts and not at
others, and steps differed by 0.3 ms.
"""

_ENDS = 512
"""Outputs at either end of a product that are compared."""


def choose(
    modules: Sequence[nn.Module],
    make: dialect.Make | None = None,
    meter: Meter | None = None,
    room: int | None = None,
    *,
    wide: bool | None = None,
) -> Choice[FewRows | None]:
    """Return which products of these linears the kernel computes; None stands for MLX's own product everywhere.

    `make`, `meter`, `room` (bytes of a thread block's own memory) and `wide` (whether to try `wgmma`) default to those
    of this device.
    """
    if make is None:
        here = backend.current().kernels
        if here.target is None or not here.has_matrix_words:
            return Choice(None, "this device has no kernel for them")
        make = dialect.maker(here.target)
    room = dialect.most_room() if room is None else room
    wide = dialect.is_hopper() if wide is None else wide
    if forms(1)[0].room(1) > room:
        return Choice(None, "a block of this device has too little memory of its own")
    check = _Check(make, FewRows(make), meter or Meter(), room, wide)

    def otherwise(reason: str) -> Choice[FewRows | None]:
        if wide:
            log.warning("wgmma is not used: %s", reason)
            return choose(modules, make, meter, room, wide=False)
        return Choice(None, f"the kernel is not used: {reason}")

    return checked("the kernel for few rows", lambda: _choose(modules, check), otherwise)


def described(choice: Choice[FewRows | None]) -> Products:
    """Return a choice as plain data, from which `made` builds the same kernel."""
    few = choice.chosen
    return (
        Products(choice.reason) if few is None else Products(choice.reason, by_shape(few.base), by_shape(few.adapted))
    )


def made(given: Products) -> FewRows:
    """Return the kernel in these forms, which another process has checked."""
    return FewRows(dialect.maker("cuda"), forms_of(given.base), forms_of(given.adapted))


def _choose(modules: Sequence[nn.Module], check: _Check) -> Choice[FewRows | None]:
    """Return the products for which the kernel costs the device little enough. Raise Rejected where it is wrong."""
    kinds: dict[Shape, Kind] = {}
    for module in modules:
        shape = Shape.of(module)
        kinds.setdefault(shape, Kind(shape.inputs, module["weight"].nbytes, [])).modules.append(module)
    if not kinds:
        return Choice(None, "no linear has a type and shape for the kernel")
    dialect.compile_together(partial(check.call_all, kinds))
    timed = {shape: check.forms(shape, kind) for shape, kind in kinds.items()}
    base, adapted = (_within(timed, share) for share in (HOST_SHARE, SHARE_ADAPTED))
    if not any(adapted.values()):
        return Choice(None, "the kernel is slower")
    spared = max(one.spared for own in timed.values() for one in own)
    log.info("the kernel for few rows spares the host up to %.1f µs a product", spared * 1e6)
    told = ", ".join(_told(shape, base[shape], own) for shape, own in adapted.items() if own)
    return Choice(FewRows(check.make, base, adapted), f"the kernel is used for {told}")


def _within(timed: Mapping[Shape, Sequence[Timed]], share: float) -> dict[Shape, dict[int, AnyForm]]:
    """Return the forms by shape and eighths for which the kernel is fast enough at this share of the host's time."""
    return {shape: {one.eighths: one.form for one in own if one.is_worth(share)} for shape, own in timed.items()}


def _told(shape: Shape, base: Mapping[int, AnyForm], adapted: Mapping[int, AnyForm]) -> str:
    """Return a shape and the numbers of tokens that the kernel is used for, in words.

    A number stands for all numbers of tokens that are rounded up to it.
    """

    def listed(forms: Mapping[int, AnyForm]) -> str:
        return ", ".join(str(8 * eighths) for eighths in forms) or "no"

    beside = "" if base.keys() == adapted.keys() else f" ({listed(adapted)} with adapters)"
    return f"{shape.outputs} x {shape.inputs} with {listed(base)} tokens{beside}"


class Timed(NamedTuple):
    """The best form of the kernel for a number of tokens."""

    eighths: int
    """The number of tokens, divided by eight."""

    form: AnyForm
    seconds: float
    """Seconds of the kernel on the device."""

    plain: float
    """Seconds of MLX's product on the device."""

    spared: float
    """Seconds of the host that the kernel saves."""

    def is_worth(self, share: float) -> bool:
        """Return whether the kernel takes the device no longer than MLX's product, but for noise and this share of the
        host's time that it saves.
        """
        return self.seconds - self.plain <= share * self.spared + NOISE * self.plain


@dataclass(frozen=True)
class _Check:
    """The measurements of the kernels on one device.

    make: makes the kernels; room: the bytes of a thread block's own memory; wide: whether to try `wgmma`.
    """

    make: dialect.Make
    kernels: FewRows
    meter: Meter
    room: int
    wide: bool

    def call_all(self, kinds: Mapping[Shape, Kind]) -> None:
        """Call each form that `forms` may try for these linears, without evaluating its product."""
        for (shape, kind), many in product(kinds.items(), EIGHTHS):
            linear = kind.modules[0]
            for form in self._fitting(shape, many):
                _product(self.kernels, form, linear, mx.zeros((8 * many, shape.inputs), linear["weight"].dtype))

    def _fitting(self, shape: Shape, many: int) -> Sequence[AnyForm]:
        """Return the forms for this many times eight tokens that a thread block of this device has memory for."""
        wide = wide_form(many, shape.outputs) if self.wide else None
        tried: Sequence[AnyForm] = forms(many) if wide is None else (wide,)
        return [form for form in tried if form.room(many) <= self.room]

    def forms(self, shape: Shape, kind: Kind) -> list[Timed]:
        """Return the best form for each entry of EIGHTHS, in ascending order.

        After two consecutive entries that not even steps with adapters would use, `ops/products/skinny.py` is no longer
        tried; these two are included. Raise Rejected where a kernel is wrong.
        """
        linears: list[Any] = kind.several()
        dtype = linears[0]["weight"].dtype
        best: list[Timed] = []
        for many in EIGHTHS:
            wide = wide_form(many, shape.outputs) if self.wide else None
            if wide is None and len(best) > 1 and not any(one.is_worth(SHARE_ADAPTED) for one in best[-2:]):
                continue
            if not (fitting := self._fitting(shape, many)):
                continue
            tokens = 8 * many
            x = input_of(kind, dtype, tokens).reshape(tokens, -1)  # two axes, as between the layers of a decode step
            times: dict[AnyForm, float] = {}
            for form in fitting:
                error = _error(partial(_product, self.kernels, form, linears[0]), linears[0], x[: tokens - 3])
                if not error <= TOLERANCE[dtype]:
                    raise Rejected(f"wrong by {error:.1e} in {shape.outputs} x {shape.inputs}, {tokens} tokens")
                times[form] = self._seconds(partial(_product, self.kernels, form), linears, x)
            form = min(times, key=times.__getitem__)
            plain, spared = self._seconds(_plain, linears, x), self._spared(form, linears, x)
            best.append(Timed(many, form, times[form], plain, spared))
        return best

    def _spared(self, form: AnyForm, linears: Sequence[Any], x: mx.array) -> float:
        """Return the seconds of the host that the kernel saves for one product."""
        ways = partial(_product, self.kernels, form), _plain
        kernel, plain = (self.meter.host_seconds([partial(way, each) for each in linears], x) for way in ways)
        return max(0.0, plain - kernel) / len(linears)

    def _seconds(self, way: Callable[[Any, mx.array], mx.array], linears: Sequence[Any], x: mx.array) -> float:
        """Return the seconds of one product on the device."""
        return self.meter.device_seconds([partial(way, each) for each in linears], x) / len(linears)


def _product(kernels: FewRows, form: AnyForm, linear: Any, x: mx.array) -> mx.array:
    return kernels.compute(x, linear["weight"], linear.get("bias"), form)


def _plain(linear: Any, x: mx.array) -> mx.array:
    y: mx.array = linear.as_linear(x) if isinstance(linear, nn.Embedding) else linear(x)
    return y


def _error(product: Call, linear: Any, x: mx.array) -> float:
    """Return the error of the first and last outputs, relative to the largest of their numbers.

    Either end may be padding with weights of zero, so both are compared together. The expected sums are float32 on
    the host, since a GPU may round the factors of a product.
    """
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
