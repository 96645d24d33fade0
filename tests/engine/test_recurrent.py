"""Families with states through the real runner: they say what mlx-lm says, and states are kept where it is worth it.

Tiny random models in float32, against mlx-lm's own forward over its own cache, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_tandem.config import DiskCacheConfig
from mlx_tandem.engine import prefix_leaders
from mlx_tandem.engine.kv_offload import reads
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.kv.disk.cache import DiskCache
from mlx_tandem.model import runner
from mlx_tandem.model.overlap import decode_growth
from mlx_tandem.model.warm_up import GREEDY
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_families, tiny_models
from tests.engine.agreement import PROMPTS, ask, cached, check_all_at_once, pairs
from tests.engine.mlx_engine import Oracle, assert_agrees, make_engine


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Tracing would take longer than the steps; one test compiles them, as serving does."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@contextmanager
def drive(folder: Path) -> Iterator[DiskCache]:
    """The drive as a server finds it that starts now."""
    cache = DiskCache(DiskCacheConfig(dir=str(folder)), bytes(32))
    try:
        assert cache.settle()
        yield cache
        assert cache.settle()
    finally:
        cache.close()


@pytest.mark.parametrize("family", tiny_families.RECURRENT)
def test_a_family_with_states_is_served_as_mlx_lm_runs_it(
    family: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batched, chunked, preempted, forked, with and without an adapter, one request after the other joining; then
    alone from a prefix that was there; and from the drive, after a restart and when only states have left memory."""
    monkeypatch.setattr(reads, "WORTH_READING", 1)
    engine, oracles, adapter = check_all_at_once(tmp_path, family, record_property)
    again = pairs(adapter)
    with drive(tmp_path / "kv") as first:
        loop = engine.loop(chunks=20, drive=first)
        assert cached(loop, *again, drive=first) == [0, 32, 0, 32]
        assert_agrees(loop, oracles, "a prefix that was there")
    engine.built.runner.reset()
    with drive(tmp_path / "kv") as second:
        loop = engine.loop(chunks=20, drive=second)
        assert cached(loop, again[0], again[2], drive=second) == [32, 32]
        states = loop.scheduler._blocks._caches[-1]
        states.drop([entry.block for entry in states.entries()])
        assert cached(loop, again[1], drive=second) == [32]
        assert loop.scheduler.offload is not None and loop.scheduler.offload.reads.hit_tokens == 3 * 32
        assert_agrees(loop, oracles, "from the drive")


def test_rows_that_begin_run_beside_rows_that_go_on(tmp_path: Path) -> None:
    """Chunks of one length, and single tokens, of sequences with a state and without one."""
    folder = tiny_models.make(tmp_path / "model", "jamba")
    prompts = [PROMPTS[1][:25], PROMPTS[3][:9], PROMPTS[2], PROMPTS[2]]  # read as 16, 8 and 1; 8 and 1; 1; 1
    loop = make_engine(folder).run([ask(3 * i + 1, p) for i, p in enumerate(prompts)], stagger=1)
    assert_agrees(loop, Oracle.load(folder), "beside one another")


def test_snapshots_are_where_prompts_end_and_where_they_part(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", "qwen3_next")
    engine, first = make_engine(folder), PROMPTS[1]
    loop = engine.loop(chunks=9)
    parted = [(*first[:30], *PROMPTS[3]), (*first[:30], *PROMPTS[0])]
    turns = [ask(1, first), ask(2, first), ask(4, (*first, *PROMPTS[0])), ask(5, parted[0]), ask(7, parted[1])]
    # The first that parts from another finds nothing, and leaves its state there for the next.
    assert cached(loop, *turns) == [0, 32, 32, 0, 24]
    assert_agrees(loop, Oracle.load(folder), "snapshots")


def test_a_conversation_that_grows_finds_what_was_said(tmp_path: Path) -> None:
    """Each turn but for the tokens of its last block, and at most a block of what was drawn."""
    folder = tiny_models.make(tmp_path / "model", "lfm2")
    engine = make_engine(folder, num_blocks=64)
    loop = engine.loop()
    prompt: tuple[int, ...] = PROMPTS[3]
    found: list[int | None] = []
    for turn in range(8):
        before = len(prompt)
        found += cached(loop, ask(3 * turn + 1, prompt, max_tokens=9))
        assert turn == 0 or (found[-1] or 0) > before - len(PROMPTS[0]) - 2 * 8
        prompt = (*prompt, *loop.tokens[3 * turn + 1, 0], *PROMPTS[0])
    assert_agrees(loop, Oracle.load(folder), "a conversation")


def test_a_conversation_finds_its_last_message_though_its_answer_began_otherwise(tmp_path: Path) -> None:
    """As with templates that begin an answer with tokens that later turns do not have."""
    folder = tiny_models.make(tmp_path / "model", "lfm2")
    loop, end = make_engine(folder).loop(chunks=9), 2
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=5, stop_token_ids=(end,), min_tokens=4)
    said = (*PROMPTS[3], end)
    prompts = [(*said, *PROMPTS[1][:12]), (*said, *PROMPTS[1][12:24], end, *PROMPTS[1])]
    assert cached(loop, *(Request(i, prompt, params) for i, prompt in enumerate(prompts))) == [0, len(said) // 8 * 8]
    assert_agrees(loop, Oracle.load(folder), "another beginning of the answer")


def test_a_prompt_that_others_wait_for_leaves_a_state_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_leaders, "WORTH_WAITING", 8)
    folder = tiny_models.make(tmp_path / "model", "qwen3_next")
    engine, common = make_engine(folder), PROMPTS[1][:24]
    several = [ask(3 * i + 1, (*common, 3 + i, *PROMPTS[3])) for i in range(3)]
    loop = engine.run(several, chunks=9)
    assert [loop.cached[r.id] for r in several] == [0, 24, 24]
    assert_agrees(loop, Oracle.load(folder), "a common beginning")


def test_compiled_steps_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mx.enable_compile()
    monkeypatch.setattr(runner, "USUAL", 0)  # traced when first met
    folder = tiny_models.make(tmp_path / "model", "qwen3_next")
    assert_agrees(make_engine(folder).run([ask(1, PROMPTS[3]), ask(2, PROMPTS[3])]), Oracle.load(folder), "compiled")


def test_states_are_written_in_place(tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    built = make_engine(tiny_models.make(tmp_path / "model", "qwen3_next", **sizes), max_num_seqs=60).built
    states = built.info.memory.pools[-1]
    assert states.state and states.num_blocks * states.block_bytes > 16 << 20
    mx.enable_compile()
    row = Row(RowKind.PROMPT, 0, 0, 0, 0, (0,), ((1,), (built.info.num_blocks + 1,)), True)
    built.runner.wait(built.runner.launch(StepPlan((row,), seatings=(Seating(0, GREEDY, 0, 1, (0,)),))))
    assert decode_growth(built.runner, built.info) < 4 << 20
