"""Model families through the real runner: alone, batched, chunked, preempted and forked they say what mlx-lm says.

Tiny random models in float32, against mlx-lm's own forward over its own cache, one sequence at a time. Families that
differ in what the runner does for them go every way by itself; all go all of these ways in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_tandem.config import ModelConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model import shapes
from mlx_tandem.model.loader import load_unread, unpack_for_cpu
from mlx_tandem.model.step import forward_inputs
from mlx_tandem.model.step import rows as rectangles
from mlx_tandem.model.step.forward_inputs import InputBuilder
from mlx_tandem.model.step.pauses import Pauses
from mlx_tandem.model.step.rows import Rectangles
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_families, tiny_models
from tests.engine.agreement import check_all_at_once
from tests.engine.mlx_engine import Engine, Oracle, assert_agrees, make_engine

TOKENS = 6
_rng = np.random.default_rng(7)
PROMPTS = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 33, 1, 17)]
COMPILED = ("llama", "qwen3_moe")
"""These run compiled, as serving does; the others traced anew for each step, which spares a compiler per family."""


@pytest.fixture(autouse=True)
def _compile_some(request: pytest.FixtureRequest) -> Iterator[None]:
    family = request.node.callspec.params.get("family") if hasattr(request.node, "callspec") else None
    if family not in COMPILED:
        mx.disable_compile()
    yield
    mx.enable_compile()


def ask(number: int, prompt: tuple[int, ...], *, n: int = 1, max_tokens: int = TOKENS) -> Request:
    """Every second one asks for its prompt's logprobs, too."""
    scores = (5, None)[number % 2]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=5, prompt_logprobs=scores)
    return Request(number, prompt, params, n=n)


def check_every_way(engine: Engine, oracle: Oracle, record: Callable[[str, object], None]) -> None:
    """All cases of the equivalence matrix that there are for one model."""
    ties: list[str] = []
    everyone = [ask(i, p) for i, p in enumerate(PROMPTS)]

    alone = engine.run([ask(0, PROMPTS[1])])
    ties += assert_agrees(alone, oracle, "alone")
    assert len(set(alone.tokens[0, 0])) > 1, "a model that repeats one token shows little"

    # As many rows as KV heads: a mask of the wrong rank broadcasts over the heads without an error.
    pair = everyone[: tiny_families.KV_HEADS]
    ties += assert_agrees(engine.run(pair, chunks=64), oracle, "as many rows as KV heads")

    ties += assert_agrees(engine.run(everyone, depth=0), oracle, "batched")
    ties += assert_agrees(engine.run(everyone, chunks=7, stagger=2), oracle, "chunked")

    crowded = engine.run([ask(i, PROMPTS[i], max_tokens=24) for i in (0, 2, 3)], blocks=7)
    assert crowded.scheduler.queue.preemptions > 0
    ties += assert_agrees(crowded, oracle, "preempted")

    # Positions of 13 tokens that end within a block, which each choice needs its own copy of; 32 end with one.
    ties += assert_agrees(engine.run([ask(0, PROMPTS[1], n=2), ask(1, PROMPTS[3][:14], n=3)]), oracle, "forked")
    ties += check_hits(engine, oracle)
    record("near_ties", ties)


def check_at_once(engine: Engine, oracle: Oracle, record: Callable[[str, object], None]) -> None:
    """Batched, chunked, preempted, forked, one request after the other joining: all in one run; and a pair."""
    crowd = [ask(1, PROMPTS[1], n=2), *(ask(i, PROMPTS[i], max_tokens=12) for i in (0, 2, 3))]
    crowded = engine.run(crowd, blocks=8, chunks=12, stagger=1)
    assert crowded.scheduler.queue.preemptions > 0
    assert len(set(crowded.tokens[1, 0])) > 1, "a model that repeats one token shows little"
    ties = assert_agrees(crowded, oracle, "all at once")
    pair = [ask(i, p) for i, p in enumerate(PROMPTS)][: tiny_families.KV_HEADS]
    ties += assert_agrees(engine.run(pair, chunks=64), oracle, "as many rows as KV heads")
    record("near_ties", ties)


def check_hits(engine: Engine, oracle: Oracle) -> list[str]:
    """The same prompt again, a later turn of it, another end of it within a block, and choices of it: all hits."""
    loop = engine.loop(chunks=7)
    first = PROMPTS[1]
    turns = [(first, 1), (first, 1), ((*first, *PROMPTS[0]), 1), ((*first[:30], *PROMPTS[3]), 1), (first, 3)]
    for i, (prompt, n) in enumerate(turns):
        loop.add(ask(2 * i + 1, prompt, n=n))
        loop.run()
    loop.assert_idle()
    assert [loop.cached[2 * i + 1] for i in range(len(turns))] == [0, 32, 32, 30, 32]
    return assert_agrees(loop, oracle, "a prefix that was there")


