"""Reward models on the device: scores and gradients against a plain backward, and their life as trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.adapters import formats
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig, TrainerSpec
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.training.device.cutting import Cutting
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.training.device.tree import SCORE_HEAD, Segment
from tests import tiny_models
from tests.engine.learning import finish, largest_difference, set_pairs, some_data, strengthen, trainers_of

SPEC = TrainerSpec("taste", 4, 8.0, seed=5, scores=True)
SCORE = LossConfig("score")


def texts(seed: int = 0, lengths: tuple[int, ...] = (30, 21, 40, 9)) -> list[Datum]:
    """Texts that are scored at their last token, with odd weights."""
    g = np.random.default_rng(seed)
    tokens = [tuple(g.integers(3, tiny_models.VOCAB, n).tolist()) for n in lengths]
    return [Datum(t, len(t) - 1, (float(g.normal()),)) for t in tokens]


def moved(trainers: MLXTrainers, name: str = "taste") -> None:
    """Make B and the head something else than zero, as after some training."""
    strengthen(trainers, name)
    head = np.random.default_rng(1).standard_normal((trainers._hidden_size, 1)).astype(np.float32)
    pairs = trainers._trainers[name].pairs | {SCORE_HEAD: (mx.array(head), mx.zeros((1, 0)))}
    set_pairs(trainers, name, pairs)


def plain_scores(trainers: MLXTrainers, pairs: Any, data: list[Datum]) -> list[mx.array]:
    """Return the score of each text by mlx-lm's own forward: the inner model's output at the last token times the
    head."""
    tree = trainers._tree
    found = []
    for d in data:
        with tree.bound(1, {path: [Segment(0, 1, pair)] for path, pair in pairs.items() if path != SCORE_HEAD}):
            hidden = tree.model.model(mx.array([d.tokens]))[0, -1]
        found.append((hidden.astype(mx.float32) @ pairs[SCORE_HEAD][0])[0])
    return found


def bradley_terry(scores: list[mx.array]) -> mx.array:
    """Return the mean loss of texts in pairs, the chosen one first."""
    pairs = list(zip(scores[::2], scores[1::2], strict=True))
    return -sum((mx.log(mx.sigmoid(c - r)) for c, r in pairs), mx.array(0.0)) / len(pairs)


@pytest.mark.parametrize("cutting", [Cutting(), Cutting(kept_bytes=1 << 30), Cutting(mask_axes=2)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_scores_and_gradients_are_those_of_a_plain_backward(tmp_path: Path, family: str, cutting: Cutting) -> None:
    """In micro-batches of one text and of several, layer by layer and with all activations kept."""
    trainers = trainers_of(tiny_models.make(tmp_path / "m", family), cutting=cutting)
    trainers.open(SPEC, "", None)
    moved(trainers)
    data = texts()
    served = trainers._trainers["taste"].served(mx.float32)
    (seen,) = finish(trainers.run([Batch("taste", tuple(data), SCORE)], True, 0))
    wanted = [float(s) for s in plain_scores(trainers, served, data)]
    assert [s for (s,) in seen.logprobs] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    _, gradients = mx.value_and_grad(lambda pairs: bradley_terry(plain_scores(trainers, pairs, data)))(served)
    found = [s for (s,) in seen.logprobs]
    pull = [1 / (1 + np.exp(c - r)) / 2 for c, r in zip(found[::2], found[1::2], strict=True)]
    weights = [w * sign for w in pull for sign in (1, -1)]
    weighted = [Datum(d.tokens, d.prompt_length, (float(w),)) for d, w in zip(data, weights, strict=True)]
    finish(trainers.run([Batch("taste", tuple(weighted), SCORE)], False, 0))
    assert largest_difference(trainers._trainers["taste"].gradients, gradients) < 2e-3


def test_several_reward_models_share_a_pass(tmp_path: Path) -> None:
    """Each has the scores and the gradients that it has alone."""
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"), micro_batch_tokens=256)
    for i, name in enumerate(("one", "two")):
        trainers.open(TrainerSpec(name, 4, 8.0, seed=i, scores=True), "", None)
        moved(trainers, name)
    batches = [Batch(name, tuple(texts(i)), SCORE) for i, name in enumerate(("one", "two"))]
    alone = []
    for batch in batches:
        (result,) = finish(trainers.run([batch], False, 0))
        alone.append((result, trainers._trainers[batch.trainer].gradients[SCORE_HEAD][0]))
        trainers.drop_gradients(batch.trainer)
    together = finish(trainers.run(batches, False, 0))
    for (one, head), both in zip(alone, together, strict=True):
        assert [s for (s,) in both.logprobs] == pytest.approx([s for (s,) in one.logprobs], rel=1e-4)
        assert np.allclose(trainers._trainers[both.trainer].gradients[SCORE_HEAD][0], head, rtol=1e-3, atol=1e-4)


def test_a_fresh_reward_model_scores_nothing_and_learns(tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"))
    info = trainers.open(SPEC, "", None)
    assert "score" not in info.targets
    data = [Datum(d.tokens, d.prompt_length, (w,)) for d, w in zip(texts(), (1.0, -1.0, 1.0, -1.0), strict=True)]
    batch = Batch("taste", tuple(data), SCORE)
    (before,) = finish(trainers.run([batch], True, 0))
    assert [s for (s,) in before.logprobs] == [0.0] * 4
    for _ in range(4):
        finish(trainers.run([batch], False, 0))
        assert finish(trainers.step("taste", AdamParams(1e-2))).finite
    (after,) = finish(trainers.run([batch], True, 0))
    (a,), (b,), (c,), (d,) = after.logprobs
    assert a > b and c > d


def test_a_checkpoint_continues_and_is_an_adapter_with_a_head(tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"))
    trainers.open(SPEC, "", None)
    batch = Batch("taste", tuple(texts()), SCORE)

    def learn() -> None:
        finish(trainers.run([batch], False, 0))
        finish(trainers.step("taste", AdamParams(1e-2, weight_decay=0.1)))
        trainers.settle("taste", True)

    learn()
    folder = tmp_path / "saved"
    folder.mkdir()
    trainers.snapshot("taste")(str(folder))
    published = trainers.publish("taste")()
    learn()
    wanted = trainers._trainers["taste"].pairs
    trainers.open(TrainerSpec("taste", 1, 1.0), str(folder), None)
    learn()
    now = trainers._trainers["taste"].pairs
    assert all(np.array_equal(x, y) for path in wanted for x, y in zip(wanted[path], now[path], strict=True))
    read = formats.read(folder, trainers._tree.linears, max_rank=64, base_layers=2, hidden_size=trainers._hidden_size)
    assert read.info == published.info and read.score_head is not None and np.any(read.score_head)
    assert np.frombuffer(read.info.score_head, np.float32).tolist() == read.score_head.tolist()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    trainers.open(SPEC, "", read)
    (found,) = finish(trainers.run([batch], True, 0))
    assert any(s for (s,) in found.logprobs)
    with pytest.raises(ModelError, match="reward model"):
        trainers.open(TrainerSpec("other", 4, 8.0), "", read)


@pytest.mark.parametrize(
    ("spec", "batches", "param"),
    [
        (SPEC, [Batch("taste", tuple(some_data()), LossConfig("cross_entropy"))], "batches[0].loss"),
        (SPEC, [Batch("taste", tuple(texts()), LossConfig("score", kl_coef=0.1))], "batches[0].loss.kl_coef"),
        (TrainerSpec("taste", 4, 8.0), [Batch("taste", tuple(texts()), SCORE)], "batches[0].loss"),
        (TrainerSpec("taste", 4, 8.0, ("lm_head",), scores=True), [], "targets"),
    ],
)
def test_what_a_reward_model_cannot_do_is_refused(
    tmp_path: Path, spec: TrainerSpec, batches: list[Batch], param: str
) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"))
    with pytest.raises(InvalidRequest) as e:
        trainers.open(spec, "", None)
        finish(trainers.run(batches, True, 0))
    assert e.value.param == param
