"""Pooled hidden states through the real runner: those of mlx-lm's own forward, alone and in a batch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from msgspec import structs

from mlx_tandem.adapters import formats
from mlx_tandem.types import AdapterRef, Pooling, Request, SamplingParams
from tests import tiny_models
from tests.engine.harness import Loop
from tests.engine.mlx_engine import Engine, make_engine

RNG = np.random.default_rng(3)
PROMPTS = [tuple(RNG.integers(3, tiny_models.VOCAB, n).tolist()) for n in (1, 2, 7, 8, 9, 40)]
LONG_AGAIN = (*PROMPTS[5][:24], 5, 6, 7)  # begins like another prompt, which is in the prefix cache
ADAPTER = "adapter"


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, dict[Any, Any]]:
    """An engine with one adapter, and mlx-lm's own models without and with it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_models.make(folder / "model", request.param, seed=5)
    engine = make_engine(model)
    linears, layers = engine.built.linears, engine.built.layers
    deltas = tiny_models.make_adapter(folder / "a", linears, "mlx-lm", rank=4, seed=1, keep=lambda path: True)
    weights = formats.read(folder / "a", linears, max_rank=16, base_layers=layers)
    engine.weights[ADAPTER] = weights
    oracles = {None: load_model(model)[0], ADAPTER: load_model(model)[0]}
    tiny_models.merge(oracles[ADAPTER], deltas)
    return engine, oracles


def ask(number: int, prompt: tuple[int, ...], adapter: str | None = None, pooling: Pooling | None = "mean") -> Request:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    ref = AdapterRef(adapter, 1, adapter) if adapter else None
    return Request(number, prompt, params, ref, pooling=pooling)


def expected(oracles: dict[Any, Any], request: Request) -> np.ndarray[Any, Any]:
    model = oracles[request.adapter.digest if request.adapter else None]
    hidden = np.array(model.model(mx.array([request.prompt]))[0].astype(mx.float32))
    pooled: np.ndarray[Any, Any] = hidden.mean(0) if request.pooling == "mean" else hidden[-1]
    return pooled


def check(loop: Loop, oracles: dict[Any, Any], requests: Sequence[Request]) -> None:
    for request in requests:
        found = np.array(array("f", loop.embeddings[request.id]))
        np.testing.assert_allclose(found, expected(oracles, request), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_a_plain_forward(served: tuple[Engine, dict[Any, Any]], pooling: Pooling) -> None:
    """Alone, one after the other, where the second half of the prompts is in the prefix cache."""
    engine, oracles = served
    for i, prompt in enumerate([*PROMPTS, LONG_AGAIN, PROMPTS[5]]):
        request = ask(i, prompt, pooling=pooling)
        check(engine.run([request]), oracles, [request])


@pytest.mark.parametrize("chunks", [0, 5])
def test_in_a_batch_of_everything(served: tuple[Engine, dict[Any, Any]], chunks: int) -> None:
    """With both poolings, both adapters and rows that decode, in chunks of prompts and with prompts that are shared."""
    engine, oracles = served
    each = [(p, a, k) for p in (*PROMPTS, LONG_AGAIN) for a in (None, ADAPTER) for k in ("mean", "last")]
    requests = [ask(i, *one) for i, one in enumerate(each)]
    streams = [structs.replace(ask(100 + i, PROMPTS[i], pooling=None), n=2) for i in range(3)]
    streams = [structs.replace(s, params=structs.replace(s.params, max_tokens=20)) for s in streams]
    loop = engine.run([*streams, *requests], chunks=chunks, piggybacked=16, stagger=1)
    check(loop, oracles, requests)
    assert set(loop.embeddings) == {request.id for request in requests}


def test_the_width_of_hidden_states_is_known(served: tuple[Engine, dict[Any, Any]]) -> None:
    engine, oracles = served
    assert engine.built.runner.hidden_size == expected(oracles, ask(0, PROMPTS[0])).shape[0]
