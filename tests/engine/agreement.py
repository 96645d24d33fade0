"""A family through the real runner in all ways at once, and what mlx-lm says about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlx_tandem.adapters import formats
from mlx_tandem.kv.disk.cache import DiskCache
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests import tiny_models
from tests.engine.harness import Loop
from tests.engine.mlx_engine import TOLERANCE, Engine, Oracle, assert_agrees, make_engine

_rng = np.random.default_rng(7)
PROMPTS = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 33, 1, 17)]
Oracles = dict[str | None, Oracle]
WIDE = {"gemma": 2e-4}
"""What a logprob may differ by where embeddings are so large that float32 rounds them by more than elsewhere."""
FRUGAL = ("recurrent_gemma", "spark2_5")
"""Families without layers that see everything: it takes longer sequences until one of them has to be preempted."""


def ask(
    number: int, prompt: tuple[int, ...], adapter: str | None = None, *, n: int = 1, max_tokens: int = 10
) -> Request:
    """Every third one asks for its prompt's logprobs, too."""
    scores = 3 if number % 3 == 0 else None
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=5, prompt_logprobs=scores)
    return Request(number, prompt, params, AdapterRef(adapter, 1, adapter) if adapter else None, n)


def serve_with_adapter(
    folder: Path, family: str, make: Callable[[Path], Engine] = make_engine, **model: Any
) -> tuple[Engine, Oracles, str]:
    """An engine with an adapter on every linear, the models that say what is right, and the adapter's name. `model`: as
    `tiny_models.make` takes it."""
    path = tiny_models.make(folder / "model", family, **model)
    engine = make(path)
    linears = engine.built.linears
    deltas = tiny_models.make_adapter(folder / "a", linears, "mlx-lm", rank=4, seed=1)
    weights = formats.read(folder / "a", linears, max_rank=16, base_layers=engine.built.layers)
    name = weights.info.digest
    engine.weights[name] = weights
    oracles: Oracles = {None: Oracle.load(path), name: Oracle.load(path)}
    tiny_models.merge(oracles[name].model, deltas)
    return engine, oracles, name


def pairs(adapter: str) -> list[Request]:
    """One prompt, twice without an adapter and twice with it."""
    return [ask(i, PROMPTS[1], name, max_tokens=3) for i, name in ((1, None), (2, None), (4, adapter), (5, adapter))]


def cached(loop: Loop, *requests: Request, drive: DiskCache | None = None) -> list[int | None]:
    """How many tokens each of these requests finds, one after the other."""
    for request in requests:
        loop.add(request)
        assert drive is None or drive.settle()
        loop.run()
    return [loop.cached[request.id] for request in requests]


def check_all_at_once(
    folder: Path,
    family: str,
    record: Callable[[str, object], None],
    make: Callable[[Path], Engine] = make_engine,
    **model: Any,
) -> tuple[Engine, Oracles, str]:
    """Batched, chunked, preempted, forked, with and without an adapter, one request after the other joining; then
    alone from a prefix that was there. Return what `serve_with_adapter` does."""
    engine, oracles, adapter = serve_with_adapter(folder, family, make, **model)
    crowd = [ask(1, PROMPTS[1], n=2), ask(2, PROMPTS[1], adapter)]
    most = 24 if family in FRUGAL else 12
    crowd += [ask(i, PROMPTS[i % 4], (None, adapter)[i % 2], max_tokens=most) for i in (4, 6, 7)]
    crowded = engine.run(crowd, blocks=10, chunks=12, stagger=1)
    assert crowded.scheduler.queue.preemptions > 0
    assert len(set(crowded.tokens[1, 0])) > 1, "a model that repeats one token shows little"
    assert crowded.tokens[1, 0] != crowded.tokens[2, 0], "the adapter changes nothing"
    tolerance = WIDE.get(family, TOLERANCE)
    ties = assert_agrees(crowded, oracles, "all at once", tolerance)
    loop = engine.loop(chunks=20)
    assert cached(loop, *pairs(adapter)) == [0, 32, 0, 32]
    ties += assert_agrees(loop, oracles, "a prefix that was there", tolerance)
    record("near_ties", ties)
    return engine, oracles, adapter
