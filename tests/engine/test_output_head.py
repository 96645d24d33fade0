"""Adapters of the output head: gradients, several of them in one pass, PEFT's formula, and serving in mixed batches."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from msgspec import structs
from safetensors.numpy import load_file

from mlx_tandem import Engine
from mlx_tandem.api import engine as api
from mlx_tandem.config import LoraConfig, ModelConfig, SpeculationConfig
from mlx_tandem.engine.learning import AdamParams, Batch, LoraOptions, LossConfig, TrainerSpec
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.model.loader import load
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.step.draw import HeadPositions
from mlx_tandem.model.targets import find_head
from tests import tiny_models
from tests.engine.learning import finish, largest_difference, plain_gradients, some_data, strengthen, trainers_of

TOLERANCE = 2e-4
TIED = pytest.mark.parametrize("tied", [True, False])
DATA = tuple(some_data())


@TIED
@pytest.mark.parametrize("bits", [0, 4])
def test_gradients_of_the_head_are_those_of_a_plain_backward(tied: bool, bits: int, tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3", tie_word_embeddings=tied, bits=bits or None))
    trainers.open(TrainerSpec("a", 4, 8.0, ("lm_head", "q_proj")), "", None)
    assert set(trainers._trainers["a"].pairs) == {"lm_head"} | {p for p in trainers._tree.linears if "q_proj" in p}
    strengthen(trainers, "a")
    config = LossConfig("ppo", kl_coef=0.1)
    (result,) = finish(trainers.run([Batch("a", DATA, config)], False, 0))
    value, wanted = plain_gradients(trainers, "a", DATA, config)
    assert result.loss == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert largest_difference(trainers._trainers["a"].gradients, wanted) < TOLERANCE
    assert float(mx.abs(wanted["lm_head"][0]).max()) > 0


def test_several_trainers_in_one_pass_are_each_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With logits in many pieces, whose borders lie inside of completions."""
    monkeypatch.setattr("mlx_tandem.training.device.backward.HEAD_BYTES", 0)
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3"), micro_batch_tokens=300)
    specs = [
        TrainerSpec("a", 4, 8.0, ("lm_head",), seed=1),
        TrainerSpec("b", 8, 8.0, ("q_proj",), seed=2),
        TrainerSpec("c", 2, 4.0, ("lm_head", "down_proj"), seed=3),
    ]
    batches = [Batch(s.name, tuple(some_data(i)), LossConfig("cross_entropy")) for i, s in enumerate(specs)]
    found = []
    for groups in ([batches], [[b] for b in batches]):
        for spec in specs:
            trainers.open(spec, "", None)
            strengthen(trainers, spec.name)
        for group in groups:
            finish(trainers.run(group, False, 0))
        found.append({name: t.gradients for name, t in trainers._trainers.items()})
    for name in found[0]:
        assert largest_difference(found[0][name], found[1][name]) < TOLERANCE, name


