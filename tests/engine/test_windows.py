"""Layers that see a window of positions: what is behind it is given back, and nobody reads anything else for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.engine import block_manager, prefix_leaders, run_queue
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.kv_offload import reads
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.pool import BlockPool, Window
from mlx_tandem.kv.prefix import PrefixCache
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_families, tiny_models
from tests.engine import mlx_engine
from tests.engine.mlx_engine import Oracle, assert_agrees
from tests.engine.random_workloads import Outcome, Settings, play, some_workload_fails
from tests.engine.workloads import Engine, assert_exact, make_engine

HYBRID = (None, 8)
PROMPT = tuple(i * i % 13 for i in range(60))
_rng = np.random.default_rng(3)
LONG = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (70, 5, 101, 49)]


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And steps that are traced anew, which spares a compiler per family."""
    monkeypatch.setattr(run_queue, "OVERTAKEN_FOR_SLOT", 2)
    monkeypatch.setattr(prefix_leaders, "WORTH_WAITING", 1)
    mx.disable_compile()
    yield
    mx.enable_compile()


def ask(number: int, prompt: tuple[int, ...] = PROMPT, *, max_tokens: int = 6, n: int = 1) -> Request:
    return Request(number, prompt, SamplingParams(max_tokens=max_tokens, seed=number), n=n)


def serve(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.loop.add(request)
    engine.loop.run()
    engine.loop.assert_idle()
    assert_exact(engine.loop, windows=engine.runner.windows)


def server(*, window_blocks: int = 60, **options: object) -> Engine:
    """Of blocks of 4 tokens, windows of 8 and chunks of 8."""
    sizes = {"num_blocks": 100, "block_size": 4, "max_chunk_tokens": 8, "windows": HYBRID}
    return make_engine(**sizes, window_blocks=window_blocks, **options)  # type: ignore[arg-type]


def window_group(engine: Engine) -> WindowGroup:
    group = engine.scheduler._blocks.groups[-1]
    assert isinstance(group, WindowGroup)
    return group


# --- random workloads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(2))
def test_every_sequence_is_exact_in_random_workloads(part: int) -> None:
    """Models whose layers all have a window and such of which some have, in pools of any size."""
    outcome = Outcome()
    for seed in range(part * 300, (part + 1) * 300):
        try:
            outcome += play(Random(seed), Settings(windows=True, states=0.0))
        except Exception as e:
            e.add_note(f"in workload {seed}")
            raise
    assert outcome.finished > 2000
    assert min(outcome.preemptions, outcome.failures, outcome.failed, outcome.cancelled) > 150
    assert outcome.cached > 750
    assert outcome.given_back > 2000


def test_every_sequence_is_exact_with_a_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which a block is one of each pool."""
    monkeypatch.setattr(reads, "WORTH_READING", 1)
    outcome = Outcome()
    for seed in range(250):
        try:
            outcome += play(Random(seed), Settings(windows=True, states=0.0, drives=1.0))
        except Exception as e:
            e.add_note(f"in workload {seed}")
            raise
    assert outcome.finished > 2000
    assert outcome.loads > 300
    assert outcome.saves > 3000


def _one_block_too_far(patch: pytest.MonkeyPatch) -> None:
    """The block that the next query begins to see is given back."""
    original = Window.first
    patch.setattr(Window, "first", lambda self, at, size: original(self, at, size) + (at >= self.tokens))


def _give_back_what_is_planned(patch: pytest.MonkeyPatch) -> None:
    """A sequence gives back what its row of this plan sees."""
    original = BlockManager.reserve

    def reserve(self: BlockManager, s: Sequence, positions: int) -> bool:
        done = original(self, s, positions)
        scheduled, s.scheduled = s.scheduled, positions
        self.slide(s)
        s.scheduled = scheduled
        return done

    patch.setattr(BlockManager, "reserve", reserve)


def _hit_behind_the_window(patch: pytest.MonkeyPatch) -> None:
    """A beginning counts as known where its last block is."""

    def whole(self: PrefixCache, chain: object, tokens: object, most: int) -> list[int]:
        if self.group.keeps_all:
            return original(self, chain, tokens, most)  # type: ignore[arg-type]
        at = [self._block(chain, tokens, i) for i in range(most)]  # type: ignore[arg-type]
        while at and at[-1] is None:
            del at[-1]
        return [b or 0 for b in at]

    original = PrefixCache.whole
    patch.setattr(PrefixCache, "whole", whole)


def _hit_without_a_window(patch: pytest.MonkeyPatch) -> None:
    """The layers that see everything decide alone what is known."""
    patch.setattr(block_manager, "find", lambda caches, *args: original(caches[:1], *args) if caches else None)
    original = block_manager.find


def _release_twice(patch: pytest.MonkeyPatch) -> None:
    """Whoever leaves gives back what it has given back, too."""
    original = BlockManager.slide

    def slide(self: BlockManager, s: Sequence) -> bool:
        before = s.tables
        slid = original(self, s)
        s.tables = before
        return slid

    patch.setattr(BlockManager, "slide", slide)


def _publish_unread(patch: pytest.MonkeyPatch) -> None:
    """What goes while a prompt is read can be found."""
    original = BlockManager.slide

    def slide(self: BlockManager, s: Sequence) -> bool:
        drawn, s.has_drawn = s.has_drawn, True
        if not drawn and self._caches and s.is_pure and s.scheduled:
            for cache, table in zip(self._caches, s.tables, strict=True):
                cache.publish(self._chain(s), s.tokens[:-1], table, s.published)
        s.has_drawn = drawn
        return original(self, s)

    patch.setattr(BlockManager, "slide", slide)


def _scrub_what_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Blocks that others may find are overwritten."""
    patch.setattr(BlockPool, "is_vacant", lambda self, block: not self.count[block])


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a block too many is given back": _one_block_too_far,
    "what this plan's row sees is given back": _give_back_what_is_planned,
    "a hit has holes in its window": _hit_behind_the_window,
    "a hit has no window": _hit_without_a_window,
    "blocks are given back twice": _release_twice,
    "what is not computed can be found": _publish_unread,
    "what is kept is overwritten": _scrub_what_is_kept,
}


