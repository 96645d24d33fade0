"""Adapters on layers that are not plain attention: recurrent blocks, experts, latent attention; mixed and learned.

Tiny random models in float32. What is right is said by mlx-lm: with the adapter's weights merged by hand, or as its own
trainer makes the adapter and its own loader reads it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from msgspec.structs import replace

from mlx_tandem.adapters import formats
from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.learning import AdamParams, TrainerSpec
from mlx_tandem.training.online.advantages import batches, by_group, varies
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests import tiny_families, tiny_models
from tests.engine.agreement import PROMPTS, ask
from tests.engine.learning import finish, trainers_of
from tests.engine.mlx_engine import Engine, Oracle, assert_agrees, make_engine

HYBRID = "qwen3_next"
"""Gated delta networks, attention and experts."""


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Tracing would take longer than the steps."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def load(engine: Engine, folder: Path) -> str:
    """Read an adapter for the engine; return the name by which requests ask for it."""
    weights = formats.read(folder, engine.built.linears, max_rank=16, base_layers=engine.built.layers)
    engine.weights[weights.info.digest] = weights
    return weights.info.digest


def test_eight_adapters_in_one_batch_are_each_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other ranks and of both formats, on every linear of a hybrid or on those of its recurrent layer alone."""
    model = tiny_models.make(tmp_path / "model", HYBRID, **tiny_families.EVERY_EXPERT)
    engine = make_engine(model, max_loras=8, max_num_seqs=9, num_blocks=96)
    oracles: dict[str | None, Oracle] = {None: Oracle.load(model)}
    for i in range(8):
        keep = (lambda path: "linear_attn" in path) if i % 4 == 3 else (lambda path: True)
        kind = ("mlx-lm", "peft")[i % 2]
        deltas = tiny_models.make_adapter(
            tmp_path / f"{i}", engine.built.linears, kind, rank=(4, 8, 2)[i % 3], seed=20 + i, keep=keep
        )
        name = load(engine, tmp_path / f"{i}")
        oracles[name] = Oracle.load(model)
        tiny_models.merge(oracles[name].model, deltas)
    everyone = [ask(i, PROMPTS[(1, 3)[i % 2]], name) for i, name in enumerate(oracles)]
    steps: list[set[int]] = []
    launch = engine.built.runner.launch
    monkeypatch.setattr(
        engine.built.runner,
        "launch",
        lambda plan: (steps.append({row.lora_slot for row in plan.rows}), launch(plan))[1],
    )
    loop = engine.run(everyone, chunks=9)
    assert max(map(len, steps)) == 9, "no step had all of them"
    assert_agrees(loop, oracles, "mixed")
    assert len({tuple(loop.tokens[i, 0]) for i in range(0, 9, 2)}) == 5, "adapters that change nothing show nothing"


@pytest.mark.parametrize("family", ["deepseek_v2", "jamba", "lfm2_moe", "mixtral", HYBRID])
def test_experts_of_both_formats_are_the_merged_weights(family: str, tmp_path: Path) -> None:
    """PEFT has a linear for each expert, mlx-lm one array for all."""
    model = tiny_models.make(tmp_path / "model", family)
    engine = make_engine(model)
    experts = {path for path, shape in engine.built.linears.items() if shape.experts}
    assert experts
    oracles: dict[str | None, Oracle] = {None: Oracle.load(model)}
    for seed, kind in enumerate(("mlx-lm", "peft")):
        folder = tmp_path / kind
        deltas = tiny_models.make_adapter(
            folder, engine.built.linears, kind, rank=4, seed=seed, keep=experts.__contains__
        )
        name = load(engine, folder)
        oracles[name] = Oracle.load(model)
        tiny_models.merge(oracles[name].model, deltas)
    loop = engine.run([ask(i, PROMPTS[1], name) for i, name in enumerate(oracles)], chunks=9)
    assert_agrees(loop, oracles, "experts")
    assert len({tuple(loop.tokens[i, 0]) for i in range(3)}) == 3


