"""Drafts on the real runner for families with states: answers and states are those without drafts.

Tiny random models in float32, one family for each kind of state: a gated delta net, a state space, a short convolution,
and two modules that share a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from mlx_tandem.adapters import formats
from mlx_tandem.config import EngineConfig, ModelConfig, SpeculationConfig
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.engine.proposers.speculation import Speculation
from mlx_tandem.errors import ModelError
from mlx_tandem.model.build import build
from mlx_tandem.model.cache import turns
from mlx_tandem.model.cache.turns import Turns
from mlx_tandem.model.step import forward, parts
from mlx_tandem.model.summary import summarise
from mlx_tandem.model.warm_up import GREEDY
from mlx_tandem.types import AdapterRef, Request
from tests import tiny_models
from tests.engine.mlx_engine import Engine, make_engine
from tests.engine.test_draft_model import drafts_of, speculation
from tests.engine.test_masks import Turns as Masks
from tests.engine.test_verify import PROMPTS, Oracle, assert_same, few, requests, serve
from tests.hazards import steps
from tests.kernels import shim

FAMILIES = ["qwen3_next", "mamba2", "lfm2", "rwkv7"]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Tracing would take longer than the steps; one test compiles them, as serving does."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    @cache
    def make(family: str) -> Engine:
        mx.disable_compile()
        return make_engine(tiny_models.make(tmp_path_factory.mktemp(family) / "model", family, seed=1), max_num_seqs=8)

    return make


@pytest.mark.parametrize(("name", "options"), [("hot", {}), ("greedy", {"blocks": 14}), ("penalties", {"depth": 0})])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_nothing(
    engine_of: Callable[[str], Engine], family: str, name: str, options: dict[str, int]
) -> None:
    """Prompts of four lengths in one batch, some drafts right and some wrong, across the ends of blocks; also
    preempted, and with steps that follow drafts before the host has read them."""
    engine = engine_of(family)
    free = serve(engine, requests(name), **options)
    loop = serve(engine, requests(name), Oracle(free, 3), **options)
    assert_same(loop, free)
    assert loop.accepted > 0
    assert bool(loop.floated) == ("depth" not in options)
    assert bool(loop.scheduler.queue.preemptions) == ("blocks" in options)


def test_drafts_from_own_tokens_and_from_predictions_change_nothing(engine_of: Callable[[str], Engine]) -> None:
    """The server's proposer, with and without its method of its own."""
    engine = engine_of("lfm2")
    asked = [structs.replace(r, prompt=r.prompt * 3) for r in requests("greedy", few("greedy"))]
    free = serve(engine, asked)
    copying, told = Speculation(SpeculationConfig("ngram", ngram_min=1)), Speculation(SpeculationConfig())
    assert_same(serve(engine, asked, copying), free)
    foreseen = [structs.replace(r, prediction=tuple(free.tokens[r.id, 0])) for r in asked]
    assert_same(serve(engine, foreseen, told), free)
    assert copying.counts.all.accepted > 0 and told.counts.all.accepted > 0


def test_drafts_of_a_smaller_model_change_nothing(engine_of: Callable[[str], Engine], tmp_path: Path) -> None:
    """Its model has no states; of so few tokens to choose from, some drafts are right by chance."""
    engine, asked = engine_of("lfm2"), requests("greedy", few("greedy"))
    smaller = make_engine(tiny_models.make(tmp_path / "draft", "llama"), max_num_seqs=8, max_loras=0)
    proposer = speculation(drafts_of(smaller))
    assert_same(serve(engine, asked, proposer), serve(engine, asked))
    assert 0 < proposer.counts.all.accepted < proposer.counts.all.drafted


def test_rows_of_adapters_and_rows_that_draw_by_masks_share_steps_with_drafts(tmp_path: Path) -> None:
    """An adapter changes the linears inside of recurrent layers, too; a mask comes when the forward is under way."""
    engine = make_engine(tiny_models.make(tmp_path / "model", "qwen3_next", seed=1), max_num_seqs=8)
    linears, refs = engine.built.linears, [None]
    assert any("linear_attn" in path for path in linears)
    for seed in (1, 2):
        tiny_models.make_adapter(tmp_path / str(seed), linears, "peft", rank=4, seed=seed)
        weights = formats.read(tmp_path / str(seed), linears, max_rank=16, base_layers=engine.built.layers)
        engine.weights[weights.info.digest] = weights
        refs.append(AdapterRef(f"a{seed}", 1, weights.info.digest))  # type: ignore[arg-type]
    asked = [Request(i, PROMPTS[1 + i % 2], few("greedy"), refs[i % 3]) for i in range(6)]
    said = []
    for masks in (None, Masks()):
        free = serve_by(engine, asked, masks)
        loop = serve_by(engine, asked, masks, Oracle(free, 4))
        assert_same(loop, free)
        assert loop.accepted > 0
        said.append({tuple(tokens) for tokens in free.tokens.values()})
    assert len(said[0]) > 4 and said[0] != said[1]


