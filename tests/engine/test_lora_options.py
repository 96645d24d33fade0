"""Options of an adapter in training: rsLoRA's scale, LoRA+'s two learning rates, dropout; and what of it is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from safetensors.numpy import load_file

from mlx_tandem.adapters.convert import inspect
from mlx_tandem.engine.learning import AdamParams, Batch, LoraOptions, LossConfig, TrainerSpec
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.training.device.tree import Dropout
from tests import tiny_families, tiny_models
from tests.engine.learning import finish, set_pairs, some_data, strengthen, trainers_of


def opened(folder: Path, *, family: str = "qwen3", rank: int = 4, **options: Any) -> MLXTrainers:
    more = tiny_families.EVERY_EXPERT if family in tiny_families.MIXTURES else {}
    trainers = trainers_of(tiny_models.make(folder / family, family, **more))
    trainers.open(TrainerSpec("a", rank, 8.0, seed=3, options=LoraOptions(**options)), "", None)
    strengthen(trainers, "a")
    return trainers


BATCH = Batch("a", tuple(some_data()), LossConfig("cross_entropy"))


def saved(trainers: MLXTrainers, folder: Path) -> Path:
    folder.mkdir()
    trainers.snapshot("a")(str(folder))
    return folder


@pytest.mark.parametrize("rslora", [False, True])
def test_what_is_saved_is_peft_s_formula_on_the_base(tmp_path: Path, rslora: bool) -> None:
    """The base's weights plus alpha / r or alpha / sqrt(r) times B A, computed here and run by mlx-lm."""
    trainers = opened(tmp_path, rank=9, rslora=rslora)
    folder = saved(trainers, tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["r"], config["lora_alpha"]) == (rslora, 9, 8)
    scale = 8.0 / (3.0 if rslora else 9.0)
    assert inspect(folder).scales == (scale,)
    tensors = load_file(folder / "adapter_model.safetensors")
    model, _ = load_model(tmp_path / "qwen3")
    model.set_dtype(mx.float32)
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")]
            module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            module.weight = module.weight + mx.array(scale * (b @ a))
    (ours,) = finish(trainers.run([BATCH], True, 0))
    for datum, own in zip(BATCH.data, ours.model_logprobs, strict=True):
        logits = np.array(model(mx.array([datum.tokens[:-1]]))[0], np.float64)
        scores = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        scores -= logits.max(-1, keepdims=True)
        wanted = scores[np.arange(len(logits)), list(datum.tokens[1:])][datum.prompt_length - 1 :]
        assert np.abs(wanted - own).max() < 1e-4


def test_an_adapter_with_any_scale_is_continued_under_any_other(tmp_path: Path) -> None:
    """What is begun with has the same effect, whatever the options of who continues it."""
    trainers = opened(tmp_path, rslora=True)
    (before,) = finish(trainers.run([BATCH], True, 0))
    weights = trainers.publish("a")()
    for options in (LoraOptions(), LoraOptions(rslora=True, plus_ratio=4.0, dropout=0.2)):
        trainers.open(TrainerSpec("a", 6, 12.0, options=options), "", weights)
        (after,) = finish(trainers.run([BATCH], True, 0))
        assert after.loss == pytest.approx(before.loss, rel=1e-5)


def test_b_has_its_own_learning_rate(tmp_path: Path) -> None:
    """Three steps of AdamW in NumPy, with weight decay, in which B's rate is 8 times A's."""
    trainers = opened(tmp_path, plus_ratio=8.0)
    adam = AdamParams(1e-3, weight_decay=0.1)
    trainer = trainers._trainers["a"]
    known = {
        (path, side): np.array(x, np.float64) for path, pair in trainer.pairs.items() for side, x in enumerate(pair)
    }
    moments = {key: (np.zeros_like(x), np.zeros_like(x)) for key, x in known.items()}
    for step in range(1, 4):
        finish(trainers.run([BATCH], False, 0))
        for (path, side), p in known.items():
            g = np.array(trainer.gradients[path][side], np.float64) * (1.0, trainer.scale)[side]
            m, v = (adam.beta1 * moments[path, side][0] + (1 - adam.beta1) * g,
                    adam.beta2 * moments[path, side][1] + (1 - adam.beta2) * g * g)  # fmt: skip
            moments[path, side] = m, v
            rate = adam.learning_rate * (1.0, 8.0)[side]
            root = np.sqrt(v / (1 - adam.beta2**step)) + adam.eps
            known[path, side] = p * (1 - rate * adam.weight_decay) - rate * m / (1 - adam.beta1**step) / root
        finish(trainers.step("a", adam))
        trainers.settle("a", True)
    for (path, side), wanted in known.items():
        found = np.array(trainer.pairs[path][side])
        assert np.abs(found - wanted).max() < 2e-5, (path, side)