@pytest.mark.promise("DET-2")
@pytest.mark.parametrize("family", tiny_families.DISTINCT)
def test_a_family_that_the_runner_knows_is_served_every_way(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = tiny_models.make(tmp_path / family, family)
    check_every_way(make_engine(folder), Oracle.load(folder), record_property)


@pytest.mark.parametrize("family", [f for f in tiny_families.SERVED if f not in tiny_families.RECURRENT])
def test_a_family_is_served_as_mlx_lm_runs_it(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_all_at_once(tmp_path, family, record_property)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "qwen3_moe", "gpt2", "gemma3_text"])
def test_a_prompt_that_lies_in_one_run_is_read_in_place(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts whose blocks are contiguous are not gathered; from two blocks on here."""
    monkeypatch.setattr(forward_inputs, "VIEW_BLOCKS", 2)
    folder = tiny_models.make(tmp_path / family, family)
    engine, oracle = make_engine(folder), Oracle.load(folder)
    contiguous: list[tuple[int, int] | None] = []
    find = InputBuilder._contiguous

    def watched(self: InputBuilder, rows: Any, pool: int) -> tuple[int, int] | None:
        contiguous.append(find(self, rows, pool))
        return contiguous[-1]

    monkeypatch.setattr(InputBuilder, "_contiguous", watched)
    assert_agrees(engine.run([ask(0, PROMPTS[1] * 3), ask(1, PROMPTS[3])], chunks=20), oracle, "in place")
    assert any(contiguous), "nothing was read in place"


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "qwen3_moe", "gemma3_text", "gpt_oss"])
def test_chunks_that_begin_together_need_no_mask(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs read prompts; from two tokens on here."""
    monkeypatch.setattr(rectangles, "COMMON_OFFSET_TOKENS", 2)
    monkeypatch.setattr(forward_inputs, "VIEW_BLOCKS", 2)
    folder = tiny_models.make(tmp_path / family, family)
    offsets: list[int | None] = []
    find = Rectangles.common_offset

    def watched(self: Rectangles, rows: Any) -> int | None:
        offsets.append(find(self, rows))
        return offsets[-1]

    monkeypatch.setattr(Rectangles, "common_offset", watched)
    engine, oracle = make_engine(folder), Oracle.load(folder)
    engine.built.runner.rectangles.common_offsets, engine.built.runner.pauses = True, Pauses(16, group=2)
    everyone = [ask(i, p, max_tokens=12) for i, p in enumerate((*PROMPTS, PROMPTS[1] * 3))]
    assert_agrees(engine.run(everyone, chunks=7), oracle, "common offset")
    assert 0 in offsets
    assert any(offsets), "no chunk behind another"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_numbers_may_travel_as_one_array(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """As they do on CUDA."""
    folder = tiny_models.make(tmp_path / family, family)
    engine = make_engine(folder)
    engine.built.runner.inputs.packed = True
    check_every_way(engine, Oracle.load(folder), record_property)


def test_a_long_context_beside_short_ones_runs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the gain, here."""
    monkeypatch.setattr(shapes, "SPLIT_GAIN", 0)
    folder = tiny_models.make(tmp_path / "llama", "llama")
    engine, oracle = make_engine(folder), Oracle.load(folder)
    assert_agrees(engine.run([ask(0, PROMPTS[1] * 3), *(ask(i, PROMPTS[i]) for i in (1, 2, 3))]), oracle, "split")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2"])
def test_a_quantised_model_is_served_as_mlx_lm_runs_it(
    family: str, bits: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = tiny_models.make(tmp_path / family, family, bits=bits, seed=3)
    engine = make_engine(folder)
    assert engine.built.info.quantization == f"{bits}-bit"
    check_at_once(engine, Oracle.load(folder), record_property)


@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("qwen3_moe", 4), ("gemma2", 8)])
def test_a_quantised_model_is_unpacked_on_a_cpu_and_says_the_same(
    family: str, bits: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = tiny_models.make(tmp_path / family, family, bits=bits, seed=3)
    engine = make_engine(folder, unpack_weights=True)
    assert engine.built.info.quantization == f"{bits}-bit, unpacked"
    leaves: Any = tree_flatten(engine.built.twin.parameters())
    assert {p.dtype for _, p in leaves} == {mx.float32}
    check_at_once(engine, Oracle.load(folder), record_property)


def test_weights_stay_packed_where_they_would_take_more_than_half_of_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_models.make(tmp_path / "model", "llama", bits=4)
    config = ModelConfig(str(folder))
    model = load_unread(config, lambda stage, fraction: None)
    needed = 2 * 4 * model.parameters
    kept = unpack_for_cpu(model, config, needed - 1)
    assert kept.quantization == "4-bit"
    assert "stay packed" in caplog.text
    assert unpack_for_cpu(model, config, needed).quantization == "4-bit, unpacked"


@pytest.mark.parametrize("family", tiny_families.UNSUPPORTED)
def test_a_family_that_is_not_supported_yet_is_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / family, family)
    with pytest.raises(ModelError, match=f"{family}.*not supported yet: (its|each|mlx-lm|the size)") as e:
        make_engine(folder)
    assert e.value.param == "model_type"


def test_a_folder_may_be_named_like_a_pattern(tmp_path: Path) -> None:
    """Neither what its name would match is loaded, nor nothing."""
    tiny_models.make(tmp_path / "model a", "llama", seed=1)
    plain = make_engine(tiny_models.make(tmp_path / "plain", "llama")).run([ask(0, PROMPTS[0])])
    odd = make_engine(tiny_models.make(tmp_path / "model [ab]*", "llama")).run([ask(0, PROMPTS[0])])
    assert odd.tokens == plain.tokens
