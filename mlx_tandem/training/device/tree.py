"""A second module tree over the served model's arrays, whose linears add the adapters that are being trained.

The tree is cloned before the served one is adapted to its cache, so both run mlx-lm's modules and share every weight.
Adapter arrays are arguments of each call: what a trace captured would get no gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.model.deterministic import Deterministic
from mlx_tandem.model.targets import Target, adapt, find_head, find_targets

Pair = tuple[mx.array, mx.array]

SCORE_HEAD = "score"
"""The path of the score head among the pairs of a reward model: A is the head [hidden, 1], and B [1, 0] is empty."""


class Dropout(NamedTuple):
    """The inputs of A that one micro-batch leaves out. The others are scaled up, so that the mean stays the same."""

    rate: float  # probability that an input is left out; below 1
    seed: tuple[int, ...]  # the same seed leaves out the same inputs, which the backward relies on

    def within(self, part: int) -> Dropout:
        """Return the dropout of a part of the micro-batch, by a number that no other part has."""
        return Dropout(self.rate, (*self.seed, part))

    def apply(self, x: mx.array, path: str) -> mx.array:
        """Return the inputs `x` of the linear at `path` with some of them zero. Each linear has its own."""
        word = np.random.SeedSequence([*self.seed, zlib.crc32(path.encode())]).generate_state(1, np.uint64)[0]
        kept = mx.random.bernoulli(1.0 - self.rate, x.shape, key=mx.random.key(int(word)))
        return mx.where(kept, x / (1.0 - self.rate), mx.zeros((), x.dtype))


class Segment(NamedTuple):
    """Rows start … stop of a batch, and the adapter that they go through: A [in, r] and B [r, out] with the scale in B,
    of the tree's type.
    """

    start: int
    stop: int
    pair: Pair
    dropout: Dropout | None = None


class Tree:
    """The clone of a model, its layers, and the linears in them by path."""

    def __init__(self, model: nn.Module, dtype: mx.Dtype, exact: Deterministic | None = None):
        """Prepare a clone whose adapters and their products have the type `dtype`, as the served ones have.

        exact: the arithmetic of the model under `--deterministic`.
        """
        self.model: Any = model
        self.exact = exact
        self.dtype = dtype
        self.layers: list[Any] = list(self.model.layers)
        self.has_experts = False
        self._bound: Mapping[str, Sequence[Segment]] = {}
        self._rows = 1
        self._heard: list[mx.array] | None = None  # inputs of the output head, while they are wanted
        inside = {id(m): i for i, layer in enumerate(self.layers) for m in layer.modules()}
        self.linears: dict[str, LinearShape] = {}
        self.head: dict[str, LinearShape] = {}  # the output head by its path, if an adapter may change it
        self.layer_of: dict[str, int] = {}
        for path, target in find_targets(model).items():
            layer = inside.get(id(target.module))
            if layer is None:
                continue  # gradients are taken layer by layer
            self.linears[path], self.layer_of[path] = target.shape, layer
            adapt(target, self)
            self.has_experts |= bool(target.shape.experts)
        head = find_head(model)
        if head is not None:
            self.head[head.path] = head.shape
            adapt(head, self)
        for _, module in model.named_modules():
            if isinstance(module, (SwitchGLU, SwitchMLP)):
                module._training = True  # its integer indices are kept out of the gradient then

    @contextmanager
    def bound(self, rows: int, segments: Mapping[str, Sequence[Segment]]) -> Iterator[None]:
        """Let the linears of these paths add these adapters to a batch of so many rows, inside the block."""
        self._bound, self._rows = segments, rows
        try:
            yield
        finally:
            self._bound = {}

    def hidden(self, leave: Callable[[], mx.array]) -> mx.array:
        """Return the input of the output head in the forward that `leave` runs, whose logits are not computed."""
        heard = self._heard = []
        try:
            leave()
        finally:
            self._heard = None
        (x,) = heard
        return x

    def dense(self, target: Target, x: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
        """Return what a linear makes of `x`, with the adapters of its rows added."""
        if target.is_head and self._heard is not None:
            self._heard.append(x)
        y = plain(x)
        segments = self._bound.get(target.path)
        if not segments:
            return y
        if target.is_head and len(x) == 1:  # the positions of all rows lie in one
            return self._added(y.squeeze(0), x.squeeze(0), target, segments)[None]
        return self._added(y, x, target, segments)

    def _added(self, y: mx.array, x: mx.array, target: Target, segments: Sequence[Segment]) -> mx.array:
        """Return `y`, what a linear makes of `x`, with the adapters of the rows added."""
        if len(segments) == 1 and segments[0].stop - segments[0].start == self._rows:
            return self._add(y, x, target.path, segments[0])
        # The rows of an adapter are neighbours, so that splitting copies nothing. Some rows may have no adapter here.
        known = {segment.start: segment for segment in segments}
        edges = sorted({0, self._rows}.union(*((segment.start, segment.stop) for segment in segments)))
        cuts = [edge * (x.shape[0] // self._rows) for edge in edges[1:-1]]  # rows and positions may be one axis
        shares = zip(edges, mx.split(y, cuts), mx.split(x, cuts), strict=False)
        return mx.concatenate([self._add(y, x, target.path, known[at]) if at in known else y for at, y, x in shares])

    def changes(self, target: Target) -> bool:
        """Return whether an adapter is added to this linear now."""
        return target.path in self._bound

    def joined(self, target: Target, x: mx.array) -> mx.array | None:
        """Return None: in training, linears are computed one by one."""
        return None

    def _add(self, y: mx.array, x: mx.array, path: str, segment: Segment) -> mx.array:
        """Add an adapter's delta as the served linear does, so that both agree where the same kernels run."""
        a, b = segment.pair
        if self.exact is not None:
            inputs = self._inputs(x, path, segment)
            delta = self.exact.deltas.learning(inputs if inputs.ndim == 3 else inputs[None], a, b)
            return y + delta.reshape(y.shape).astype(y.dtype)
        u = self._inputs(x, path, segment) @ a
        return mx.addmm(y, u, b) if y.dtype == self.dtype else y + (u @ b).astype(y.dtype)

    def _inputs(self, x: mx.array, path: str, segment: Segment) -> mx.array:
        """Return the inputs of A."""
        x = x.astype(self.dtype)
        return x if segment.dropout is None else segment.dropout.apply(x, path)

    def switch(self, target: Target, x: mx.array, y: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        """Add one adapter to the whole batch, by its matrices for the expert that each entry goes through."""
        segments = self._bound.get(target.path)
        if not segments:
            return y
        (segment,) = segments
        a, b = segment.pair if self.exact is None else self.exact.deltas.widened(*segment.pair)
        u = mx.gather_mm(self._inputs(x, target.path, segment), a, rhs_indices=indices)
        return y + mx.gather_mm(u, b, rhs_indices=indices).astype(y.dtype)
