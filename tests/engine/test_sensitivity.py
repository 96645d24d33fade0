"""The comparisons that the equivalence tests stand on see what differs: a test that cannot fail shows nothing.

Each of these is a way in which an engine could be a little wrong: another precision, a rounded cache, a position, a
weight or an adapter that is off. `assert_agrees` must fail for it, and the equality of draws must be broken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from mlx_tandem.adapters import formats
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests import tiny_models
from tests.engine.harness import Loop
from tests.engine.mlx_engine import NEAR_TIE, TOLERANCE, Engine, Oracle, assert_agrees, make_engine

PROMPTS = [tuple(np.random.default_rng(11).integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 33, 9)]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("model") / "model", "qwen3", seed=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle.load(folder)


def requests(**params: Any) -> list[Request]:
    own = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "logprobs": 5, "prompt_logprobs": 3} | params)
    return [Request(i, prompt, own) for i, prompt in enumerate(PROMPTS)]


def assert_differs(loop: Loop, oracle: Oracle | dict[str | None, Oracle], says: str | None = None) -> None:
    with pytest.raises(AssertionError, match=says):
        assert_agrees(loop, oracle, "what is known to differ")


def test_what_is_right_agrees(engine: Engine, oracle: Oracle) -> None:
    """Or the others below would fail for another reason."""
    assert_agrees(engine.run(requests()), oracle, "right")


# --- precisions and shapes that are known to differ ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_precision_is_seen(folder: Path, oracle: Oracle, dtype: Any) -> None:
    assert_differs(make_engine(folder, dtype=dtype).run(requests()), oracle, "logprob")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_cache_is_seen(folder: Path, oracle: Oracle, bits: Any) -> None:
    """By an oracle that rounds nothing; the oracle that rounds as the cache does agrees.

    A key or value between two steps of the grid may be rounded to either of them: one step of 8 bits changes a logprob
    by 2e-4, and not rounding at all by 4e-2."""
    loop = make_engine(folder, kv_bits=bits).run(requests())
    assert_differs(loop, oracle, "logprob")
    assert_agrees(loop, Oracle.load(folder, kv_bits=bits), "rounded alike", tolerance=1e-3)


def draws(engine: Engine) -> dict[tuple[int, int], list[int]]:
    hot = [structs.replace(r, n=6) for r in requests(temperature=1.0, seed=3, max_tokens=30, prompt_logprobs=None)]
    return engine.run(hot).tokens


def test_draws_of_another_precision_are_other_draws(folder: Path, engine: Engine) -> None:
    """Equality of seeded draws, with which batches, chunks and preemption are compared, is not so weak that precision
    passes it."""
    own = draws(engine)
    assert own == draws(engine)
    for dtype in ("bfloat16", "float16"):
        assert draws(make_engine(folder, dtype=dtype)) != own, dtype


@pytest.mark.promise("DET-2")
def test_shapes_differ_within_the_tolerance_and_not_beyond_it(engine: Engine, oracle: Oracle) -> None:
    """One forward over a sequence and one token after another give numbers that are not the same bits. The tolerance
    is for that, and an order above what it has to cover."""
    prompt = PROMPTS[1]
    tokens, one_by_one = oracle.one_by_one(prompt, 20)
    at_once = oracle.logprobs(prompt, tokens)
    apart = [float(np.abs(a - b).max()) for a, b in zip(at_once, one_by_one, strict=True)]
    assert 0 < max(apart) < TOLERANCE / 10


# --- mistakes that an engine could make ----------------------------------------------------------------------------


def changed(folder: Path, tmp_path: Path, **settings: Any) -> Path:
    """The same weights under other settings."""
    other = tmp_path / "changed"
    other.mkdir()
    (other / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    assert settings.keys() <= config.keys()
    (other / "config.json").write_text(json.dumps(config | settings))
    return other


@pytest.mark.parametrize("settings", [{"rope_theta": 9_990.0}, {"rms_norm_eps": 1e-4}])
def test_another_setting_of_the_model_is_seen(
    engine: Engine, folder: Path, tmp_path: Path, settings: dict[str, float]
) -> None:
    assert_differs(engine.run(requests()), Oracle.load(changed(folder, tmp_path, **settings)))


@pytest.mark.promise("DET-7")
def test_a_weight_that_is_off_by_a_percent_is_seen(engine: Engine, folder: Path) -> None:
    other = Oracle.load(folder)
    model: Any = other.model
    linear = model.model.layers[1].self_attn.v_proj
    linear.weight = linear.weight * 1.01
    assert_differs(engine.run(requests()), other)


def test_an_adapter_that_is_off_by_a_percent_is_seen(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder)
    deltas = tiny_models.make_adapter(tmp_path / "adapter", engine.built.linears, "mlx-lm", rank=4, seed=5)
    weights = formats.read(tmp_path / "adapter", engine.built.linears, max_rank=16, base_layers=engine.built.layers)
    digest = weights.info.digest
    engine.weights[digest] = weights
    oracles: dict[float, dict[str | None, Oracle]] = {}
    for factor in (1.0, 1.01):
        merged = Oracle.load(folder)
        tiny_models.merge(merged.model, {path: factor * delta for path, delta in deltas.items()})
        oracles[factor] = {digest: merged}
    loop = engine.run([structs.replace(r, adapter=AdapterRef("a", 1, digest)) for r in requests()])
    assert_agrees(loop, oracles[1.0], "right")
    assert_differs(loop, oracles[1.01])


@pytest.mark.promise("DET-7")
def test_a_position_that_is_off_by_one_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch, oracle: Oracle) -> None:
    """Of one token in the middle of one prompt, as if a chunk had begun one place too late."""
    engine = make_engine(folder)
    device = engine.built.runner
    launch = device.launch

    def late(plan: Any) -> Any:
        rows = tuple(
            structs.replace(r, tokens=(r.tokens[0], *r.tokens[:-1])) if len(r.tokens) > 9 else r for r in plan.rows
        )
        return launch(replace(plan, rows=rows))

    monkeypatch.setattr(device, "launch", late)
    assert_differs(engine.run(requests()), oracle)


# --- what is said of them ------------------------------------------------------------------------------------------


def _raise_a_logprob(loop: Loop) -> None:
    said = loop.logprobs[1, 0][4]
    loop.logprobs[1, 0][4] = structs.replace(said, model=said.model + 2 * TOLERANCE)


def _swap_the_likeliest(loop: Loop) -> None:
    said = loop.logprobs[2, 0][3]
    loop.logprobs[2, 0][3] = structs.replace(said, top=(said.top[1], said.top[0], *said.top[2:]))


def _draw_the_second(loop: Loop) -> None:
    second, value = loop.logprobs[0, 0][-1].top[1]
    assert loop.logprobs[0, 0][-1].model - value > NEAR_TIE
    loop.tokens[0, 0][-1] = second
    loop.logprobs[0, 0][-1] = structs.replace(loop.logprobs[0, 0][-1], model=value)


def _lose_the_last(loop: Loop) -> None:
    loop.tokens[1, 0].pop()
    loop.logprobs[1, 0].pop()


def _take_another_s(loop: Loop) -> None:
    for told in (loop.tokens, loop.logprobs):
        told[0, 0], told[2, 0] = told[2, 0], told[0, 0]  # type: ignore[index]


def _raise_a_rank(loop: Loop) -> None:
    said = loop.prompt_logprobs[1][7]
    loop.prompt_logprobs[1][7] = structs.replace(said, rank=said.rank + 1)


def _shift_the_prompt_s(loop: Loop) -> None:
    loop.prompt_logprobs[1] = loop.prompt_logprobs[1][1:] + loop.prompt_logprobs[1][:1]


@pytest.mark.parametrize(
    "spoil",
    [
        _raise_a_logprob,
        _swap_the_likeliest,
        _draw_the_second,
        _lose_the_last,
        _take_another_s,
        _raise_a_rank,
        _shift_the_prompt_s,
    ],
)
def test_a_single_wrong_word_is_seen(engine: Engine, oracle: Oracle, spoil: Callable[[Loop], None]) -> None:
    loop = engine.run(requests())
    spoil(loop)
    assert_differs(loop, oracle)