def serve_by(engine: Engine, asked: list[Request], masks: Masks | None, proposer: Oracle | None = None) -> Any:
    loop = engine.loop()
    loop.scheduler.drafting.proposer, loop.scheduler.mask_maker = proposer, masks
    for request in asked:
        loop.add(request)
    loop.run()
    loop.assert_idle()
    return loop


def test_a_conversation_finds_the_states_that_rows_with_drafts_have_left(engine_of: Callable[[str], Engine]) -> None:
    engine = engine_of("qwen3_next")
    asked = requests("greedy")[1:2]
    said = serve(engine, asked).tokens[1, 0]
    loop = engine.loop()
    loop.scheduler.drafting.proposer = Oracle(serve(engine, asked), 3)
    for request in asked:
        loop.add(request)
    loop.run()
    again = structs.replace(asked[0], id=2, n=1, prompt=(*asked[0].prompt, *said, 7, 8, 9))
    loop.scheduler.drafting.proposer = None
    loop.add(again)
    loop.run()
    assert loop.cached[2] >= len(asked[0].prompt) // 8 * 8 + 8
    assert loop.tokens[2, 0] == serve(engine, [again]).tokens[2, 0]


def test_compiled_steps_are_the_same(engine_of: Callable[[str], Engine]) -> None:
    mx.enable_compile()
    engine = engine_of("lfm2")
    asked = requests("hot")[:2]
    free = serve(engine, asked)
    assert_same(serve(engine, asked, Oracle(free, 3)), free)


# --- the states themselves -----------------------------------------------------------------------------------------