FOUND_BY = {
    "what this plan's row sees is given back": 66,
    "a hit has holes in its window": 66,
    "what is kept is overwritten": 70,
}
"""A workload that finds a bug which few find."""


@pytest.mark.parametrize("name", PLANTS)
def test_the_suite_finds_planted_bugs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    first = FOUND_BY.get(name, 0)
    assert some_workload_fails(400, Settings(windows=True, states=0.0), first), "no workload found it"


# --- step by step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_a_sequence_that_grows_holds_no_more_than_its_window(depth: int) -> None:
    engine = server(depth=depth, prefixes=False)
    group = window_group(engine)
    engine.loop.add(ask(0, PROMPT[:30], max_tokens=200))
    most = 0
    while engine.loop.step():
        if len(engine.loop.tokens[0, 0]) > 4:
            most = max(most, group.pool.used_blocks)
    assert 2 <= most <= group.window.held(4) == 4
    assert_exact(engine.loop, windows=HYBRID)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_is_read_in_a_pool_for_one_window(depth: int) -> None:
    """With others beside it, who decode; nobody is computed again."""
    engine = server(window_blocks=1 + 6 + 3 * 4, depth=depth, max_num_seqs=4)
    serve(engine, *(ask(i, (i, 1, 2), max_tokens=40) for i in range(3)), ask(3, PROMPT * 4))
    assert engine.scheduler.queue.preemptions == 0


@pytest.mark.promise("D11")
def test_a_request_that_can_never_run_is_refused() -> None:
    """A pool of less than a window and a row bounds the length."""
    assert server(window_blocks=7).room == 99 * 4
    assert server(window_blocks=6).room == 20


def test_the_turns_of_a_conversation_are_computed_once() -> None:
    engine = server(window_blocks=40)
    prompt, asked, cached = PROMPT, 0, 0
    for turn in range(8):
        serve(engine, ask(turn, prompt, max_tokens=12))
        asked += len(prompt) if turn else 0
        cached += engine.loop.cached[turn] if turn else 0
        prompt += (*engine.loop.tokens[turn, 0], *PROMPT[turn : turn + 3])
    assert cached >= 0.9 * asked, f"{cached} of {asked}"


