"""Drafts on the MLX runner change nothing of what is said: neither tokens nor logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from mlx_tandem.adapters import formats
from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.plan import CARRY, Row, RowKind, Seating, StepPlan
from mlx_tandem.engine.proposers import Proposer
from mlx_tandem.engine.proposers.speculation import Speculation
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.model.cache.turns import TurnShape
from mlx_tandem.model.inputs import Inputs, Staging
from mlx_tandem.model.kernels.exchange import OPEN, RESERVED
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.attention.grouped import GroupedAttention
from mlx_tandem.model.ops.lora.routes import Layout
from mlx_tandem.model.ops.sampling.drafts import Accept, Settle
from mlx_tandem.model.ops.sampling.sampler import SamplingFlags
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step import prebuilt
from mlx_tandem.model.step.forward import StepArrays
from mlx_tandem.model.step.operands import StepKey
from mlx_tandem.model.step.parts import Flight, Part
from mlx_tandem.model.step.prebuilt import Prebuilt, RepeatableForward, StepCall
from mlx_tandem.model.step.seats import Seats
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests import tiny_families, tiny_models
from tests.engine.guessing import RowByRow
from tests.engine.harness import Loop
from tests.engine.mlx_engine import TOLERANCE, Engine, make_engine
from tests.kernels import shim

PROMPTS = [tuple(np.random.default_rng(7).integers(3, tiny_models.VOCAB, n).tolist()) for n in (3, 21, 9, 14)]

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "hot": {"temperature": 1.0, "logprobs": 0, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "a window of penalties": {"temperature": 0.0, "repetition_penalty": 1.8, "repetition_context": 5},
    "nothing ends it before": {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": tuple(range(0, 60, 2))},
}


class Oracle(RowByRow):
    """A proposer that knows what each choice will say and errs in one token of `wrong`; 0: in none."""

    def __init__(self, said: Loop, wrong: int):
        self._said, self._rng, self._wrong = said.tokens, Random(5), wrong

    def needs_newest(self, request: Request, choice: int) -> bool:
        return self._rng.random() < 0.4

    def propose(self, request: Request, choice: int, tokens: Sequence[int], unread: int, most: int) -> Sequence[int]:
        begun = len(tokens) - len(request.prompt) + unread
        right = self._said[request.id, choice][begun : begun + self._rng.choice((0, 1, 4, 7))]
        return [
            (t + 1) % tiny_models.VOCAB if self._wrong and not self._rng.randrange(self._wrong) else t for t in right
        ]


class Waiting(Oracle):
    """A proposer whose drafts follow from the newest tokens."""

    def needs_newest(self, request: Request, choice: int) -> bool:
        return True


def few(name: str) -> SamplingParams:
    """The parameters of this name, under which there are so few tokens to choose from that some come again."""
    return SamplingParams(**({"max_tokens": 24, "seed": 11, "allowed_token_ids": (5, 6, 7, 8)} | PARAMS[name]))


def requests(name: str, params: SamplingParams | None = None) -> list[Request]:
    params = params or SamplingParams(**({"max_tokens": 16, "seed": 11} | PARAMS[name]))
    return [Request(i, prompt, params, n=1 + i % 2) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("model") / "model", "qwen3", seed=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder, max_num_seqs=8)


def serve(engine: Engine, asked: list[Request], proposer: Proposer | None = None, **options: int) -> Loop:
    loop = engine.loop(**options)
    loop.scheduler.drafting.proposer = proposer
    for request in asked:
        loop.add(request)
    loop.run()
    loop.assert_idle()
    return loop


def assert_same(loop: Loop, free: Loop) -> None:
    assert loop.tokens == free.tokens
    assert loop.finished == free.finished
    for key, said in free.logprobs.items():
        for own, other in zip(loop.logprobs[key], said, strict=True):
            assert abs(own.model - other.model) < TOLERANCE and abs(own.sampled - other.sampled) < TOLERANCE
            assert [t for t, _ in own.top] == [t for t, _ in other.top]


@pytest.mark.promise("DET-4")
@pytest.mark.parametrize("wrong", [0, 3])
@pytest.mark.parametrize("name", PARAMS)
def test_drafts_change_nothing(engine: Engine, name: str, wrong: int) -> None:
    free = serve(engine, requests(name))
    loop = serve(engine, requests(name), Oracle(free, wrong))
    assert_same(loop, free)
    assert loop.accepted > 0 and loop.floated > 0


@pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.usefixtures("compiled_again")
def test_kernels_that_begin_and_end_verifying_steps_change_nothing(tmp_path: Path, name: str) -> None:
    engine = make_engine(tiny_models.make(tmp_path / "model", "llama", seed=1), max_num_seqs=8)
    mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
    runner = engine.built.runner
    runner.prebuilt.may_build = False  # it would read numbers that are not there yet
    free = serve(engine, requests(name))
    runner._forward._settle, runner._forward._accept = Settle(shim.maker()), Accept(shim.maker())
    loop = serve(engine, requests(name), Oracle(free, 3))
    assert_same(loop, free)
    assert loop.accepted > 0 and loop.floated > 0


def base_and_adapters(engine: Engine, scratch: Path) -> list[AdapterRef | None]:
    """Give the engine two adapters; return None for the base, and their refs."""
    linears = engine.built.linears
    refs: list[AdapterRef | None] = [None]
    for seed in (1, 2):
        tiny_models.make_adapter(scratch / str(seed), linears, "peft", rank=4, seed=seed)
        weights = formats.read(scratch / str(seed), linears, max_rank=16, base_layers=engine.built.layers)
        engine.weights[weights.info.digest] = weights
        refs.append(AdapterRef(f"a{seed}", 1, weights.info.digest))
    return refs


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", ["greedy", "penalties", "hot"])
def test_steps_that_are_built_before_their_numbers_are_known_change_nothing(
    folder: Path, tmp_path: Path, name: str, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with graphs that are built ahead, as on CUDA, equal those without drafts."""
    engine = make_engine(folder, max_num_seqs=8)
    asked = requests(name)
    if adapters:
        refs = base_and_adapters(engine, tmp_path)
        asked = [structs.replace(r, adapter=refs[r.id % 3]) for r in asked]
    free = serve(engine, asked)
    built: list[bool] = []
    results = Prebuilt.results

    def counted(self: Prebuilt, call: StepCall) -> tuple[Any, Any]:
        before = None if self._made is None else self._made[2]
        sent, made = results(self, call)
        if before is not None:
            built.append(made is before)
        return sent, made

    monkeypatch.setattr(Prebuilt, "results", counted)
    monkeypatch.setattr(prebuilt, "LEAST_USED", 0.0)
    runner = engine.built.runner
    runner.inputs.packed = runner.prebuilt.may_build = True
    for wrong in (0, 3):
        assert_same(serve(engine, asked, Waiting(free, wrong)), free)
        for request in asked:  # alone, so that no later step is in flight
            loop = serve(engine, [request], Waiting(free, wrong))
            assert all(said == free.tokens[key] for key, said in loop.tokens.items())
    assert True in built and False in built


