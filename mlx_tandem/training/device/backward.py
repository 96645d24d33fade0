"""One micro-batch forward and backward in slices: short evaluations between which steps may run.

The forward keeps each layer's input. The backward goes through the layers from the top, with one vector-Jacobian
product for each. That gives the gradients of a plain backward to the bit, and needs no more memory than checkpointing
every layer. Where there is memory for all activations, nothing is computed again: forward and backward are one graph,
which is evaluated in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tandem.engine.plan import Wait
from mlx_tandem.training.device.layerwise import Layer, LayerwiseForward
from mlx_tandem.training.device.logprobs import logprobs, model_logprobs, sampler_logprobs
from mlx_tandem.training.device.slices import Slices, launched
from mlx_tandem.training.device.tree import SCORE_HEAD, Dropout, Pair, Segment, Tree

HEAD_BYTES = 128 << 20
"""Bytes of logits that are made at a time: those of a whole micro-batch would be larger than everything else."""


class Weights(NamedTuple):
    """One trainer's adapter over rows start … stop of a micro-batch."""

    start: int
    stop: int
    pairs: Mapping[str, Pair]  # by path, as the tree multiplies by them: B is scaled
    gradients: dict[str, Pair]  # float32; those of the micro-batch are added
    span: slice = slice(0, 0)  # its part of the completion tokens of the micro-batch
    dropout: Dropout | None = None


class Positions(NamedTuple):
    """The completion tokens of a micro-batch: where each is predicted, which it is, and at which temperature."""

    at: mx.array  # [n] int32, row · length + position
    target: mx.array  # [n] int32
    temperature: mx.array | None  # [n] float32; None: 1 for all
    truncation: mx.array | None  # [n, 3] float32: top_p, top_k, min_p; None: no draw was truncated
    first: int = 0  # number of completion tokens of the micro-batch before these


Draw = tuple[float, float, float, float]
"""The temperature, top_p, top_k and min_p of a draw; top_k is the size of the vocabulary where off."""


