"""Blocks of the real runner on a real drive: what comes back is what was computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.config import DiskCacheConfig
from mlx_tandem.engine.kv_offload import reads
from mlx_tandem.kv.disk.cache import DiskCache
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.harness import Loop
from tests.engine.mlx_engine import Oracle, assert_agrees, make_engine

PROMPT = tuple(np.random.default_rng(7).integers(3, tiny_models.VOCAB, 41).tolist())


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reads, "WORTH_READING", 1)
    mx.disable_compile()
    yield
    mx.enable_compile()


def ask(loop: Loop, number: int, drive: DiskCache) -> None:
    """A request beside a stream that is under way."""
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=2)
    loop.add(Request(100 + number, PROMPT[::-1], params))
    loop.step()
    loop.add(Request(number, PROMPT, SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)))
    assert drive.settle()
    loop.run()
    loop.assert_idle()


@pytest.mark.promise("DET-8")
@pytest.mark.parametrize(
    ("family", "bits"),
    [
        ("llama", 16),
        ("gemma2", 16),
        ("deepseek_v3", 16),
        ("qwen3_moe", 8),
        ("gpt2", 4),
        ("gemma3_text", 16),
        ("spark2_5", 16),
        ("gpt_oss", 8),
    ],
)
@pytest.mark.parametrize("step_blocks", [2, 100])
def test_a_hit_on_the_drive_is_a_hit_in_memory(
    family: str, bits: Literal[4, 8, 16], step_blocks: int, tmp_path: Path
) -> None:
    """After all that was in memory is gone; where nothing is rounded it is what mlx-lm says."""
    folder = tiny_models.make(tmp_path / family, family)
    engine = make_engine(folder, kv_bits=bits)
    config = DiskCacheConfig(dir=str(tmp_path / "kv"))
    first = DiskCache(config, bytes(32))
    loop = engine.loop(drive=first)
    for number in (0, 1):
        ask(loop, number, first)
    assert first.settle()
    first.close()
    engine.built.runner.reset()
    second = DiskCache(config, bytes(32))
    try:
        assert second.settle()
        again = engine.loop(drive=second)
        assert again.scheduler.offload is not None
        link = again.scheduler.offload.link
        link.step_bytes = step_blocks * link.blocks.nbytes
        ask(again, 1, second)
        assert again.cached[1] == loop.cached[1] == 40
        assert again.scheduler.offload.reads.hit_tokens >= 40
        assert again.tokens[1, 0] == loop.tokens[1, 0]
        np.testing.assert_allclose(
            [p.model for p in again.logprobs[1, 0]], [p.model for p in loop.logprobs[1, 0]], atol=1e-5
        )
        if bits == 16:
            assert_agrees(again, Oracle.load(folder), "from the drive")
    finally:
        second.close()


@pytest.mark.parametrize(("family", "depth"), [("llama", 0), ("llama", 1), ("gemma2", 1), ("gemma3_text", 1)])
def test_what_is_given_to_others_is_saved_before_they_write_to_it(family: str, depth: int, tmp_path: Path) -> None:
    """A pool for one prompt: three take turns in it, each comes back as it was."""
    folder = tiny_models.make(tmp_path / family, family)
    engine = make_engine(folder)
    drive = DiskCache(DiskCacheConfig(dir=str(tmp_path / "kv")), bytes(32))
    try:
        loop = engine.loop(blocks=8, depth=depth, drive=drive, write_through=False)
        for number in range(9):
            turned = PROMPT[number % 3 :] + PROMPT[: number % 3]
            loop.add(Request(number, turned, SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)))
            assert drive.settle()
            loop.run()
            assert drive.settle()
        loop.assert_idle()
        assert_agrees(loop, Oracle.load(folder), "evicted")
        assert [loop.cached[number] for number in range(3, 9)] == [40] * 6
    finally:
        drive.close()
