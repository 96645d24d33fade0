"""Training and serving on one base: they agree, share its weights, and take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.config import CacheConfig, DutyConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig, TrainerSpec
from mlx_tandem.model.backend.cpu import CPU
from mlx_tandem.model.build import build
from mlx_tandem.training.device.cutting import Cutting
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests import tiny_models
from tests.engine.learning import base_leaves, finish, some_data, strengthen
from tests.engine.mlx_engine import Engine

SPEC = TrainerSpec("a", 4, 8.0, seed=5)


def serve_and_train(folder: Path, dtype: str = "float32") -> tuple[Engine, MLXTrainers]:
    """Return an engine and trainers of one base."""
    weights: dict[str, Any] = {}
    config = EngineConfig(
        model=ModelConfig(path=str(folder), dtype=dtype),  # type: ignore[arg-type]
        cache=CacheConfig(block_size=8, num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=6),
        lora=LoraConfig(max_loras=3, max_lora_rank=16),
    )
    built = build(config, weights, lambda stage, fraction: None)
    trainers = MLXTrainers(
        built.twin, built.adapter_dtype, vocab_size=tiny_models.VOCAB, micro_batch_tokens=64, most_tokens=200
    )
    return Engine(built, weights), trainers


@pytest.mark.promise("DET-3")
@pytest.mark.parametrize(
    ("family", "bits", "dtype", "tolerance"),
    [
        ("qwen3", None, "float32", 1e-4),
        ("llama", 4, "float32", 1e-4),
        ("gemma2", None, "float32", 1e-4),
        ("gemma3_text", None, "float32", 1e-4),
        ("qwen3_moe", None, "float32", 1e-4),
        ("qwen3", None, "bfloat16", 0.1),
    ],
)
def test_sampler_and_trainer_agree(family: str, bits: int | None, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """What a mixed batch drew under a published version, against the trainer's forward of the same tokens."""
    engine, trainers = serve_and_train(tiny_models.make(tmp_path / family, family, bits=bits), dtype)
    before = engine.built.runner
    trainers.open(SPEC, "", None)
    strengthen(trainers, "a")
    adapter = trainers.publish("a")()
    engine.weights[adapter.info.digest] = adapter
    ref = AdapterRef("a", 1, adapter.info.digest)
    g = np.random.default_rng(0)
    requests = [
        Request(
            i,
            tuple(g.integers(3, tiny_models.VOCAB, 9 + i).tolist()),
            SamplingParams(max_tokens=14, temperature=0.8, logprobs=0, seed=i),
            ref if i % 2 else None,
            n=2,
        )
        for i in range(4)
    ]
    loop = engine.run(requests)
    for adapted in (True, False):
        if not adapted:
            trainers.open(SPEC, "", None)  # as fresh as the base
        chosen = [(r, k) for r in requests for k in range(2) if (r.adapter is not None) == adapted]
        data = tuple(
            Datum((*r.prompt, *loop.tokens[r.id, k]), len(r.prompt), (1.0,) * 14, (-1.0,) * 14, 0.8) for r, k in chosen
        )
        (result,) = finish(trainers.run([Batch("a", data, LossConfig())], True, 0))
        worst = 0.0
        for (r, k), hot, cold in zip(chosen, result.logprobs, result.model_logprobs, strict=True):
            said = loop.logprobs[r.id, k]
            worst = max(worst, *(abs(lp.sampled - p) for lp, p in zip(said, hot, strict=True)))
            worst = max(worst, *(abs(lp.model - p) for lp, p in zip(said, cold, strict=True)))
        assert worst <= tolerance
    assert engine.built.runner is before


def test_serving_goes_on_between_slices(tmp_path: Path) -> None:
    """Steps and slices in turn, on one thread: both say what each says alone."""
    engine, trainers = serve_and_train(tiny_models.make(tmp_path / "m", "qwen3"))
    trainers.open(SPEC, "", None)
    strengthen(trainers, "a")
    batch = Batch("a", tuple(some_data()), LossConfig(kl_coef=0.1))
    request = Request(0, (5, 6, 7), SamplingParams(max_tokens=40, temperature=0.0, logprobs=0))
    alone = engine.run([request])
    result = finish(trainers.run([batch], False, 0))
    trainers.drop_gradients("a")

    loop = engine.loop()
    loop.add(request)
    slices = trainers.run([batch], False, 0)
    for _ in slices:
        loop.step()
    loop.run()
    assert loop.tokens == alone.tokens
    assert loop.logprobs == alone.logprobs
    trainers.drop_gradients("a")
    assert finish(trainers.run([batch], False, 0)) == result


@pytest.mark.promise("FLT-54")
def test_the_longest_prompt_beside_a_pass_stays_within_what_was_divided() -> None:
    """Neither waits for memory: each has its own part, and the answer is that of the prompt alone."""
    weights: dict[str, Any] = {}
    config = EngineConfig(
        ModelConfig(str(demo.MODEL_PATH), max_model_len=1024),
        CacheConfig(num_blocks=66),
        scheduler=SchedulerConfig(max_num_seqs=2, max_chunk_tokens=256),
        duty=DutyConfig(trainer_rank=8),
    )
    built = build(config, weights, lambda stage, fraction: None)
    engine, memory = Engine(built, weights), built.info.memory
    prompt = tuple(np.random.default_rng(0).integers(3, 1000, 1020).tolist())
    request = Request(0, prompt, SamplingParams(max_tokens=4, temperature=0.0))
    alone = engine.run([request])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cutting = Cutting(kept_bytes=CPU.learning.kept_bytes, mask_axes=built.mask_axes)
    sizes = {"vocab_size": 1024, "micro_batch_tokens": 128, "most_tokens": 1024}
    trainers = MLXTrainers(built.twin, built.adapter_dtype, cutting=cutting, **sizes)
    trainers.open(TrainerSpec("policy", 8, 16.0), "", None)
    data = tuple(some_data(lengths=((125, 20), (125, 20), (60, 20), (60, 20))))
    loop = engine.loop(limited=True)
    loop.add(structs.replace(request, id=1))
    for _ in trainers.run([Batch("policy", data, LossConfig("importance_sampling"))], False, 0):
        loop.step()
    finish(trainers.step("policy", AdamParams(1e-4), False))
    loop.run()
    assert loop.tokens[1, 0] == alone.tokens[0, 0]
    both, room = int(mx.get_peak_memory() - before), memory.activations + memory.learning
    assert memory.activations / 20 <= both <= room, (both, room)


def test_serving_and_training_share_the_weights(tmp_path: Path) -> None:
    """The second tree costs no memory."""
    folder = tiny_models.make(tmp_path / "m", "qwen3")
    engine, trainers = serve_and_train(folder)
    mx.synchronize()
    served = {id(p) for _, p in base_leaves(trainers)}
    assert served
    own: Any = tree_flatten(engine.built.runner.module.parameters())
    assert served == {id(p) for _, p in own}