class MicroBatch:
    """Rows of tokens on their way through the model.

    After `forward` it has `logprobs` [n] of the distributions that the tokens were drawn from, `whole` [n] of the same
    without truncation, `plain` [n] at temperature 1 and, if asked for, `base` [n], as `whole`, of the model without
    adapters.
    """

    def __init__(
        self,
        tree: Tree,
        layerwise: LayerwiseForward,
        tokens: mx.array,
        where: Positions,
        adapters: Sequence[Weights],
        forward_layers: int,
        caches: list[Any] | None = None,
    ):
        """Begin with `tokens` [rows, length], padded on the right: causal attention keeps padding out of what counts.

        `adapters` cover all rows, one behind the other. `forward_layers` layers go forward in one slice; backward it is
        one. `caches` are those of pages, one for each layer; None: each row is a whole sequence.
        """
        self._tree = tree
        self._forward_layers = forward_layers
        self._where = where
        self._adapters = adapters
        self._rows, self._length = tokens.shape
        self._entry, self._layers = layerwise.enter(tokens, caches)
        self._leave = layerwise.leave
        self._paths: list[list[tuple[int, str]]] = [[] for _ in self._layers]  # (adapter, path) in each layer
        self._head_paths: list[tuple[int, str]] = []  # (adapter, path) of those that change the output head
        for i, weights in enumerate(adapters):
            for path in weights.pairs:
                in_head = path in tree.head or path == SCORE_HEAD
                places = self._head_paths if in_head else self._paths[tree.layer_of[path]]
                places.append((i, path))
        self._lowest = next((i for i, paths in enumerate(self._paths) if paths), len(self._layers))
        self._inputs: list[mx.array] = []
        self._states: mx.array | None = None
        self.logprobs: mx.array = mx.zeros((0,))
        self.whole: mx.array = mx.zeros((0,))
        self.plain: mx.array = mx.zeros((0,))
        self.base: mx.array | None = None

    @property
    def trains_layers(self) -> bool:
        """Whether an adapter changes a layer, and not the head alone."""
        return self._lowest < len(self._layers)

    def forward(self, *, backward: bool, base: bool) -> Slices:
        """Run forward, in slices. `backward`: keep what it needs. `base`: run the model without any adapter, too."""
        yield launched(self._entry)  # the host's part so far took as long as a slice
        if base:
            yield from self._base()
        h = self._entry
        for i, layer in enumerate(self._layers):
            if backward and i >= self._lowest:
                self._inputs.append(h)
            h = self._run(i, layer, h, self._arrays(i))
            if self._ends_slice(i):
                yield launched(h)
        self._states = h
        for own in self._leave_at(self._flat(h)):
            yield launched(*own)

    def backward(self, *cotangents: mx.array) -> Slices:
        """Run backward, in slices, after `forward`: each layer is computed again.

        `cotangents` are the gradients of the loss by `logprobs` and, if draws were truncated, by `whole`, [n] each.
        """
        assert self._states is not None
        states, self._states = self._states, None
        gradient = mx.zeros((self._rows * self._length, states.shape[-1]), states.dtype)
        for gradient, sums in self._head_gradients(self._flat(states), cotangents):
            yield launched(gradient, sums)
        del states
        gradient = gradient.reshape(self._rows, self._length, -1)
        for i in reversed(range(self._lowest, len(self._layers))):
            gradient, wait = self._layer_backward(i, self._inputs.pop(), gradient)
            yield wait

    def at_once(self, loss: Callable[[], Sequence[mx.array]], *, base: bool) -> Slices:
        """Run forward and backward as one graph, in slices: all activations are kept, and nothing is computed again.

        `loss` is called when `logprobs` and the like are there, not yet evaluated, and returns the cotangents. An
        adapter has to change a layer.
        """
        yield launched(self._entry)
        if base:
            yield from self._base()
        states: list[mx.array] = []
        found: list[tuple[mx.array, ...]] = []
        sums: list[Any] = []

        def value(own: list[list[mx.array]]) -> mx.array:
            h = self._entry
            for i, layer in enumerate(self._layers):
                h = self._run(i, layer, h, own[i])
                states.append(h)
            flat = mx.stop_gradient(self._flat(h))
            found.extend(self._leave_at(flat))
            gradient = mx.zeros_like(flat)
            for gradient, head in self._head_gradients(flat, loss()):
                sums.append((gradient, head))
            # The gradient of this by the states is `gradient`, so that below them it is the gradient of the loss.
            return (self._flat(h) * mx.stop_gradient(gradient)).sum()

        gradients = mx.grad(value)([self._arrays(i) for i in range(len(self._layers))])
        ends = [h for i, h in enumerate(states) if self._ends_slice(i)]
        for made in (*ends, *found, *sums):
            yield launched(made)
        states.clear()
        for i in reversed(range(self._lowest, len(self._layers))):
            yield launched(self._add(self._paths[i], gradients.pop()))

    def _base(self) -> Slices:
        """Run the model without any adapter, in slices."""
        h = self._entry
        for i, layer in enumerate(self._layers):
            h = layer(h)
            if self._ends_slice(i):
                yield launched(h)
        parts = []
        for chunk in self._chunks():
            parts.append(self._head(self._flat(h)[chunk.at], chunk, [])[1])
            yield launched(parts[-1])
        self.base = mx.concatenate(parts)

    def _leave_at(self, flat: mx.array) -> Iterator[tuple[mx.array, ...]]:
        """Yield the logprobs of each chunk from the states [n, dim]; when all are there, set those of the whole."""
        found = []
        for chunk in self._chunks():
            found.append(self._head(flat[chunk.at], chunk, self._head_arrays()))
            yield found[-1]
        self.logprobs, self.whole, self.plain = (mx.concatenate(list(kind)) for kind in zip(*found, strict=True))

    def _head_gradients(self, flat: mx.array, cotangents: Sequence[mx.array]) -> Iterator[tuple[mx.array, list[Pair]]]:
        """Yield the gradient by the states [n, dim] so far, and the sums of the head's adapters, chunk by chunk."""
        gradient, done = mx.zeros_like(flat), 0
        for chunk in self._chunks():
            here = [own[done : done + chunk.at.size] for own in cotangents]
            done += chunk.at.size
            below, sums = self._head_backward(flat[chunk.at], chunk, here)
            gradient = gradient.at[chunk.at].add(below)
            yield gradient, sums

    def _head(self, h: mx.array, chunk: Positions, arrays: list[mx.array]) -> tuple[mx.array, mx.array, mx.array]:
        """Return the logprobs of a chunk from the states there: as drawn, at its temperature and at 1.

        `arrays` are A and B of the adapters that change the head; none: the head is the base's.
        """
        n = chunk.at.size
        segments: dict[str, list[Segment]] = {}
        for (adapter, path), a, b in zip(self._head_paths, arrays[::2], arrays[1::2], strict=bool(arrays)):
            own = self._adapters[adapter]
            start, stop = max(own.span.start - chunk.first, 0), min(own.span.stop - chunk.first, n)
            if start < stop:
                dropout = own.dropout and own.dropout.within(chunk.first)
                segments.setdefault(path, []).append(Segment(start, stop, (a, b), dropout))
        with self._tree.bound(n, segments):
            logits = self._leave(h)
        target, temperature, truncation = chunk.target, chunk.temperature, chunk.truncation
        if self._tree.exact is not None:
            whole = sampler_logprobs(logits, target, temperature)
            drawn = whole if truncation is None else sampler_logprobs(logits, target, temperature, truncation)
            return drawn, whole, model_logprobs(logits, target)
        plain = logprobs(logits, target, None)
        whole = plain if temperature is None else logprobs(logits, target, temperature)
        return (whole if truncation is None else logprobs(logits, target, temperature, truncation)), whole, plain

    def _head_arrays(self) -> list[mx.array]:
        return [x for adapter, path in self._head_paths for x in self._adapters[adapter].pairs[path]]

    def _head_backward(
        self, h: mx.array, chunk: Positions, cotangents: Sequence[mx.array]
    ) -> tuple[mx.array, list[Pair]]:
        """Return the gradient by the states of a chunk and the sums of those by the adapters of the head.

        The logits are computed again: they are too large to be kept.
        """
        _, (gradient, *own) = mx.vjp(
            lambda x, *ab: self._head(x, chunk, list(ab))[: len(cotangents)],
            [h, *self._head_arrays()],
            list(cotangents),
        )
        return gradient, self._add(self._head_paths, own)

    def _add(self, paths: Sequence[tuple[int, str]], own: Sequence[mx.array]) -> list[Pair]:
        """Add gradients of these paths, A and B in turn, to those of their adapters, and return the sums."""
        sums: list[Pair] = []
        for (adapter, path), a, b in zip(paths, own[::2], own[1::2], strict=True):
            gradients = self._adapters[adapter].gradients
            known = gradients.get(path)
            sums.append((a.astype(mx.float32), b.astype(mx.float32)) if known is None else (known[0] + a, known[1] + b))
            gradients[path] = sums[-1]
        return sums

    def _layer_backward(self, i: int, h: mx.array, gradient: mx.array) -> tuple[mx.array, Wait]:
        """Launch layer i backward from its input `h`; return the gradient by `h`, and what waits for the slice."""
        layer, arrays = self._layers[i], self._arrays(i)

        if i == self._lowest:  # nothing below is trained
            _, own = mx.vjp(lambda *ab: self._run(i, layer, h, list(ab)), arrays, [gradient])
            below = gradient
        else:
            _, (below, *own) = mx.vjp(lambda x, *ab: self._run(i, layer, x, list(ab)), [h, *arrays], [gradient])
        # Gradients are added layer by layer: to add all of a model's in one slice takes as long as a step.
        return below, launched(below, self._add(self._paths[i], own))

    def _run(self, i: int, layer: Layer, h: mx.array, arrays: list[mx.array]) -> mx.array:
        """Run layer i with the arrays of its adapters, A and B in the order of its paths."""
        segments: dict[str, list[Segment]] = {}
        for (adapter, path), a, b in zip(self._paths[i], arrays[::2], arrays[1::2], strict=True):
            own = self._adapters[adapter]
            segments.setdefault(path, []).append(Segment(own.start, own.stop, (a, b), own.dropout))
        with self._tree.bound(self._rows, segments):
            return layer(h)

    def _ends_slice(self, i: int) -> bool:
        """Return whether layer i is the last of a slice of the forward."""
        return (i + 1) % self._forward_layers == 0 or i + 1 == len(self._layers)

    def _arrays(self, i: int) -> list[mx.array]:
        return [x for adapter, path in self._paths[i] for x in self._adapters[adapter].pairs[path]]

    def _flat(self, h: mx.array) -> mx.array:
        return h.reshape(self._rows * self._length, -1)

    def _chunks(self) -> list[Positions]:
        """Return the positions in pieces whose logits fit HEAD_BYTES."""
        n = self._where.at.size
        size = max(HEAD_BYTES // (4 * self._vocabulary()), 16)
        at, target, warm, cut, _ = self._where
        spans = [slice(k, k + size) for k in range(0, n, size)]
        return [
            Positions(
                at[own],
                target[own],
                None if warm is None else warm[own],
                None if cut is None else cut[own],
                own.start,
            )
            for own in spans
        ]

    def _vocabulary(self) -> int:
        if not hasattr(self, "_width"):
            self._width = int(self._leave(self._flat(self._entry)[:1]).shape[-1])  # a shape: never evaluated
        return self._width
