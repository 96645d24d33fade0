"""Passes on pages: what sequences begin with in common is computed once, and the gradients are those of each alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from mlx_tandem.config import ModelConfig
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig, TrainerSpec, Truncation
from mlx_tandem.model import probe
from mlx_tandem.model.loader import load
from mlx_tandem.training.device import pages
from mlx_tandem.training.device.cutting import Cutting, Item, items_of
from mlx_tandem.training.device.trainers import MLXTrainers
from tests import tiny_families, tiny_models
from tests.engine.learning import finish, largest_difference, plain_gradients, strengthen, trainers_of

TOLERANCE = 2e-4
"""Relative to the largest entry: sums in another order."""

EVERYTHING = 1 << 30


def groups(seed: int = 0, prompts: tuple[int, ...] = (21, 26), answers: int = 4) -> list[Datum]:
    """Answers of several lengths to each prompt, of which the last two are equal, with weights of their own."""
    g = np.random.default_rng(seed)
    data = []
    for prompt in prompts:
        asked = g.integers(3, tiny_models.VOCAB, prompt).tolist()
        answer: list[int] = []
        for i in range(answers):
            if i + 1 < answers:
                answer = g.integers(3, tiny_models.VOCAB, 1 + 4 * i).tolist()
            weights = g.normal(size=len(answer))
            logprobs = -5.0 - g.random(len(answer))
            data.append(Datum((*asked, *answer), prompt, tuple(weights.tolist()), tuple(logprobs.tolist()), 0.7))
    return data


def on_pages(folder: Path, *, micro_batch_tokens: int = 4096, kept_bytes: int = 0) -> MLXTrainers:
    model = load(ModelConfig(path=str(folder), dtype="float32"), lambda stage, fraction: None)
    axes = probe.examine(model).mask_axes
    return trainers_of(
        folder, micro_batch_tokens=micro_batch_tokens, cutting=Cutting(mask_axes=axes, kept_bytes=kept_bytes)
    )


def items(data: list[Datum]) -> list[Item]:
    return items_of([Batch("a", tuple(data), LossConfig())])


@pytest.mark.parametrize(
    "family", [f for f in (*tiny_families.FAMILIES, *tiny_families.WINDOWED) if f not in tiny_families.UNTRAINED]
)
def test_gradients_are_those_of_each_sequence_by_itself(family: str, tmp_path: Path) -> None:
    """Also where layers see 16 positions of 40, and where activations are kept, which they are here."""
    more = tiny_families.EVERY_EXPERT if family in tiny_families.MIXTURES else {}
    trainers = on_pages(tiny_models.make(tmp_path / family, family, **more), kept_bytes=EVERYTHING)
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    strengthen(trainers, "a")
    data, config = groups(), LossConfig("ppo", kl_coef=0.1)
    assert pages.width_for(items(data))
    (result,) = finish(trainers.run([Batch("a", tuple(data), config)], False, 0))
    value, wanted = plain_gradients(trainers, "a", data, config)
    assert result.loss == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert largest_difference(trainers._trainers["a"]._gradients, wanted) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tokens", [1, 40, 100, 4096])
def test_micro_batches_and_trainers_add_up_to_the_whole(family: str, tokens: int, tmp_path: Path) -> None:
    """The same sequences for two trainers are computed for each of them."""
    more = tiny_families.EVERY_EXPERT if family in tiny_families.MIXTURES else {}
    folder = tiny_models.make(tmp_path / family, family, **more)
    found, wanted = on_pages(folder, micro_batch_tokens=tokens), trainers_of(folder, micro_batch_tokens=4096)
    results = []
    for trainers in (found, wanted):
        for seed, name in enumerate(("a", "b")):
            trainers.open(TrainerSpec(name, 4, 8.0, seed=seed), "", None)
            strengthen(trainers, name, seed)
        batches = [Batch("a", tuple(groups()), LossConfig("ppo")), Batch("b", tuple(groups()), LossConfig())]
        results.append(finish(trainers.run(batches, False, 0)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-4)
        for x, y in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert np.allclose(x, y, atol=1e-4)
    for name in ("a", "b"):
        ours, theirs = (trainers._trainers[name]._gradients for trainers in (found, wanted))
        assert largest_difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("targets", [(), ("lm_head", "q_proj"), ("v_proj",), ("lm_head",)])
def test_activations_that_are_kept_change_no_bit(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Also with an adapter of the head, of that alone, and with draws that were truncated."""
    folder = tiny_models.make(tmp_path / "m", "qwen3", tie_word_embeddings=False)
    found = []
    for kept in (0, EVERYTHING):
        trainers = trainers_of(folder, micro_batch_tokens=100, cutting=Cutting(kept_bytes=kept))
        trainers.open(TrainerSpec("a", 4, 8.0, targets), "", None)
        strengthen(trainers, "a")
        data = tuple(structs.replace(d, truncation=Truncation(top_k=290)) for d in groups())
        (result,) = finish(trainers.run([Batch("a", data, LossConfig("ppo", kl_coef=0.1))], False, 0))
        found.append((result, trainers._trainers["a"]._gradients))
    (first, wanted), (second, gradients) = found
    assert first == second
    for path, pair in wanted.items():
        for x, y in zip(pair, gradients[path], strict=True):
            assert np.array_equal(np.array(x), np.array(y)), path