def test_dropout_leaves_out_its_share_and_keeps_the_mean() -> None:
    x = mx.ones((200, 300))
    left = Dropout(0.3, (1, 2, 3)).apply(x, "layers.0.q_proj")
    assert float((left == 0).mean()) == pytest.approx(0.3, abs=0.01)
    assert float(left.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(left.max()) == pytest.approx(1 / 0.7)
    same = Dropout(0.3, (1, 2, 3)).apply(x, "layers.0.q_proj")
    assert mx.array_equal(left, same)
    for other in (
        Dropout(0.3, (1, 2, 4)).apply(x, "layers.0.q_proj"),
        Dropout(0.3, (1, 2, 3)).apply(x, "layers.0.k_proj"),
    ):
        assert float((other != left).mean()) > 0.3


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gradients_under_dropout_are_those_of_finite_differences(tmp_path: Path, family: str) -> None:
    """The forward and the backward, which computes each layer again, leave out the same inputs."""
    trainers = opened(tmp_path, family=family, dropout=0.4)
    finish(trainers.run([BATCH], False, 0))
    trainer = trainers._trainers["a"]
    gradients, start, scale = trainer.gradients, trainer.pairs, trainer.scale
    g = np.random.default_rng(1)
    for path in list(start)[:: max(len(start) // 5, 1)]:
        for side in (0, 1):
            own = np.array(gradients[path][side]) * (1.0, scale)[side]
            direction = own / np.linalg.norm(own) + 0.05 * g.standard_normal(own.shape) / own.size**0.5
            exact = float((own * direction).sum())
            closest = np.inf
            for size in (0.1, 0.03, 0.01):
                values = []
                for sign in (1, -1):
                    pair = list(start[path])
                    pair[side] = pair[side] + mx.array((sign * size * direction).astype(np.float32))
                    set_pairs(trainers, "a", start | {path: (pair[0], pair[1])})
                    values.append(finish(trainers.run([BATCH], False, 0))[0].loss)  # its first pass: the same masks
                closest = min(closest, abs((values[0] - values[1]) / (2 * size) - exact) / abs(exact))
                if closest < 0.02:  # a larger step is less exact, a smaller one has fewer digits
                    break
            assert closest < 0.02, path


def test_only_passes_with_gradients_drop_out(tmp_path: Path) -> None:
    trainers, plain = opened(tmp_path, dropout=0.5), opened(tmp_path / "plain")
    without = [finish(t.run([BATCH], True, 0))[0].loss for t in (trainers, plain)]
    assert without[0] == without[1]
    first, second = (finish(trainers.run([BATCH], False, 0))[0].loss for _ in range(2))
    assert len({first, second, without[0]}) == 3
    trainers.drop_gradients("a")
    assert finish(trainers.run([BATCH], False, 0))[0].loss == first


def test_options_are_those_of_the_checkpoint_that_is_resumed(tmp_path: Path) -> None:
    trainers = opened(tmp_path, rslora=True, plus_ratio=2.0, dropout=0.25)
    folder = saved(trainers, tmp_path / "checkpoint")
    resumed = trainers_of(tmp_path / "qwen3")
    resumed.open(TrainerSpec("a", 1, 1.0), str(folder), None)
    assert resumed._trainers["a"].spec == trainers._trainers["a"].spec
    losses = []
    for each in (trainers, resumed):
        for _ in range(2):
            finish(each.run([BATCH], False, 0))
            finish(each.step("a", AdamParams(1e-2)))
            each.settle("a", True)
        losses.append(finish(each.run([BATCH], True, 0))[0].loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("options", "param"), [(LoraOptions(dropout=1.0), "dropout"), (LoraOptions(plus_ratio=0.0), "plus_ratio")]
)
def test_options_out_of_range_are_refused(tmp_path: Path, options: LoraOptions, param: str) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"))
    with pytest.raises(InvalidRequest, match=param):
        trainers.open(TrainerSpec("a", 4, 8.0, options=options), "", None)