@pytest.mark.parametrize("name", ["hot", "penalties", "a window of penalties"])
@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("wrong", [0, 3])
def test_steps_that_are_dispatched_before_their_numbers_are_known_change_nothing(
    folder: Path, wrong: int, kv_bits: Literal[8, 16], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA waits for the numbers of such a step. Here MLX computes it when somebody reads it.

    While the device waits, the host makes no array and reads none, since it might wait for the device then.
    """
    engine = make_engine(folder, max_num_seqs=8, kv_bits=kv_bits)
    asked = requests(name, SamplingParams(**({"max_tokens": 16, "seed": 11} | PARAMS[name] | {"logprobs": None})))
    free = serve(engine, asked)
    runner = engine.built.runner
    used, dropped = [], []

    def check(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            waits = runner.prebuilt._made is not None and runner.prebuilt._is_ahead
            assert not waits or (name == "take_drawn" and self.sent.room), f"{name} while the device waits"
            if name == "take_drawn" and self.sent.room:  # as the kernel does
                self.sent.buffer.numbers[-RESERVED - self.sent.room : -RESERVED] = np.array(self.drawn[0])
            return function(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, checked)

    for owner, called in ((Seats, "arrays"), (Staging, "take"), *((Part, own) for own in ("take_drawn", "logprobs"))):
        check(owner, called)

    def drop(self: Prebuilt) -> None:
        if self._made is not None and self._is_ahead:
            pools = StepArrays(*self._made[2]).pool
            for own, now in zip(pools, runner._pool.layers, strict=True):
                for a, b in zip(own, now, strict=True):
                    assert mx.array_equal(a[1:], b[1:]).item(), "the device computes the last step once more"
            dropped.append(True)
        original(self)

    original = Prebuilt.drop
    results = Prebuilt.results

    def counted(self: Prebuilt, call: StepCall) -> tuple[Any, Any]:
        built = None if self._made is None else self._made[2]
        found = results(self, call)
        used.append(built is not None and found[1] is built and self._is_ahead)
        return found

    ends = []
    build = Prebuilt.build

    def recorded(self: Prebuilt, call: StepCall, *, dispatches: bool = False) -> None:
        assert self._behind is not None
        near_end = runner._seats.near_end(self._behind.rows)
        assert not (dispatches and near_end)
        ends.append(near_end)
        build(self, call, dispatches=dispatches)

    monkeypatch.setattr(Prebuilt, "drop", drop)
    monkeypatch.setattr(Prebuilt, "results", counted)
    monkeypatch.setattr(Prebuilt, "build", recorded)
    monkeypatch.setattr(prebuilt, "LEAST_USED", 0.0)
    monkeypatch.setattr(prebuilt, "LEAST_USED_EARLY", 0.0)
    monkeypatch.setattr(MLXRunner, "one_at_a_time", False)
    runner.inputs.packed = runner.prebuilt.may_build = True
    runner.prebuilt._dispatch = lambda results: None
    runner._forward.report = lambda tokens, numbers: tokens
    for together in (*([request] for request in asked), asked):
        loop = serve(engine, together, Waiting(free, wrong))
        assert all(said == free.tokens[key] for key, said in loop.tokens.items())
    assert any(used) and any(dropped) and set(ends) == {False, True}
    used.clear()
    runner.prebuilt.may_dispatch = False
    serve(engine, asked, Waiting(free, wrong))
    assert used and not any(used)


def test_a_runner_knows_when_a_sequence_is_near_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may then lack room for another row with as many tokens."""
    engine = make_engine(folder, max_num_seqs=16)
    asked = [Request(i, PROMPTS[i], SamplingParams((60, 40, 60)[i], ignore_eos=True)) for i in range(3)]
    free = serve(engine, asked)
    original, seen = Scheduler.plan, []

    def plan(self: Scheduler, background: bool = True) -> StepPlan | None:
        made = original(self, background)
        if made is not None:
            decoding = [row for row in made.rows if row.kind is not RowKind.PROMPT]
            rows = [(self._sequences[row.sequence], len(row.tokens)) for row in decoding]
            near = any(s.most_tokens - s.total < tokens for s, tokens in rows)  # `total` includes them
            assert engine.built.runner._seats.near_end(made.rows) == near
            seen.append((near, len(rows)))
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    serve(engine, asked, Waiting(free, 0))
    assert {(False, 3), (True, 3), (True, 2)} <= set(seen)


def test_graphs_that_are_not_used_are_no_longer_built() -> None:
    """Some are tried again later, since the next steps may be alike again."""
    plan, made = StepPlan(()), Prebuilt(Inputs(packed=True))
    numbers = [np.zeros(4, np.int32)]
    forward = RepeatableForward(lambda sent: sent, numbers, None)  # type: ignore[arg-type]
    built = []
    for number in range(120):
        flight = Flight(plan, [], first_use=False)
        made.begin(plan)
        made.note(forward)
        made.end(flight)
        again = made.take_repeatable(flight)
        built.append(again is not None)
        if again is not None:
            made.build(StepCall(again.step, again.numbers, ()))
        made.results(StepCall((lambda sent: sent) if number < 90 else forward.step, numbers, ()))
    assert built[:5] == [True] * 5 and 2 <= sum(built[8:90]) <= 3
    assert made.take_repeatable(flight) is None, "it is another step's turn"


VERIFIED = Row(RowKind.VERIFY, 0, 2, 0, 7, (3, 4), ((1,),), True)
"""A row of a plan; it has a draft."""

OTHERS: dict[str, Any] = {
    "seatings": (Seating(0, SamplingParams(8), 0, 1, (3,)),),
    "uploads": ((1, "digest"),),
    "copies": ((1, 2),),
    "saves": (1,),
    "loads": ((1, b""),),
    "masked": (0,),
    "drops": (b"digest",),
    "encodes": (None,),
}
"""The fields of a plan besides its rows, each with a value that is not empty."""

ROWS: dict[str, tuple[Row, ...]] = {
    "another seat": (structs.replace(VERIFIED, seat=3),),
    "another adapter": (structs.replace(VERIFIED, lora_slot=1),),
    "no draw": (structs.replace(VERIFIED, sample=False),),
    "a prompt": (structs.replace(VERIFIED, kind=RowKind.PROMPT),),
    "more tokens": (structs.replace(VERIFIED, tokens=(3, 4, 5)),),
    "one row more": (VERIFIED, structs.replace(VERIFIED, seat=3)),
    "no row": (),
}


def test_a_step_is_expected_that_has_the_same_rows_and_nothing_else_to_do() -> None:
    made, flight = Prebuilt(Inputs(packed=True)), Flight(StepPlan((VERIFIED,)), [], first_use=False)
    assert not made.expects(flight.plan), "nothing was built"
    made.begin(flight.plan)
    made.note(RepeatableForward(None, [], None))  # type: ignore[arg-type]
    made.end(flight)
    assert made.take_repeatable(flight) is not None
    next_one = structs.replace(VERIFIED, start=9, tokens=(5, 6), tables=((1, 2),))
    assert made.expects(StepPlan((next_one,)))
    for name, other in OTHERS.items():
        assert not made.expects(StepPlan((next_one,), **{name: other})), name
    for name, rows in ROWS.items():
        assert not made.expects(StepPlan(rows)), name


def test_a_step_waits_on_the_device_only_if_it_can_be_computed_twice_and_read_without_copies() -> None:
    key = StepKey(2, 1, (4,), carry=True, samples=True, flags=SamplingFlags(noise=True), layout=Layout("base"))

    def can_wait(row: Row = VERIFIED, **changed: Any) -> bool:
        given: Any = SimpleNamespace(key=key._replace(**changed), every=[VERIFIED, row])
        return RepeatableForward(None, [], given).can_wait

    assert can_wait()
    assert not can_wait(structs.replace(VERIFIED, tokens=(CARRY,)))
    assert not can_wait(structs.replace(VERIFIED, slack=1))
    assert not can_wait(turns=TurnShape(2, 1, 1, 4))
    assert not can_wait(flags=SamplingFlags(logprobs=0))
    assert not can_wait(proposes=True) and not can_wait(proposes=False)


class Early:
    """Steps that are all alike, and are dispatched early if they may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.dispatched: list[Any] = []
        self.made = Prebuilt(Inputs(packed=True), self.dispatched.append)
        self._call = StepCall(lambda sent: sent, [np.zeros(4, np.int32)], (), room=1)
        self._patch = monkeypatch

    def build(self) -> bool:
        """Build a step; return whether it was dispatched."""
        before = len(self.dispatched)
        self.made.build(self._call, dispatches=True)
        return len(self.dispatched) > before

    def use(self, *, late: bool = False, reads: bool = False) -> bool:
        """Use the step, late or not, having read the one before or not; return whether it was used as dispatched."""
        with self._patch.context() as patch:
            patch.setattr(prebuilt, "LONGEST_WAIT", 0.0 if late else 60.0)
            if reads:
                self.made.passed()
            built = None if self.made._made is None else self.made._made[2]
            results = self.made.results(self._call)[1]
        return built is not None and results is built and self.made._is_ahead


@pytest.mark.parametrize("reads", [True, False])
def test_a_step_that_waited_for_long_is_not_used(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate may have opened by itself. After several such steps none is dispatched early."""
    monkeypatch.setattr(prebuilt, "LEAST_USED_EARLY", 0.0)
    steps = Early(monkeypatch)
    seen = [(steps.build(), steps.use(late=late, reads=reads)) for late in (False, True, False, True, True, False)]
    assert seen == [(True, True), (True, False), (True, True), (True, False), (True, False), (False, False)]


def test_whoever_else_needs_the_device_lets_a_waiting_step_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits until the last has left, and none counts as having waited for long."""
    monkeypatch.setattr(prebuilt, "LEAST_USED_EARLY", 0.0)
    steps = Early(monkeypatch)
    company = steps.made.company
    assert steps.build() and company.waits
    made = steps.made._made
    assert made is not None and made[1].buffer is not None
    opened: list[int] = []

    def other() -> None:
        assert made is not None and made[1].buffer is not None
        with company:
            opened.append(int(made[1].buffer.numbers[OPEN]))

    assert made[1].buffer.numbers[OPEN] == 0
    thread = Thread(target=other)
    thread.start()
    thread.join()
    assert opened == [1] and not company.waits
    assert not steps.use(late=True, reads=True) and not steps.made._stalls
    assert [sent.buffer for sent in steps.made._dropped] == [made[1].buffer], "the device may still read it"
    with company, company:
        assert not steps.build()
    with company:
        assert not steps.build()
        assert company.around(lambda number: number + company._number)(1) == 3
    assert steps.build() and steps.use()


def test_long_waits_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "LEAST_USED_EARLY", 0.0)
    monkeypatch.setattr(prebuilt, "FORGETS_AFTER", 3)
    steps = Early(monkeypatch)
    for late in [True, True, False, False, False, True, True, False, False, False, True, True]:
        assert steps.build() and steps.use(late=late) == (not late)
    assert steps.build() and not steps.use(late=True)
    assert not steps.build(), "three in a row, with fewer than three used steps between them"


def test_no_step_is_dispatched_early_where_its_own_dispatch_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX waits so where a step has more graphs than it lets be under way."""
    steps = Early(monkeypatch)
    monkeypatch.setattr(prebuilt, "LONGEST_WAIT", 0.0)
    assert steps.build() and not steps.use()
    assert not steps.build() and not steps.use()


def test_steps_are_dispatched_early_only_if_most_of_them_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is dropped costs a whole step, and plans of another kind drop it before it is compared."""
    steps = Early(monkeypatch)
    assert steps.build() and steps.use()
    early = []
    for _ in range(3):
        early.append(steps.build())
        steps.made.drop()
    assert early == [True, True, False]
    for _ in range(4):
        assert not steps.build()
        steps.use()
    assert steps.build()


def test_a_graph_is_used_for_a_call_with_the_same_arrays_only() -> None:
    numbers = [np.zeros(4, np.int32)]
    a, b = mx.zeros(1), mx.zeros(1)
    pool = [[a, b], [a]]
    calls: list[tuple[list[Any], bool]] = [
        ([a, pool, []], True),
        ([a, [[a, b], [a]], []], True),
        ([a, [[a, b], [b]], []], False),
        ([b, pool, []], False),
        ([a, [[a, b]], []], False),
        ([a, [[a, b], []], []], False),
        ([a, pool, [b]], False),
        ([a, pool, a], False),
        ([a, pool], False),
    ]
    for arguments, is_same in calls:
        made = Prebuilt(Inputs(packed=True))

        def step(sent: list[mx.array], *_: Any) -> list[mx.array]:
            return list(sent)

        made.build(StepCall(step, numbers, [a, pool, []]))
        assert made._made is not None
        built = made._made[2]
        assert (made.results(StepCall(step, numbers, arguments))[1] is built) == is_same


@pytest.mark.parametrize("name", ["greedy", "penalties"])
def test_drafts_from_own_tokens_change_nothing(engine: Engine, name: str) -> None:
    """The server's proposer, over prompts that repeat themselves, some of whose answers do, too."""
    asked = [structs.replace(r, prompt=r.prompt * 3) for r in requests(name, params=few(name))]
    proposer = Speculation(SpeculationConfig("ngram", ngram_min=1))
    assert_same(serve(engine, asked, proposer), serve(engine, asked))
    assert proposer.counts.all.accepted > 0 and not proposer._drafters


@pytest.fixture
def compiled_again() -> Iterator[None]:
    yield
    mx.enable_compile()


def engine_on_shim(folder: Path, **options: Any) -> Engine:
    """Return an engine whose attention is computed by CUDA's kernels on the CPU. Its steps are not compiled."""
    mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
    backends = [Fused("cuda", shim.maker())]
    return make_engine(folder, max_num_seqs=8, attention_backend="cuda", backends=backends, **options)


@pytest.mark.parametrize("kind", ["windows", "all windows", "few bits", "kernels", "kernels and windows"])
@pytest.mark.usefixtures("compiled_again")
def test_rows_behind_drafts_begin_where_the_device_says(tmp_path: Path, kind: str) -> None:
    """Over every kind of pool: the device finds the blocks of such a row, and the first that its window sees."""
    family = "spark2_5" if kind == "all windows" else "llama"
    changes: dict[str, Any] = tiny_families.WINDOW if "windows" in kind else {}
    changes = tiny_families.WINDOWED.get(family, changes)
    folder = tiny_models.make(tmp_path / "model", family, seed=1, **changes)
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 16} if kind == "few bits" else {}
    if "kernels" in kind:
        if shim.COMPILER is None:
            pytest.skip("needs g++")
        engine = engine_on_shim(folder)
        engine.built.runner.inputs.packed = True
    else:
        engine = make_engine(folder, max_num_seqs=8, **options)
    free = serve(engine, requests("hot"))
    for wrong in (0, 2):
        loop = serve(engine, requests("hot"), Oracle(free, wrong))
        assert_same(loop, free)
        assert loop.accepted > 0 and loop.floated > 0


@pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
@pytest.mark.usefixtures("compiled_again")
def test_kernels_answer_the_rows_of_a_sequence_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts change no tokens, although `GroupedAttention` answers only the steps with drafts."""
    folder = tiny_models.make(tmp_path / "model", "llama", seed=1, head_dim=64)
    engine = engine_on_shim(folder, block_size=16, dtype="bfloat16")
    runner = engine.built.runner
    runner.inputs.packed = True
    runner._forward._settle, runner._forward._accept = Settle(shim.maker()), Accept(shim.maker())
    groups: list[tuple[int, int]] = []
    answer = GroupedAttention.__call__

    def counted(self: GroupedAttention, queries: mx.array, *rest: Any, each: int, **options: Any) -> mx.array:
        groups.append((len(queries) // each, each))
        return answer(self, queries, *rest, each=each, **options)

    monkeypatch.setattr(GroupedAttention, "__call__", counted)
    asked = requests("hot", SamplingParams(max_tokens=16, seed=11, temperature=1.0))
    free = serve(engine, asked)
    assert not groups
    accepted = 0
    for wrong in (0, 2):
        for together in (*([request] for request in asked), asked):
            loop = serve(engine, together, Oracle(free, wrong))
            assert all(said == free.tokens[key] for key, said in loop.tokens.items())
            accepted += loop.accepted
    assert accepted > 0
    assert {(1, 5), (1, 8), (2, 5)} <= set(groups)


@pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.usefixtures("compiled_again")
def test_rows_of_a_family_whose_queries_are_cast_are_not_answered_together(tmp_path: Path, padded: bool) -> None:
    """padded: whether rows are padded to groups although no layer's kernel answers groups."""
    folder = tiny_models.make(tmp_path / "model", "phi", seed=1, hidden_size=256, num_attention_heads=4)
    engine = engine_on_shim(folder, block_size=16, dtype="bfloat16")
    assert engine.built.runner.rectangles.groups is False
    engine.built.runner.rectangles.groups = padded
    asked = requests("greedy")
    free = serve(engine, asked)
    for together in (*([request] for request in asked), asked):
        loop = serve(engine, together, Oracle(free, 2))
        assert all(said == free.tokens[key] for key, said in loop.tokens.items())