def test_a_pass_again_has_the_same_bits(tmp_path: Path) -> None:
    """A pass that is computed again after a crash depends on nothing but the data."""
    folder = tiny_models.make(tmp_path / "m", "qwen3")
    weights = []
    for _ in range(2):
        trainers = on_pages(folder, micro_batch_tokens=100)
        trainers.open(TrainerSpec("a", 4, 8.0), "", None)
        finish(trainers.run([Batch("a", tuple(groups()), LossConfig())], False, 0))
        finish(trainers.step("a", AdamParams(1e-2)))
        weights.append(trainers._trainers["a"].pairs)
    for path, pair in weights[0].items():
        for x, y in zip(pair, weights[1][path], strict=True):
            assert np.array_equal(np.array(x), np.array(y))


def test_what_is_alike_is_computed_once() -> None:
    """A prompt once for all of its answers, and equal answers once."""
    prompt, answers = (5,) * 16, [(6, 7, 2), (6, 8, 2), (6, 7, 2)]
    data = [Datum((*prompt, *answer), 16, (1.0,) * 3, (-1.0,) * 3) for answer in answers]
    chains = pages.chained(items(data), 8)
    assert len(chains) == 2 + 2
    assert chains.places[0] == chains.places[2]
    assert chains.places[0][:16] == chains.places[1][:16]


def test_an_answer_of_one_token_needs_its_prompt_only() -> None:
    data = [Datum((*(5,) * 8, last), 8, (1.0,), (-1.0,)) for last in (6, 7)]
    chains = pages.chained(items(data), 8)
    assert len(chains) == 1
    assert chains.places == [list(range(8))] * 2


def test_sequences_without_anything_in_common_stay_whole() -> None:
    data = [Datum(tuple(range(i, i + 32)), 16, (1.0,) * 16, (-1.0,) * 16) for i in range(4)]
    assert pages.width_for(items(data)) == 0


def test_long_sequences_stay_whole() -> None:
    """Their attention goes a block of queries at a time, since its scores would need too much memory."""
    data = [Datum((*(5,) * 1500, last), 1500, (1.0,), (-1.0,)) for last in (6, 7)]
    assert pages.width_for(items(data)) == 0


def test_no_chain_is_longer_than_what_a_page_may_gather() -> None:
    data = [Datum((*(5,) * 700, *range(9, 9 + n)), 700, (1.0,) * n, (-1.0,) * n) for n in range(3, 12)]
    chains = pages.chained(items(data), pages.width_for(items(data)))
    assert max(map(len, chains.chains)) <= pages.MOST_PAGES
