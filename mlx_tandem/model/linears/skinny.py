"""Linears whose products of few rows are computed by `kernels/skinny.py` or `kernels/wgmma.py` and not by MLX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.kernels.skinny import Form, Skinny, eighths, fits
from mlx_tandem.model.kernels.wgmma import Product, Wgmma, WideForm
from mlx_tandem.model.linears.merged import Merged
from mlx_tandem.model.linears.transposed import TransposedLinear
from mlx_tandem.model.modules import clone, mix_in


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
    own = [m for m in modules if type(m) in kinds or isinstance(m, TransposedLinear)]
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