@TIED
def test_what_is_saved_is_peft_s_formula_on_the_head(tied: bool, tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "m", "qwen3", tie_word_embeddings=tied))
    options = LoraOptions(rslora=True, dropout=0.2)
    trainers.open(TrainerSpec("a", 4, 8.0, ("lm_head", "v_proj"), options=options), "", None)
    for _ in range(3):
        finish(trainers.run([Batch("a", DATA, LossConfig("cross_entropy"))], False, 0))
        finish(trainers.step("a", AdamParams(1e-2)))
        trainers.settle("a", True)
    (tmp_path / "peft").mkdir()
    trainers.snapshot("a")(str(tmp_path / "peft"))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert "lm_head" in config["target_modules"]
    tensors = {
        name.removeprefix("base_model.model."): x
        for name, x in load_file(tmp_path / "peft" / "adapter_model.safetensors").items()
    }
    model, _ = load_model(tmp_path / "m")
    model.set_dtype(mx.float32)
    hidden = model.model
    for name, a in tensors.items():
        path = name.removesuffix(".lora_A.weight")
        if path != name and path != "lm_head":
            module = dict(model.named_modules())[path]
            module.weight = module.weight + mx.array(4.0 * (tensors[f"{path}.lora_B.weight"] @ a))
    table = np.array(hidden.embed_tokens.weight if tied else model.lm_head.weight)
    table = table + 4.0 * (tensors["lm_head.lora_B.weight"] @ tensors["lm_head.lora_A.weight"])
    (ours,) = finish(trainers.run([Batch("a", DATA, LossConfig("cross_entropy"))], True, 0))
    for datum, own in zip(DATA, ours.model_logprobs, strict=True):
        logits = np.array(hidden(mx.array([datum.tokens[:-1]]))[0], np.float64) @ table.T
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        wanted = scores[np.arange(len(logits)), list(datum.tokens[1:])][datum.prompt_length - 1 :]
        assert np.abs(wanted - own).max() < 1e-4
    resumed = trainers_of(tmp_path / "m")
    resumed.open(TrainerSpec("a", 1, 1.0), str(tmp_path / "peft"), None)
    (again,) = finish(resumed.run([Batch("a", DATA, LossConfig("cross_entropy"))], True, 0))
    assert again.logprobs == ours.logprobs


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_with_and_without_an_adapted_head_share_a_batch(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths, greedy: what is served says of each token what the trainer says, also where drafts
    are verified, whose steps draw for some of their rows only.
    """
    if drafts:
        plain = api._engine_config
        monkeypatch.setattr(
            api,
            "_engine_config",
            lambda *given: structs.replace(plain(*given), speculation=SpeculationConfig("ngram", dynamic=False)),
        )
    with Engine(max_num_seqs=16, max_model_len=256, num_blocks=400, max_loras=3, max_chunk_tokens=16) as engine:
        names = {"head": ("lm_head",), "both": ("lm_head", "q_proj"), "none": ("q_proj",)}
        trainers = {}
        for seed, (name, targets) in enumerate(names.items()):
            trainer = engine.trainer(name, rank=4, targets=targets, seed=seed)
            for _ in range(2):
                trainer.forward_backward([{"prompt": "The fox", "completion": f" is {name} {seed} times"}])
                trainer.step(learning_rate=3e-2)
            trainer.publish()
            trainers[name] = trainer
        texts = ["Sort", "What is 17 + 25? " * 6, "The fox"]
        prompts = [engine.codec.text(text, begins=True) for text in texts for _ in range(4)]
        adapters = [*names, None] * len(texts)
        done = engine.generate(prompts, adapter=adapters, temperature=0, max_tokens=12, logprobs=0)
        base = {
            prompt: tuple(c.token_ids)
            for prompt, c, a in zip(map(tuple, prompts), done, adapters, strict=True)
            if a is None
        }
        differ = 0
        for prompt, completion, adapter in zip(prompts, done, adapters, strict=True):
            own = [lp.model for lp in completion.logprobs]
            differ += adapter is not None and tuple(completion.token_ids) != base[tuple(prompt)]
            if adapter is not None:
                pair = {"prompt": list(prompt), "completion": list(completion.token_ids)}
                wanted = trainers[adapter].forward([pair]).model_logprobs[0]
                assert np.abs(np.array(own) - np.array(wanted)).max() < 2e-3, adapter
        assert differ >= 3, "the adapters change what is answered"
        assert (engine.stats.speculation is not None) is drafts
        embedded = engine.embed(texts, adapter="head")
        assert np.abs(np.array(embedded) - np.array(engine.embed(texts))).max() < 1e-5, "the states before the head"


@TIED
@pytest.mark.parametrize("rows", [5, 32])
def test_rows_that_are_picked_keep_their_adapters(tied: bool, rows: int, tmp_path: Path) -> None:
    """The logits of some rows of a step, and of the last positions of some, are those of a step that computes all."""
    folder = tiny_models.make(tmp_path / "m", "qwen3", tie_word_embeddings=tied)
    trainers = trainers_of(folder)
    module = load(ModelConfig(str(folder), "float32"), lambda *_: None).module
    state = LoraState(module, LoraConfig(max_loras=2, max_lora_rank=8), mx.float32)
    positions = HeadPositions.of(module)
    for slot in (1, 2):
        trainers.open(TrainerSpec("a", 4, 8.0, ("lm_head", "q_proj"), seed=slot), "", None)
        strengthen(trainers, "a", seed=slot)
        state.install(slot, trainers.publish("a")())
    g = np.random.default_rng(0)
    for slots in ([int(s) for s in g.integers(0, 3, rows)], [1] * rows):
        for length in (1, 6):
            tokens = mx.array(g.integers(3, tiny_models.VOCAB, (rows, length)).astype(np.int32))
            route = state.route(slots, length)

            def logits(last: mx.array | None = None, picked: mx.array | None = None) -> np.ndarray:
                state.bind(route.arrays, mx.array(route.ids), route.layout)  # noqa: B023
                positions.keep(last, picked)
                found = np.array(module(tokens))  # noqa: B023
                positions.keep(None)
                state.unbind()
                return found

            whole = logits()
            assert np.abs(whole - np.array(module(tokens))).max() > 0.1, "the adapters change something"
            last = g.integers(0, length, rows)
            if length > 1:
                wanted = whole[np.arange(rows), last][:, None]
                assert np.abs(logits(mx.array(last.astype(np.int32))) - wanted).max() < 1e-4
            else:
                picked = np.array([rows - 1, 2, 0])
                assert np.abs(logits(None, mx.array(picked.astype(np.int32))) - whole[picked]).max() < 1e-4


def test_the_head_is_found_where_there_is_one(tmp_path: Path) -> None:
    trainers = trainers_of(tiny_models.make(tmp_path / "gpt2", "gpt2"))
    assert find_head(trainers._tree.model) is None
    with pytest.raises(InvalidRequest, match="no linear layer 'lm_head'"):
        trainers.open(TrainerSpec("a", 4, 8.0, ("lm_head",)), "", None)
