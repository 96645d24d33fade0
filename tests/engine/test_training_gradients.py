"""Sliced gradients of adapters: those of one plain backward, for every family, batched, padded and mixed."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.learning import AdamParams, Batch, LossConfig, TrainerSpec
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.device.cutting import PLAIN, Cutting
from mlx_tandem.training.device.logprobs import logprobs
from tests import tiny_families, tiny_models
from tests.engine.learning import (
    finish,
    largest_difference,
    plain_gradients,
    set_pairs,
    some_data,
    strengthen,
    trainers_of,
)

TOLERANCE = 2e-4
"""Relative to the largest entry: sums in another order."""


@pytest.mark.parametrize("family", [f for f in tiny_families.FAMILIES if f not in tiny_families.UNTRAINED])
def test_sliced_gradients_are_those_of_a_plain_backward(family: str, tmp_path: Path) -> None:
    more = tiny_families.EVERY_EXPERT if family in tiny_families.MIXTURES else {}
    trainers = trainers_of(tiny_models.make(tmp_path / family, family, **more))
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    strengthen(trainers, "a")
    data, config = some_data(), LossConfig("ppo", kl_coef=0.1)
    (result,) = finish(trainers.run([Batch("a", tuple(data), config)], False, 0))
    value, wanted = plain_gradients(trainers, "a", data, config)
    assert result.loss == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert largest_difference(trainers._trainers["a"]._gradients, wanted) < TOLERANCE
    assert result.tokens == sum(w != 0 for d in data for w in d.weights)


@pytest.mark.parametrize("family", ["falcon_h1", "jamba", "lfm2", "qwen3_next", "recurrent_gemma"])
def test_layers_with_states_are_trained_through(family: str, tmp_path: Path) -> None:
    """Sequences that begin alike have states of their own."""
    folder = tiny_models.make(tmp_path / family, family, **tiny_families.EVERY_EXPERT)
    trainers = trainers_of(folder, cutting=Cutting(mask_axes=1))
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    strengthen(trainers, "a")
    data, config = [*some_data(), *some_data()], LossConfig("ppo", kl_coef=0.1)
    (result,) = finish(trainers.run([Batch("a", tuple(data), config)], False, 0))
    value, wanted = plain_gradients(trainers, "a", data, config)
    assert result.loss == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert largest_difference(trainers._trainers["a"]._gradients, wanted) < TOLERANCE


@pytest.mark.parametrize("family", tiny_families.UNTRAINED)
def test_a_model_whose_layers_hand_on_more_than_states_is_refused(family: str, tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "model", family))
    with pytest.raises(InvalidRequest, match="cannot be trained on") as e:
        trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    assert e.value.param == "model"


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_bases_are_trained_on_as_they_are(bits: int, tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "q", "qwen3", bits=bits))
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    strengthen(trainers, "a")
    data, config = some_data(), LossConfig()
    finish(trainers.run([Batch("a", tuple(data), config)], False, 0))
    _, wanted = plain_gradients(trainers, "a", data, config)
    assert largest_difference(trainers._trainers["a"]._gradients, wanted) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "gpt2"])
def test_gradients_are_those_of_finite_differences(family: str, tmp_path: Path) -> None:
    """Along random directions, a whole step of float32 forwards apart."""
    more = tiny_families.EVERY_EXPERT if family in tiny_families.MIXTURES else {}
    trainers = trainers_of(tiny_models.make(tmp_path / family, family, **more))
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    strengthen(trainers, "a")
    data = tuple(some_data())
    batch = Batch("a", data, LossConfig("cross_entropy"))
    finish(trainers.run([batch], False, 0))
    trainer = trainers._trainers["a"]
    gradients, start = trainer._gradients, trainer.pairs
    assert gradients is not None
    g = np.random.default_rng(1)
    for path in list(start)[:: max(len(start) // 6, 1)]:
        for side in (0, 1):
            # Along the gradient itself the difference is largest beside the rounding of the forward.
            own = np.array(gradients[path][side]) * (1.0, trainer.scale)[side]
            direction = own / np.linalg.norm(own) + 0.05 * g.standard_normal(own.shape) / own.size**0.5
            exact = float((own * direction).sum())
            closest = np.inf
            for size in (0.1, 0.03, 0.01):
                values = []
                for sign in (1, -1):
                    pair = list(start[path])
                    pair[side] = pair[side] + mx.array((sign * size * direction).astype(np.float32))
                    set_pairs(trainers, "a", start | {path: (pair[0], pair[1])})
                    values.append(finish(trainers.run([batch], True, 0))[0].loss)
                closest = min(closest, abs((values[0] - values[1]) / (2 * size) - exact) / abs(exact))
                if closest < 0.02:  # a larger step is less exact, a smaller one has fewer digits
                    break
            assert closest < 0.02, path


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_several_trainers_in_one_pass_are_each_as_alone(family: str, tmp_path: Path) -> None:
    """Of other ranks and other targets, with other losses, through several updates."""
    more = tiny_families.EVERY_EXPERT if family in tiny_families.MIXTURES else {}
    trainers = trainers_of(tiny_models.make(tmp_path / family, family, **more), micro_batch_tokens=150)
    specs = [
        TrainerSpec("a", 4, 8.0, seed=1),
        TrainerSpec("b", 8, 8.0, ("q_proj", "v_proj"), seed=2),
        TrainerSpec("c", 32, 64.0, ("down_proj", "o_proj", "k_proj"), seed=3),
    ]
    losses = [LossConfig("ppo"), LossConfig("cross_entropy", normalize="token_mean"), LossConfig("cispo")]
    data = [some_data(seed) for seed in range(3)]
    batches = [Batch(s.name, tuple(d), c) for s, d, c in zip(specs, data, losses, strict=True)]
    adam = AdamParams(1e-2, grad_norm=1.0)

    def learn(groups: list[list[Batch]]) -> dict[str, dict[str, tuple[mx.array, mx.array]]]:
        for spec in specs:
            trainers.open(spec, "", None)
        for _ in range(3):
            for group in groups:
                finish(trainers.run(group, False, 0))
                for batch in group:
                    finish(trainers.step(batch.trainer, adam))
                    trainers.settle(batch.trainer, True)
        return {name: t.pairs for name, t in trainers._trainers.items()}

    together, alone = learn([batches]), learn([[b] for b in batches])
    for name in together:
        for path, pair in together[name].items():
            for x, y in zip(pair, alone[name][path], strict=True):
                assert float(np.abs(np.array(x) - np.array(y)).max()) < 1e-4, (name, path)
    assert len(together["b"]) < len(together["a"])


def test_micro_batches_add_up_to_the_whole(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "m", "qwen3")
    gradients = []
    for tokens in (1, 64, 100_000):
        trainers = trainers_of(folder, micro_batch_tokens=tokens)
        trainers.open(TrainerSpec("a", 4, 8.0), "", None)
        strengthen(trainers, "a")
        finish(trainers.run([Batch("a", tuple(some_data()), LossConfig("ppo", "sequence", "sequence_mean"))], False, 0))
        gradients.append(trainers._trainers["a"]._gradients)
    assert largest_difference(gradients[0], gradients[2]) < TOLERANCE
    assert largest_difference(gradients[1], gradients[2]) < TOLERANCE


def test_passes_add_up_until_the_step(tmp_path: Path) -> None:
    """One that is dropped half done adds nothing."""
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"))
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    strengthen(trainers, "a")
    batch = Batch("a", tuple(some_data()), LossConfig("cross_entropy"))
    finish(trainers.run([batch], False, 0))
    once = trainers._trainers["a"].gradients
    dropped = trainers.run([batch], False, 0)
    for _ in range(12):
        next(dropped)()
    dropped.close()
    assert largest_difference(trainers._trainers["a"].gradients, once) == 0
    finish(trainers.run([batch], False, 0))
    twice = {path: (2 * a, 2 * b) for path, (a, b) in once.items()}
    assert largest_difference(trainers._trainers["a"].gradients, twice) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("way", [Cutting(forward_layers=3), Cutting(few_shapes=True)])
def test_what_suits_a_gpu_gives_the_same(family: str, way: Cutting, tmp_path: Path) -> None:
    """Several layers in a slice; rows and lengths that are padding."""
    folder = tiny_models.make(tmp_path / "m", family, **(tiny_families.EVERY_EXPERT if "moe" in family else {}))
    data = some_data(0, ((33, 10), (34, 1), (17, 12), (19, 8), (35, 4)))
    found = []
    for cutting in (PLAIN, way):
        trainers = trainers_of(folder, micro_batch_tokens=200, cutting=cutting)
        for name, rank in (("a", 4), ("b", 2)):
            trainers.open(TrainerSpec(name, rank, 8.0), "", None)
            strengthen(trainers, name)
        batches = [Batch(name, tuple(data), LossConfig(kl_coef=0.1)) for name in "ab"]
        results = finish(trainers.run(batches, False, 0))
        found.append((results, [trainers._trainers[name].gradients for name in "ab"]))
    for one, other in zip(*(results for results, _ in found), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert np.allclose(np.concatenate(one.logprobs), np.concatenate(other.logprobs), atol=1e-5)
    for one, other in zip(*(gradients for _, gradients in found), strict=True):
        assert largest_difference(other, one) < TOLERANCE


def test_the_same_pass_gives_the_same_bits(tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"))
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    batch = Batch("a", tuple(some_data()), LossConfig(kl_coef=0.1))
    found = []
    for _ in range(2):
        result = finish(trainers.run([batch], False, 0))
        found.append(
            (result, {k: (np.array(a), np.array(b)) for k, (a, b) in trainers._trainers["a"]._gradients.items()})
        )
        trainers.drop_gradients("a")
    assert found[0][0] == found[1][0]
    for path, pair in found[0][1].items():
        for x, y in zip(pair, found[1][1][path], strict=True):
            assert np.array_equal(x, y)


@given(st.integers(1, 5), st.integers(2, 40), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=50)
def test_logprobs_have_the_gradient_of_their_formula(n: int, vocabulary: int, warm: bool, seed: int) -> None:
    g = np.random.default_rng(seed)
    logits = mx.array((8 * g.normal(size=(1, n, vocabulary))).astype(np.float32))
    target = mx.array(g.integers(0, vocabulary, n).astype(np.int32))
    temperature = mx.array(10 ** g.uniform(-3.0, 0.5, n).astype(np.float32)) if warm else None
    cotangent = mx.array(g.normal(size=n).astype(np.float32))

    def plainly(x: mx.array) -> mx.array:
        x = x[0] if temperature is None else x[0] / temperature[:, None]
        return (x - mx.logsumexp(x, -1, keepdims=True))[mx.arange(n), target]

    (wanted,), (gradient,) = mx.vjp(plainly, [logits], [cotangent])
    (found,), (own,) = mx.vjp(lambda x: logprobs(x, target, temperature), [logits], [cotangent])
    each = np.ones((n, 1)) if temperature is None else np.array(temperature)[:, None]
    assert np.allclose(np.array(found), np.array(wanted), rtol=1e-5, atol=1e-5)
    coarse = float(np.abs(np.array(logits)[0] / each).max()) * np.finfo(np.float32).eps  # of what is exponentiated
    assert np.allclose(np.array(own)[0] * each, np.array(gradient)[0] * each, atol=max(1e-5, 4 * coarse))
