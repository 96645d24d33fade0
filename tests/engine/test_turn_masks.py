"""Trajectories of several turns: what tools and users say between them has no gradient, by finite differences."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.learning import Batch, BatchResult, Datum, TrainerSpec
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.training.online.advantages import batches
from mlx_tandem.training.open_trajectories import Beginning, Exchange, OpenTrajectories
from mlx_tandem.training.trajectories import Trajectory
from tests import tiny_models
from tests.engine.learning import finish, largest_difference, set_pairs, strengthen, trainers_of

STEP = 0.01


def group() -> list[Trajectory]:
    """Two trajectories of two turns, of different lengths, one better than the other in its second turn."""
    g = np.random.default_rng(5)
    held = OpenTrajectories(10, 1e9)
    made = []
    for name, lengths, rewards in (("a", (9, 6, 8, 5), (0.5, 1.0)), ("b", (9, 4, 11, 7), (0.0, 0.0))):
        drawn = [tuple(g.integers(3, tiny_models.VOCAB, n).tolist()) for n in lengths]
        for begun, given, said in ((Beginning("g", 2, 1.0), *drawn[:2]), (None, *drawn[2:])):
            near = tuple((-5.0 - g.random(len(said))).tolist())
            held.put(name, begun, Exchange(given, said, near, near, (1,) * len(said)), 0.0)
        found = held.close(name)
        assert found is not None
        made.append(found.rewarded(name, sum(rewards), rewards, 0.0))
    return made


def numpy_loss(data: tuple[Datum, ...], logprobs: tuple[tuple[float, ...], ...], masks: list[np.ndarray]) -> float:
    """GRPO's: the mean over the tokens of a completion that `masks` names, then over completions; nothing clipped."""
    total = 0.0
    for datum, p, mask in zip(data, logprobs, masks, strict=True):
        ratio = np.exp(np.array(p) - np.array(datum.logprobs))
        total -= (ratio * np.array(datum.weights) * mask).sum() / mask.sum() / len(data)
    return total


def moved(trainers: MLXTrainers, batch: Batch, start: dict[str, tuple[mx.array, mx.array]], step: float) -> BatchResult:
    """The pass at a place that lies `step` along a fixed random direction."""
    g = np.random.default_rng(2)

    def away(x: mx.array) -> mx.array:
        return x + mx.array((step * g.standard_normal(x.shape) / x.size**0.5).astype(np.float32))

    set_pairs(trainers, "a", {path: (away(a), away(b)) for path, (a, b) in start.items()})
    (result,) = finish(trainers.run([batch], True, 0))
    return result


def test_the_gradient_is_that_of_the_answers_alone(tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"))
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    strengthen(trainers, "a")
    config = RLTrainingConfig(adapter="a", update_frequency=2, clip_low=1.0, clip_high=1e6, max_importance_ratio=0.0)
    (batch,) = batches([group()], config)
    (now,) = finish(trainers.run([batch], True, 0))
    # As if it had just been drawn: where ratios are near 1, nothing is clipped. What tools say has any logprob.
    data = tuple(
        replace(d, logprobs=tuple(q if own else -50.0 for q, own in zip(p, d.mask, strict=True)))
        for d, p in zip(batch.data, now.logprobs, strict=True)
    )
    batch = replace(batch, data=data)
    finish(trainers.run([batch], False, 0))
    trainer = trainers._trainers["a"]
    gradients, start = trainer._gradients, trainer.pairs
    assert gradients is not None
    g = np.random.default_rng(2)
    exact = 0.0
    for path, pair in start.items():
        for side in (0, 1):
            x = pair[side]
            direction = g.standard_normal(x.shape) / x.size**0.5
            exact += float((np.array(gradients[path][side]) * (1.0, trainer.scale)[side] * direction).sum())
    ahead, behind = (moved(trainers, batch, start, sign * STEP) for sign in (1, -1))
    own = [np.array(d.mask, float) for d in data]

    def difference(masks: list[np.ndarray], weights: list[np.ndarray] | None = None) -> float:
        taught = data
        if weights is not None:
            taught = tuple(
                replace(d, weights=tuple(w.tolist()), logprobs=p)
                for d, w, p in zip(data, weights, now.logprobs, strict=True)
            )
        sides = [numpy_loss(taught, side.logprobs, masks) for side in (ahead, behind)]
        return (sides[0] - sides[1]) / (2 * STEP)

    assert difference(own) == pytest.approx(exact, rel=0.02)
    everything = [np.ones_like(m) for m in own]
    wrong = difference(
        everything, [np.where(m == 1, d.weights, max(d.weights)) for d, m in zip(data, own, strict=True)]
    )
    assert abs(wrong - exact) > 0.1 * abs(exact), "with what tools say it would be another one"


def test_what_tools_say_changes_no_gradient_by_its_logprobs(tmp_path: Path) -> None:
    """Whatever stands there, the gradients have the same bits."""
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"))
    for algorithm in ("grpo", "gspo", "dapo", "dro"):
        config = RLTrainingConfig(adapter="a", update_frequency=2, algorithm=algorithm)  # type: ignore[arg-type]
        (batch,) = batches([group()], config)
        found = []
        for level in (0.0, -40.0):
            trainers.open(TrainerSpec("a", 4, 8.0), "", None)
            strengthen(trainers, "a")
            data = tuple(
                replace(d, logprobs=tuple(q if own else level for q, own in zip(d.logprobs or (), d.mask, strict=True)))
                for d in batch.data
            )
            finish(trainers.run([replace(batch, data=data)], False, 0))
            gradients = trainers._trainers["a"]._gradients
            assert gradients is not None and any(float(np.abs(np.array(b)).max()) for _, b in gradients.values())
            found.append({path: (mx.array(a), mx.array(b)) for path, (a, b) in gradients.items()})
        assert largest_difference(found[0], found[1]) == 0.0, algorithm
