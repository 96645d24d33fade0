"""Losses of other tokens than a sequence's own, one or several at each position, and trainers of parts of a model."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig, Part, TrainerSpec
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.device.cutting import Cutting
from mlx_tandem.training.device.trained_adapter import OPTIMIZER, TRAINER
from tests import tiny_models
from tests.engine.learning import finish, largest_difference, trainers_of

LOSS = LossConfig("cross_entropy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("targets") / "m", "qwen3", tie_word_embeddings=True)


def logprobs_of(folder: Path, tokens: list[int]) -> np.ndarray:
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    logits = np.array(model(mx.array([tokens]))[0], np.float64)
    found: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def data(seed: int, width: int) -> list[Datum]:
    """Sequences that begin alike, so that they can be cut into pages, with `width` targets at each position."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(1, 60, 12).tolist()
    made = []
    for length in (9, 4, 9):
        tokens = (*begin, *rng.integers(1, 60, length).tolist())
        targets = tuple(rng.integers(1, 60, width * (len(tokens) - 1)).tolist())
        weights = tuple(rng.normal(size=len(targets)).round(3).tolist())
        made.append(Datum(tokens, 1, weights, targets=targets))
    return made


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("pages", [False, True])
def test_logprobs_are_those_of_the_targets(folder: Path, width: int, pages: bool) -> None:
    trainers = trainers_of(folder, cutting=Cutting(mask_axes=1 if pages else 0), micro_batch_tokens=40)
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    (found,) = finish(trainers.run([Batch("a", tuple(data(0, width)), LOSS)], True, 0))
    loss = 0.0
    for datum, own in zip(data(0, width), found.logprobs, strict=True):
        all_of = logprobs_of(folder, list(datum.tokens[:-1]))
        wanted = [all_of[i // width, target] for i, target in enumerate(datum.targets)]
        assert np.abs(np.array(wanted) - own).max() < 1e-4
        loss -= float(np.dot(datum.weights, wanted))
    assert found.loss == pytest.approx(loss, abs=1e-3)


def test_several_targets_have_the_gradients_of_as_many_passes(folder: Path) -> None:
    trainers = trainers_of(folder)
    for name in ("together", "apart"):
        trainers.open(TrainerSpec(name, 4, 8.0, seed=1, parts=("attention", "mlp", "head")), "", None)
    wide = data(1, 3)
    finish(trainers.run([Batch("together", tuple(wide), LOSS)], False, 0))
    for k in range(3):
        narrow = tuple(Datum(d.tokens, 1, d.weights[k::3], targets=d.targets[k::3]) for d in wide)
        finish(trainers.run([Batch("apart", narrow, LOSS)], False, 0))
    together, apart = (trainers._trainers[name].gradients for name in ("together", "apart"))
    assert together.keys() == apart.keys() and any("lm_head" in path for path in together)
    assert largest_difference(together, apart) < 1e-4


@pytest.mark.parametrize(
    ("targets", "weights", "says"),
    [
        ((1, 2, 3), (1.0,) * 3, "targets has 3 entries for 2 positions"),
        ((1, 9999), (1.0, 1.0), "not in the vocabulary"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    folder: Path, targets: tuple[int, ...], weights: tuple[float, ...], says: str
) -> None:
    trainers = trainers_of(folder)
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    with pytest.raises(InvalidRequest, match=says):
        trainers.run([Batch("a", (Datum((1, 2, 3), 1, weights, targets=targets),), LOSS)], False, 0)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (("attention",), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (("mlp",), {"gate_proj", "up_proj", "down_proj"}),
        (("head",), {"lm_head"}),
        (("head", "mlp"), {"lm_head", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_a_trainer_adapts_the_parts_that_it_names(
    folder: Path, parts: tuple[Part, ...], named: set[str], tmp_path: Path
) -> None:
    trainers = trainers_of(folder)
    info = trainers.open(TrainerSpec("a", 4, 8.0, parts=parts), "", None)
    assert {target.rpartition(".")[2] for target in info.targets} == named
    finish(trainers.run([Batch("a", tuple(data(2, 1)), LOSS)], False, 0))
    assert finish(trainers.step("a", AdamParams(1e-2))).grad_norm > 0
    trainers.snapshot("a")(str(tmp_path))
    again = trainers.open(TrainerSpec("b", 1, 1.0), str(tmp_path), None)
    assert (again.targets, again.step) == (info.targets, 1)


def test_experts_are_of_the_feed_forward_part(tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3_moe"))
    info = trainers.open(TrainerSpec("a", 4, 8.0, parts=("mlp",)), "", None)
    assert {target.rpartition(".")[2] for target in info.targets} >= {"gate_proj", "up_proj", "down_proj"}
    assert not {target.rpartition(".")[2] for target in info.targets} & {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_an_adapter_is_written_without_its_optimizer(folder: Path, tmp_path: Path) -> None:
    trainers = trainers_of(folder)
    trainers.open(TrainerSpec("a", 4, 8.0), "", None)
    trainers.snapshot("a", False)(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    (tmp_path / "all").mkdir()
    trainers.snapshot("a")(str(tmp_path / "all"))
    assert {path.name for path in (tmp_path / "all").iterdir()} >= {OPTIMIZER, TRAINER}
