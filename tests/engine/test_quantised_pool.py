"""A pool of few bits through the real runner: what is said depends on the bits alone, not on how a batch came about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.adapters import formats
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests import tiny_families, tiny_models
from tests.engine.harness import Loop
from tests.engine.mlx_engine import TOLERANCE, Oracle, assert_agrees, make_engine

FLIP = {8: 0.03, 4: 0.3}
"""What a logprob may differ by: the last bits of float32 depend on the batch, and once in thousands of numbers they
decide to which point of its grid it goes."""

_rng = np.random.default_rng(7)
PROMPTS = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 33, 1, 17)]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Compiled are the adapters' batches here, as serving is."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def ask(number: int, *, n: int = 1, max_tokens: int = 10, adapter: str | None = None) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, logprobs=2, prompt_logprobs=2 if number == 1 else None
    )
    ref = AdapterRef(adapter, 1, adapter) if adapter else None
    return Request(number, PROMPTS[number % len(PROMPTS)], params, ref, n)


def crowd() -> list[Request]:
    return [ask(1, n=2), *(ask(i, max_tokens=24) for i in (0, 2, 3))]


def assert_says_the_same(loop: Loop, oracles: Mapping[str | None, Oracle], bits: int, case: str) -> None:
    """As each model does over keys and values of so many bits: the tokens, and most logprobs to the usual tolerance."""
    assert_agrees(loop, oracles, case, FLIP[bits], FLIP[bits])
    exact: list[bool] = []
    for (number, choice), tokens in loop.tokens.items():
        request = loop.requests[number]
        oracle = oracles[request.adapter.digest if request.adapter else None]
        logprobs = oracle.logprobs(request.prompt, tokens)
        exact += [
            abs(said.model - lp[token]) < TOLERANCE
            for token, said, lp in zip(tokens, loop.logprobs[number, choice], logprobs, strict=True)
        ]
    assert sum(exact) >= 0.6 * len(exact), f"{case}: {sum(exact)} of {len(exact)}"


@pytest.mark.promise("DET-5")
@pytest.mark.parametrize("family", [f for f in tiny_families.DISTINCT if f in tiny_families.FAMILIES])
def test_a_family_says_in_a_crowd_what_it_says_alone(family: str, tmp_path: Path) -> None:
    """Batched, chunked, forked, preempted, one request after the other joining: all in one run."""
    folder = tiny_models.make(tmp_path / family, family)
    engine, oracle = make_engine(folder, kv_bits=8), {None: Oracle.load(folder, kv_bits=8)}
    assert engine.built.info.kv_bits == 8
    crowded = engine.run(crowd(), blocks=12, chunks=7, stagger=2)
    assert crowded.scheduler.queue.preemptions > 0
    assert_says_the_same(crowded, oracle, 8, "crowded")


@pytest.mark.parametrize(
    ("family", "bits", "group", "shape"),
    [
        ("llama", 4, 64, {}),
        ("llama", 8, 8, {}),
        ("qwen3", 8, 64, {"head_dim": 80}),
        ("qwen3", 4, 32, {"head_dim": 96}),
        ("qwen3_moe", 8, 32, {"head_dim": 192}),
        ("gemma2", 8, 128, {"head_dim": 256}),
        ("deepseek_v3", 4, 64, {}),
    ],
)
def test_any_width_of_head(family: str, bits: int, group: int, shape: dict[str, int], tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / family, family, **shape)
    engine = make_engine(folder, kv_bits=bits, kv_group_size=group)
    oracle = {None: Oracle.load(folder, kv_bits=bits, kv_group_size=group)}
    assert_says_the_same(engine.run([ask(1)]), oracle, bits, "alone")
    assert_says_the_same(engine.run(crowd(), chunks=7, stagger=2), oracle, bits, "crowded")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_adapters_of_every_kind_share_a_batch(family: str, tmp_path: Path) -> None:
    mx.enable_compile()
    model = tiny_models.make(tmp_path / "model", family, seed=3)
    engine = make_engine(model, kv_bits=8, max_loras=2)
    oracles: dict[str | None, Oracle] = {None: Oracle.load(model, kv_bits=8)}
    for seed, (kind, rank) in enumerate((("mlx-lm", 4), ("peft", 16), ("peft", 1))):
        folder = tmp_path / str(seed)
        deltas = tiny_models.make_adapter(folder, engine.built.linears, kind, rank=rank, seed=seed)  # type: ignore[arg-type]
        weights = formats.read(folder, engine.built.linears, max_rank=16, base_layers=engine.built.layers)
        engine.weights[weights.info.digest] = weights
        oracles[weights.info.digest] = Oracle.load(model, kv_bits=8)
        tiny_models.merge(oracles[weights.info.digest].model, deltas)
    requests = [ask(i, adapter=name, max_tokens=12) for i, name in enumerate([*oracles, *reversed(oracles)])]
    loop = engine.run(requests, chunks=9, stagger=1)
    assert len({tuple(t) for t in loop.tokens.values()}) >= 6, "adapters have answers of their own"
    assert_says_the_same(loop, oracles, 8, "mixed")


@pytest.mark.promise("DET-5")
def test_fewer_bits_hold_more_and_say_nearly_the_same(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", "llama", head_dim=64)
    pools = {bits: make_engine(folder, kv_bits=bits) for bits in (16, 8, 4)}  # type: ignore[arg-type]
    sizes = {bits: engine.built.runner.pool_bytes for bits, engine in pools.items()}
    full = sizes[16] // 2  # in bfloat16
    assert sizes[8] <= 0.54 * full
    assert sizes[4] <= 0.29 * full
    for bits, engine in pools.items():
        info = engine.built.info
        assert info.kv_bytes_per_token * info.block_size * info.num_blocks == sizes[bits]
        assert info.kv_bits == {16: 32}.get(bits, bits)
    said = {bits: engine.run([ask(1)]).prompt_logprobs[1] for bits, engine in pools.items()}
    off = {
        bits: np.mean([abs(a.model - b.model) for a, b in zip(said[bits], said[16], strict=True)]) for bits in (8, 4)
    }
    assert 0 < off[8] < 0.02
    assert off[8] < off[4] < 0.4