@pytest.mark.parametrize("options", [{"depth": 0}, {"blocks": 14}, {"chunks": 5, "piggybacked": 6}])
def test_drafts_change_nothing_in_other_schedules(engine: Engine, options: dict[str, int]) -> None:
    """With preemption, and with chunks of prompts in the forward that verifies."""
    free = serve(engine, requests("penalties"))
    assert_same(serve(engine, requests("penalties"), Oracle(free, 4), **options), free)


def test_drafts_of_several_kinds_of_rows_share_a_step(engine: Engine) -> None:
    mixed = [structs.replace(requests(name)[i % 4], id=i) for i, name in enumerate(PARAMS)]
    free = serve(engine, mixed)
    assert_same(serve(engine, mixed, Oracle(free, 4)), free)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_drafts_change_nothing_for_adapters_biases_and_cached_prefixes(tmp_path: Path, kv_bits: Literal[16, 8]) -> None:
    """Rows of two adapters and of the base share steps; prompts that were read before are found again."""
    folder = tiny_models.make(tmp_path / "model", "qwen3", seed=1)
    engine = make_engine(folder, max_num_seqs=8, kv_bits=kv_bits, kv_group_size=16)
    refs = base_and_adapters(engine, tmp_path)
    rng = Random(4)
    asked = []
    for i in range(12):
        biases = tuple((rng.randrange(3, tiny_models.VOCAB), rng.uniform(-9, 9)) for _ in range(i % 3))
        params = few(rng.choice(list(PARAMS)))
        params = structs.replace(params, logit_bias=biases, stop_token_ids=(8,), seed=i)
        asked.append(Request(i, PROMPTS[1 + i % 2], params, refs[i % 3], 1 + i % 2))
    free = serve(engine, asked)
    assert len({tuple(said) for said in free.tokens.values()}) > 6
    loop = serve(engine, asked, Oracle(free, 3))
    assert_same(loop, free)
    assert loop.accepted > 0 and any(loop.cached.values())


@pytest.mark.promise("FLT-05")
def test_a_proposer_that_fails_is_given_up(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Oracle):
        def propose(
            self, request: Request, choice: int, tokens: Sequence[int], unread: int, most: int
        ) -> Sequence[int]:
            if len(tokens) > 25:
                raise ValueError("no index")
            return super().propose(request, choice, tokens, unread, most)

    free = serve(engine, requests("hot"))
    loop = serve(engine, requests("hot"), Failing(free, 3))
    assert_same(loop, free)
    assert loop.accepted > 0 and "drafts are off from here on" in caplog.text
    assert loop.scheduler.drafting.proposer is None
