"""Trainers on tiny models for tests: passes driven to their end, and what a plain backward of the whole tree says."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_tandem.config import ModelConfig
from mlx_tandem.engine.learning import Datum
from mlx_tandem.engine.plan import Wait
from mlx_tandem.model.loader import load
from mlx_tandem.model.modules import clone
from mlx_tandem.training.device.losses import TokenBatch, loss, shares
from mlx_tandem.training.device.trained_adapter import TrainedAdapter
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.training.device.tree import Segment
from tests import tiny_models

T = TypeVar("T")


def trainers_of(folder: Path, *, micro_batch_tokens: int = 64, dtype: str = "float32", **more: Any) -> MLXTrainers:
    model = load(ModelConfig(path=str(folder), dtype=dtype), lambda stage, fraction: None)  # type: ignore[arg-type]
    return MLXTrainers(
        clone(model.module),
        mx.float32,
        vocab_size=tiny_models.VOCAB,
        micro_batch_tokens=micro_batch_tokens,
        most_tokens=256,
        **more,
    )


def base_leaves(trainers: MLXTrainers) -> list[tuple[str, mx.array]]:
    """Return the base's weights in the trainers' tree, with their paths."""
    return list(tree_flatten(trainers._tree.model.parameters()))  # type: ignore[arg-type]


def finish(slices: Generator[Wait, None, T]) -> T:
    while True:
        try:
            next(slices)()
        except StopIteration as e:
            result: T = e.value
            return result


def some_data(seed: int = 0, lengths: Sequence[tuple[int, int]] = ((30, 10), (21, 1), (40, 12), (9, 8))) -> list[Datum]:
    """Data of (tokens, prompt) lengths with odd weights, a zero among them, and plausible logprobs."""
    g = np.random.default_rng(seed)

    def datum(n: int, prompt: int) -> Datum:
        weights = g.normal(size=n - prompt)
        weights[::5] = 0.0
        return Datum(
            tuple(g.integers(3, tiny_models.VOCAB, n).tolist()),
            prompt,
            tuple(weights.tolist()),
            tuple((-5.0 - g.random(n - prompt)).tolist()),
            float(g.choice([0.7, 1.0])),
        )

    return [datum(n, prompt) for n, prompt in lengths]


def strengthen(trainers: MLXTrainers, name: str, seed: int = 0) -> None:
    """B as after much training: with B zero half of the gradients are."""
    g = np.random.default_rng(seed)
    pairs = {
        path: (a, mx.array((g.standard_normal(b.shape) * 0.05).astype(np.float32)))
        for path, (a, b) in trainers._trainers[name].pairs.items()
    }
    set_pairs(trainers, name, pairs)


def set_pairs(trainers: MLXTrainers, name: str, pairs: dict[str, Any]) -> None:
    """The trainer begins anew with them."""
    old = trainers._trainers[name]
    trainers._trainers[name] = TrainedAdapter(old.spec, old._linears, pairs)


def plain_gradients(
    trainers: MLXTrainers, name: str, data: Sequence[Datum], config: Any
) -> tuple[float, dict[str, Any]]:
    """The loss and its gradients with respect to what is served, by one backward through the whole tree, a sequence at
    a time."""
    trainer = trainers._trainers[name]
    tree = trainers._tree
    counts = shares([d.trained for d in data], config)

    def logprobs(pairs: Any, d: Datum, adapted: bool) -> mx.array:
        segments = {path: [Segment(0, 1, pair)] for path, pair in pairs.items()} if adapted else {}
        with tree.bound(1, segments):
            scores = tree.model(mx.array([d.tokens])).astype(mx.float32)[0] / d.temperature
        scores = scores - mx.logsumexp(scores, -1, keepdims=True)
        rows = scores[d.prompt_length - 1 : len(d.tokens) - 1]
        return mx.take_along_axis(rows, mx.array(d.tokens[d.prompt_length :])[:, None], -1)[:, 0]

    def total(pairs: Any) -> mx.array:
        value = mx.array(0.0)
        for d, share in zip(data, counts, strict=True):
            p = logprobs(pairs, d, True)
            base = mx.stop_gradient(logprobs(pairs, d, False))[None] if config.kl_coef else None
            full = mx.full((1, p.size), share)
            trained = mx.array([d.trained]).astype(mx.float32)
            sampled = mx.array([d.logprobs])
            batch = TokenBatch(sampled, mx.array([d.weights]), full, trained, sampled)
            value = value + loss(p[None], batch, config, base)
        return value

    value, gradients = mx.value_and_grad(total)(trainer.served(tree.dtype))
    return float(np.array(value)), gradients


def largest_difference(found: Any, wanted: Any) -> float:
    """Between gradients by path, relative to each array's largest entry."""
    assert found.keys() == wanted.keys()
    worst = 0.0
    for path in wanted:
        for a, b in zip(found[path], wanted[path], strict=True):
            a, b = np.array(a), np.array(b)
            worst = max(worst, float(np.abs(a - b).max(initial=0.0) / (np.abs(b).max(initial=0.0) + 1e-6)))
    return worst
