"""A second module tree over the served model's arrays, whose linears add the adapters that are being trained.

The tree is cloned before the served one is adapted to its cache, so both run mlx-lm's modules and share every weight.
Adapter arrays are arguments of each call: what a trace captured would get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.model.adapted import Target, adapt, find_targets


class Segment(NamedTuple):
    """Rows start … stop of the batch go through `pair`, (A [in, r], B [r, out]) with the scale in B."""

    start: int
    stop: int
    pair: tuple[mx.array, mx.array]


class Tree:
    """The clone, its layers, and the linears in them by path."""

    def __init__(self, model: nn.Module, dtype: mx.Dtype):
        """`dtype`: of the adapters' products, as the served ones have it."""
        self.model: Any = model
        self.dtype = dtype
        self.layers: list[Any] = list(self.model.layers)
        self.has_experts = False
        self._bound: Mapping[str, Sequence[Segment]] = {}
        self._rows = 1
        self._masks: dict[tuple[tuple[int, int, int], ...], mx.array] = {}
        inside = {id(m): i for i, layer in enumerate(self.layers) for m in layer.modules()}
        self.linears: dict[str, LinearShape] = {}
        self.layer_of: dict[str, int] = {}
        for path, target in find_targets(model).items():
            layer = inside.get(id(target.module))
            if layer is None:
                continue  # gradients are taken layer by layer
            self.linears[path], self.layer_of[path] = target.shape, layer
            adapt(target, self)
            self.has_experts |= bool(target.shape.experts)
        for _, module in model.named_modules():
            if isinstance(module, (SwitchGLU, SwitchMLP)):
                module._training = True  # its integer indices are kept out of the gradient then

    @contextmanager
    def bound(self, rows: int, segments: Mapping[str, Sequence[Segment]]) -> Iterator[None]:
        """Inside: these linears add these adapters to a batch of so many rows."""
        if rows != self._rows:
            self._masks.clear()
        self._bound, self._rows = segments, rows
        try:
            yield
        finally:
            self._bound = {}

    def dense(self, target: Target, x: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
        y = plain(x)
        segments = self._bound.get(target.path)
        if not segments:
            return y
        if len(segments) == 1 and segments[0].stop - segments[0].start == self._rows:
            return self._add(y, x, *segments[0].pair)
        # All adapters side by side as one, and each row's share of it: few products, and none of them narrow.
        a, b = (
            mx.concatenate([s.pair[0] for s in segments], axis=-1),
            mx.concatenate([s.pair[1] for s in segments], axis=-2),
        )
        own = self._mask(segments)
        own = own[:, None] if x.ndim == 3 else mx.repeat(own, x.shape[0] // self._rows, axis=0)
        return self._add(y, x, a, b, own)

    def _mask(self, segments: Sequence[Segment]) -> mx.array:
        """[rows, ranks]: 1 where a row's own adapter is."""
        key = tuple((s.start, s.stop, s.pair[0].shape[-1]) for s in segments)
        made = self._masks.get(key)
        if made is None:
            mask = np.zeros((self._rows, sum(rank for _, _, rank in key)), np.float32)
            at = 0
            for start, stop, rank in key:
                mask[start:stop, at : at + rank] = 1.0
                at += rank
            made = self._masks[key] = mx.array(mask).astype(self.dtype)
        return made

    def _add(self, y: mx.array, x: mx.array, a: mx.array, b: mx.array, own: mx.array | None = None) -> mx.array:
        """As the served linear computes it, so that both agree where the same kernels run."""
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        u = x.astype(self.dtype) @ a
        if own is not None:
            u = u * own
        return mx.addmm(y, u, b) if y.dtype == self.dtype else y + (u @ b).astype(y.dtype)

    def switch(self, target: Target, x: mx.array, y: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        """One adapter for the whole batch: its matrix of the expert that each entry goes through."""
        segments = self._bound.get(target.path)
        if not segments:
            return y
        (segment,) = segments
        a, b = (part.astype(self.dtype) for part in segment.pair)
        u = mx.gather_mm(x.astype(self.dtype), a, rhs_indices=indices)
        return y + mx.gather_mm(u, b, rhs_indices=indices).astype(y.dtype)