def test_what_many_prompts_begin_with_is_found_where_its_window_is_still_there() -> None:
    """A prompt's blocks go when its first token is drawn, and stay until somebody needs them."""
    engine = server()
    serve(engine, ask(0, PROMPT))
    serve(engine, ask(1, (*PROMPT[:40], 5, 5, 5)))
    assert engine.loop.cached[1] == 40
    small = server(window_blocks=9)
    serve(small, ask(0, PROMPT))
    serve(small, ask(1, (*PROMPT[:40], 5, 5, 5)), ask(2, (*PROMPT, 5)))
    assert small.loop.cached[1] == 0, "its window is gone, though the other layers have all of it"


def test_a_group_shares_its_prompt() -> None:
    engine = server()
    serve(engine, ask(0, PROMPT[:30], n=4))
    assert engine.runner.positions == 29 + 4 * 6


# --- the model ---------------------------------------------------------------------------------------------------


def greedy(number: int, prompt: tuple[int, ...], max_tokens: int = 8, n: int = 1) -> Request:
    scores = (0, None)[number % 2]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2, prompt_logprobs=scores)
    return Request(number, prompt, params, n=n)


@pytest.mark.parametrize("family", ["cohere2", "gemma3_text", "gpt_oss", "llama", "olmo3", "spark2_5"])
def test_contexts_of_several_windows_are_as_mlx_lm_has_them(family: str, tmp_path: Path) -> None:
    """In a pool that holds a few windows: chunked, preempted, forked, found again."""
    folder = tiny_models.make(tmp_path / family, family, **tiny_families.WINDOWED.get(family, tiny_families.WINDOW))
    engine, oracle = mlx_engine.make_engine(folder, num_blocks=64, max_chunk_tokens=32), Oracle.load(folder)
    everyone = [greedy(i, p) for i, p in enumerate(LONG)]
    assert_agrees(engine.run(everyone, chunks=13, window_blocks=21), oracle, "in a pool of few windows")
    longer = [greedy(i, p, 32) for i, p in enumerate(LONG)]
    crowded = engine.run(longer, blocks=32 if family != "spark2_5" else 15, window_blocks=21, chunks=13)
    assert crowded.scheduler.queue.preemptions > 0 or family == "spark2_5"
    assert_agrees(crowded, oracle, "preempted")
    turns = engine.loop(chunks=32, window_blocks=30)
    for i, (prompt, n) in enumerate([(LONG[0], 1), ((*LONG[0], *LONG[1]), 3), ((*LONG[0][:64], 9, 9), 1)]):
        turns.add(greedy(2 * i + 1, prompt, n=n))
        turns.run()
    assert_agrees(turns, oracle, "found again")
    assert [turns.cached[1 + 2 * i] > 56 for i in range(3)] == [False, True, True]


@pytest.mark.parametrize("family", ["gemma3_text", "spark2_5"])
def test_quantised_keys_and_values_of_a_window(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / family, family)
    engine = mlx_engine.make_engine(folder, num_blocks=64, max_chunk_tokens=32, kv_bits=8)
    loop = engine.run([greedy(i, p) for i, p in enumerate(LONG)], chunks=13, window_blocks=21)
    # A number at the edge between two codes may get either of them, since prompts are cut differently.
    assert_agrees(loop, Oracle.load(folder, kv_bits=8), "quantised", tolerance=2e-3, near_tie=2e-3)


def test_a_step_reads_no_more_than_the_window(tmp_path: Path) -> None:
    """The tables of a long context are as wide as its window."""
    mx.enable_compile()
    folder = tiny_models.make(tmp_path / "gemma3_text", "gemma3_text")
    engine, oracle = mlx_engine.make_engine(folder, num_blocks=64, max_chunk_tokens=32), Oracle.load(folder)
    assert_agrees(engine.run([greedy(1, LONG[2], 4)]), oracle, "compiled")
    decodes = [key.widths for key in engine.built.runner.compiled.kept() if key.length == 1]
    assert max(width for width, _ in decodes) >= 14
    assert max(width for _, width in decodes) <= 3