def states_after(engine: Engine, said: tuple[int, ...], drafts: list[tuple[int, ...]]) -> list[list[Any]]:
    """The lines of state of a sequence's first three blocks when it has computed a prompt of five tokens and `said`, in
    rows with these drafts behind the tokens of `said`."""
    runner, info = engine.built.runner, engine.built.info
    first = info.memory.pools[0].num_blocks
    tables = ((1, 2, 3), (first + 1, first + 2, first + 3))
    prompt = (5, 6, 7, 8, 9)
    for array in (a for layer in runner._pool.pools[-1].layers for a in layer):
        array[:] = 0
    row = Row(RowKind.PROMPT, 0, 0, 0, 0, prompt, tables, True)
    runner.wait(runner.launch(StepPlan((row,), seatings=(Seating(0, GREEDY, 0, 5, prompt),))))
    start, flights = 5, []
    for own in drafts:
        kind = RowKind.VERIFY if own else RowKind.DECODE
        row = Row(kind, 0, 0, 0, start, (said[start - 5], *own), tables, True)
        flights.append(runner.launch(StepPlan((row,))))
        start += len(runner.wait(flights[-1]).tokens[0])
    assert start == 5 + len(said)
    return [[np.array(a[1:4]) for a in layer] for layer in runner._pool.pools[-1].layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_a_run_without_drafts_to_the_last_bit(
    engine_of: Callable[[str], Engine], family: str
) -> None:
    """Where a layer's input is the same bits. Products of several rows at once may round otherwise than products of
    one, so behind the first layer of a family with other products, states are only as close as answers are."""
    engine = engine_of(family)
    prompt = (5, 6, 7, 8, 9)
    free = serve(engine, [Request(1, prompt, structs.replace(few("greedy"), allowed_token_ids=(), max_tokens=13))])
    said = tuple(free.tokens[1, 0][:12])
    wrong = tuple((t + 1) % tiny_models.VOCAB for t in said)
    alone = states_after(engine, said, [()] * 12)
    # All of seven, across the end of a block; none of three; two of three.
    drafted = states_after(engine, said, [said[1:8], wrong[9:12], (*said[10:12], wrong[0]), ()][:3])
    for n, (layer, other) in enumerate(zip(alone, drafted, strict=True)):
        for a, b in zip(layer, other, strict=True):
            assert a.any(axis=-1).tolist() == [True, True, True]
            if n == 0 or family == "mamba2":
                assert np.array_equal(a, b), f"layer {n}"
            else:
                np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


# --- planted bugs are found ----------------------------------------------------------------------------------------


def _keep(change: Callable[[mx.array, mx.array], mx.array]) -> Callable[[pytest.MonkeyPatch], None]:
    """Other states are kept than those after the accepted tokens. `change`: what the newest positions become."""
    original = parts.kept_lines

    def kept_lines(shape: Any, size: int, numbers: Any, start: mx.array, newest: mx.array) -> Any:
        return original(shape, size, numbers, start, change(start, newest))

    return lambda patch: patch.setattr(parts, "kept_lines", kept_lines)


def _keep_only_the_newest(patch: pytest.MonkeyPatch) -> None:
    """Of a row that goes over the end of a block, no state is kept at that end."""
    original = parts.kept_lines

    def kept_lines(shape: Any, size: int, numbers: Any, start: mx.array, newest: mx.array) -> Any:
        to, taken = original(shape, size, numbers, start, newest)
        crosses = newest[numbers[2]] - 1 >= (start // size + 1) * size
        first = mx.where(crosses, 0, to[: shape.rows])
        return mx.concatenate([first, to[shape.rows :]]), taken

    patch.setattr(parts, "kept_lines", kept_lines)


def _forget_between_turns(patch: pytest.MonkeyPatch) -> None:
    """Each token of a row begins from the state before the row."""

    def run(self: Turns, cache: Any, call: Any, args: Any, kwargs: Any) -> Any:
        before = list(cache.cache)

        def from_before(*own: Any, **named: Any) -> Any:
            rows = len(cache.cache[0])
            cache.cache = [old if len(old) == rows else old[self._drafting] for old in before]
            return call(*own, **named)

        return original(self, cache, from_before, args, kwargs)

    original = Turns.run
    patch.setattr(Turns, "run", run)


def _begin_where_the_host_says(patch: pytest.MonkeyPatch) -> None:
    """A row behind drafts reads the state of the block in which it would begin if all were accepted."""
    original = turns.line_of
    patch.setattr(forward, "line_of", lambda base, tables, at, size: original(base, tables, at + 4, size))


PLANTS = {
    "the state after all drafts is kept": _keep(lambda start, newest: newest + 7),
    "the state after the first token is kept": _keep(lambda start, newest: newest * 0),
    "the state before the last accepted token is kept": _keep(lambda start, newest: newest - 1),
    "a turn forgets the turn before it": _forget_between_turns,
    "a row reads the state of another block": _begin_where_the_host_says,
}


@pytest.mark.parametrize("name", PLANTS)
def test_the_comparison_finds_planted_bugs(
    engine_of: Callable[[str], Engine], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("qwen3_next")
    free = serve(engine, requests("greedy"))
    PLANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(serve(engine, requests("greedy"), Oracle(free, 3)), free)


def test_a_lost_state_at_the_end_of_a_block_is_found(
    engine_of: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _keep_only_the_newest(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_conversation_finds_the_states_that_rows_with_drafts_have_left(engine_of)


def test_a_state_inside_of_attention_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", "baichuan_m1")
    config = EngineConfig(model=ModelConfig(path=str(folder)), speculation=SpeculationConfig(method="ngram"))
    with pytest.raises(ModelError, match=r"baichuan_m1.*inside of its attention.*--spec-decode") as e:
        build(config, {}, lambda stage, fraction: None)
    assert e.value.param == "speculation"
    assert not make_engine(folder).built.verifies
    without = structs.replace(config, speculation=SpeculationConfig())
    assert any("--spec-decode" in line for line in summarise(without).unsupported)


@pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
def test_a_kernel_writes_the_states_after_accepted_drafts(tmp_path: Path) -> None:
    """Where a kernel writes the pool, on a device that orders kernels by their outputs alone."""
    with steps.engine(steps.Kind("lfm2"), tmp_path / "model") as metal:
        asked = requests("greedy")[:2]
        free = serve_by(metal.engine, asked, None)
        loop = serve_by(metal.engine, asked, None, Oracle(free, 3))
    assert_same(loop, free)
    assert loop.accepted > 0 and loop.floated > 0