@pytest.mark.parametrize("family", ["deepseek_v3", "falcon_h1", HYBRID])
def test_what_mlx_lm_s_trainer_saves_is_served_as_mlx_lm_loads_it(family: str, tmp_path: Path) -> None:
    """Adapters of all linears that mlx-lm adapts, those of experts and of recurrent layers among them."""
    from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

    model = tiny_models.make(tmp_path / "model", family)
    engine, tuned = make_engine(model), Oracle.load(model).model
    config = {"rank": 4, "scale": 3.0, "dropout": 0.0}
    tuned.freeze()
    linear_to_lora_layers(tuned, 2, config)
    drawn = np.random.default_rng(0)
    tuned.update(
        tree_map_with_path(
            lambda path, p: mx.array(drawn.standard_normal(p.shape).astype(np.float32) * 0.2),
            tuned.trainable_parameters(),
        )
    )
    folder = tmp_path / "adapter"
    folder.mkdir()
    trained: Any = tree_flatten(tuned.trainable_parameters())
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(trained))
    about = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": config}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    name = load(engine, folder)
    oracles: dict[str | None, Oracle] = {None: Oracle.load(model), name: Oracle.load(model)}
    load_adapters(oracles[name].model, str(folder))
    oracles[name].model.eval()
    loop = engine.run([ask(1, PROMPTS[1], name), ask(2, PROMPTS[3]), ask(4, PROMPTS[3], name)], chunks=9)
    assert_agrees(loop, oracles, "tuned")
    assert loop.tokens[2, 0] != loop.tokens[4, 0]


LIKED = range(3, tiny_models.VOCAB // 2)
"""Tokens that the task rewards."""

PROMPTS_OF_AN_UPDATE = 12
"""With a third of them, and three times the rate, an adapter wanders as far without a signal as with one."""


def learn(folder: Path, *, shuffled: bool) -> list[float]:
    """Let an adapter of a hybrid learn to say the tokens that are liked; return the mean reward of each update.

    `shuffled`: rewards change places within their group before they are learned from.
    """
    engine, trainers = make_engine(folder, max_num_seqs=8 * PROMPTS_OF_AN_UPDATE, num_blocks=400), trainers_of(folder)
    trainers.open(TrainerSpec("policy", 8, 16.0, seed=1), "", None)
    config = RLTrainingConfig(enabled=True, algorithm="grpo", update_frequency=8 * PROMPTS_OF_AN_UPDATE)
    g = random.Random(0)
    curve = []
    for update in range(14):
        prompts = [tuple(g.randrange(3, tiny_models.VOCAB) for _ in range(6)) for _ in range(PROMPTS_OF_AN_UPDATE)]
        sampled = sample(engine, prompts, trainers.publish("policy")(), seed=100 * update)
        curve.append(sum(t.reward for t in sampled) / len(sampled))
        groups = [group for group in by_group(sampled) if varies(group)]
        if shuffled:
            groups = [with_rewards(group, g.sample([t.reward for t in group], len(group))) for group in groups]
        for batch in batches(groups, config):
            finish(trainers.run([batch], False, 0))
        finish(trainers.step("policy", AdamParams(0.05, grad_norm=1.0)))
        trainers.settle("policy", True)
    return curve


def sample(
    engine: Engine, prompts: Sequence[tuple[int, ...]], weights: formats.AdapterWeights, *, seed: int
) -> list[Trajectory]:
    """Eight answers of six tokens to each prompt, and the share of their tokens that is liked."""
    name = weights.info.digest
    engine.weights.clear()
    engine.weights[name] = weights
    adapter = AdapterRef("policy", 1, name)
    params = [SamplingParams(max_tokens=6, logprobs=0, seed=seed + i, ignore_eos=True) for i in range(len(prompts))]
    loop = engine.run([Request(i, p, params[i], adapter, 8) for i, p in enumerate(prompts)])
    return [
        Trajectory(
            f"{number}.{choice}", str(number), prompts[number], tuple(tokens),
            tuple(said.sampled for said in loop.logprobs[number, choice]),
            tuple(said.model for said in loop.logprobs[number, choice]),
            (0,) * len(tokens), 1.0, sum(token in LIKED for token in tokens) / len(tokens),
        )
        for (number, choice), tokens in sorted(loop.tokens.items())
    ]  # fmt: skip


def with_rewards(group: Sequence[Trajectory], rewards: Sequence[float]) -> list[Trajectory]:
    return [replace(t, reward=reward) for t, reward in zip(group, rewards, strict=True)]


def test_a_hybrid_learns_what_is_rewarded_and_nothing_from_rewards_that_changed_places(tmp_path: Path) -> None:
    """Without a signal the adapter wanders, but not towards the reward as it does with one."""
    folder = tiny_models.make(tmp_path / "model", "qwen3_5")
    gains = [np.mean(curve[-3:]) - np.mean(curve[:3]) for curve in (learn(folder, shuffled=s) for s in (False, True))]
    assert gains[0] > 0.25, gains
    assert abs(gains[1]) < 0.2, gains
