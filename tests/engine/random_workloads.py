"""Random workloads for the scheduler on the reference runner.

A workload is a function of its random source alone: small pools so that sequences preempt one another, more adapters
than slots, odd prompt chunks, depth 0 or 1, cancels at any time, failing steps and rows that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec import structs

from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.plan import Runner, StepPlan, StepResult
from mlx_tandem.engine.proposers.draft_model import DraftModel
from mlx_tandem.engine.proposers.speculation import Speculation
from mlx_tandem.types import AdapterRef, Pooling, Request, SamplingParams
from tests.engine import drive as drives
from tests.engine.guessing import RowByRow
from tests.engine.harness import Choice, Loop
from tests.engine.hosts import Learning
from tests.engine.late import LateMasks
from tests.engine.reference import ReferenceRunner, open_groups
from tests.engine.toy_model import STATE, Windows
from tests.engine.workloads import (
    EOS,
    VOCAB,
    Engine,
    Masks,
    OddChunks,
    assert_exact,
    expected,
    make_engine,
)


class Guesses(RowByRow):
    """A proposer that knows what each choice will say, and is right about each token as often as `right`.

    Some of what it proposes is junk: more than is asked for, tokens behind the end, tokens that do not exist.
    """

    def __init__(self, rng: Random, eos: tuple[int, ...], windows: Windows, masks: Masks | None):
        self._rng, self._eos, self._windows, self._masks = rng, eos, windows, masks
        self._right, self._waits = rng.choice((0.0, 0.5, 0.9, 1.0)), rng.choice((0.0, 0.3, 1.0))
        self._longest = rng.choice((1, 3, 9))
        self._said: dict[Choice, list[int]] = {}
        self.guessed: list[list[int]] = []  # what sequences would have said, had all drafts been accepted

    def is_on(self, rows: int) -> bool:
        return self._rng.random() < 0.9

    def settle(self, request: Request, choice: int, drafts: int, accepted: int, source: None) -> None:
        assert 0 <= accepted <= drafts

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        assert len(plan.rows) == len(result.tokens)

    def forget(self, request: Request, choice: int) -> None:
        self._said.pop((request.id, choice), None)

    def needs_newest(self, request: Request, choice: int) -> bool:
        return self._rng.random() < self._waits

    def propose(self, request: Request, choice: int, tokens: Several[int], unread: int, most: int) -> Several[int]:
        assert 0 < most <= request.params.max_tokens
        assert len(tokens) + unread + most < len(request.prompt) + request.params.max_tokens
        if self._rng.random() < 0.2:
            return ()
        key = request.id, choice
        if key not in self._said:
            self._said[key] = expected(request, choice, self._eos, self._windows, self._masks)
        begun = len(tokens) - len(request.prompt) + unread
        guesses = [
            t if self._rng.random() < self._right else self._rng.randrange(VOCAB) for t in self._said[key][begun:]
        ]
        junk = [self._rng.randint(-1, VOCAB) for _ in range(self._rng.choice((0, 3)))]
        proposed = (guesses + junk)[: self._rng.randint(0, self._longest)]
        if not unread and all(0 <= t < VOCAB for t in proposed):
            self.guessed.append([*tokens, *proposed])
        return proposed


@dataclass(slots=True)
class Outcome:
    """How a workload went, for the counts of a run."""

    requests: int = 0
    finished: int = 0
    preemptions: int = 0
    failures: int = 0  # of steps
    failed: int = 0  # requests
    cancelled: int = 0
    cached: int = 0  # tokens of prompts that were there
    moved: int = 0  # requests that went on under a newer version
    switched: int = 0  # choices whose tokens name more than one
    held_back: int = 0  # steps with rows made for training left out
    messages: int = 0  # to trainers
    steps: int = 0
    work: int = 0
    loads: int = 0  # blocks that came from a drive
    saves: int = 0  # blocks on it
    masked: int = 0  # rows that drew by masks
    drafted: int = 0  # tokens
    accepted: int = 0  # of these
    floated: int = 0  # rows that began where only the device knew
    piggybacked: int = 0  # chunks of prompts that went with rows that decode
    given_back: int = 0  # blocks before the windows of rows that were not read for them
    most_steps: float = 0.0  # of a workload, per token of work

    def __iadd__(self, other: Outcome) -> Outcome:
        for name in self.__slots__:
            value = getattr(self, name)
            more = getattr(other, name)
            setattr(self, name, max(value, more) if name == "most_steps" else value + more)
        return self


@dataclass(slots=True)
class Settings:
    """The settings that a workload is drawn from. Tests narrow them."""

    cancels: bool = True
    drives: float = 0.0  # how often there is KV offload
    faults: bool = True
    spoils: float = 0.03  # how often a step of a workload with faults has a row that is not finite
    masks: float = 0.4  # how often some requests need masks
    late: float = 0.0  # how often a mask is late
    drafts: float = 0.5  # how often there is a proposer that knows what will be said
    predictions: float = 0.4  # how often a request says what its answer may contain
    ngrams: float = 0.5  # how often there is the server's own proposer, if there is no such
    trainers: float = 0.3  # how often two trainers learn beside it
    most_requests: int = 12
    patience: int = 2
    activated: float = 0.3  # how often adapters apply from where a prompt invokes them
    states: float = 0.3  # how often layers keep a state
    windows: bool = False  # layers see a window, all or some of them
    depths: tuple[int, ...] = field(default=(0, 1, 1))


def draw_request(
    rng: Random,
    number: int,
    engine: Engine,
    prompts: list[list[int]],
    adapters: list[AdapterRef | None],
    priorities: tuple[int, ...] = (0,),
    background: float = 0.0,
) -> Request:
    prompt = rng.choice(prompts)[: rng.randint(1, 14)]
    if engine.loop.tokens and rng.random() < 0.3:  # a later turn of what was said
        said = rng.choice(list(engine.loop.tokens))
        prompt = [*engine.loop.requests[said[0]].prompt, *engine.loop.tokens[said], *prompt[:3]]
    proposer = engine.scheduler.drafting.proposer
    if isinstance(proposer, Guesses) and proposer.guessed and rng.random() < 0.2:
        prompt = [*rng.choice(proposer.guessed), *prompt[:2]]
    max_tokens = rng.randint(1, 10)
    length = max(1, min(len(prompt), engine.room - max_tokens))
    max_tokens = min(max_tokens, engine.room - length)
    penalised = rng.random() < 0.3
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(4),
        presence_penalty=0.5 if penalised else 0.0,
        stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, None, 0, 2)),
        prompt_logprobs=rng.choice((None, None, None, None, None, 0, 2)),
        min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
        repetition_context=rng.choice((0, 1, 3, 8)),
        allowed_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(4, 8))) if rng.random() < 0.2 else (),
        xtc_probability=rng.choice((0.0, 0.0, 0.5)),
    )
    n = rng.choice((1, 1, 2, 3))
    drawn = Request(
        id=number,
        prompt=tuple(prompt[:length]),
        params=params,
        adapter=rng.choice(adapters),
        n=min(n, engine.max_num_seqs),
        priority=rng.choice(priorities),
        follow=rng.random() < 0.5,
        background=rng.random() < background,
    )
    return pooled(drawn, rng.choice(("mean", "last"))) if rng.random() < 0.1 else drawn


def _changed(rng: Random, said: list[int]) -> tuple[int, ...]:
    """Return the tokens that a choice will say, with some changed, missing or added."""
    kept = [t if rng.random() < 0.9 else rng.randrange(VOCAB) for t in said if rng.random() < 0.9]
    at = rng.randint(0, len(kept))
    return (*kept[:at], *[rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 3)))], *kept[at:])


def _draft_model(rng: Random, engine: Engine) -> DraftModel:
    """A model that draws what the base without windows draws, or from fewer tokens, in a small pool; it may fail."""
    vocab, size, blocks = rng.choice((VOCAB, VOCAB, VOCAB // 2)), rng.choice((1, 4)), rng.choice((3, 9, 40))
    seats = rng.choice((1, engine.max_num_seqs))
    fail = {rng.randrange(30): rng.choice(("launch", "half", "wait"))} if rng.random() < 0.2 else {}
    runner = ReferenceRunner(blocks, size, seats, 0, vocab, fail=fail, drafting_positions=80 * (size == 4))
    return DraftModel(runner, open_groups(runner, 1), seats=seats, vocab_size=vocab, longest=rng.choice((12, 1000)))


def pooled(request: Request, pooling: Pooling) -> Request:
    """The request for the hidden states of the same prompt."""
    params = structs.replace(request.params, max_tokens=1, min_tokens=0, prompt_logprobs=None)
    return structs.replace(request, params=params, n=1, follow=False, pooling=pooling)


def some_workload_fails(tries: int, settings: Settings, first: int = 0) -> bool:
    """Whether any of so many does; `first` is tried before the others."""
    for seed in (first, *range(tries)):
        try:
            play(Random(seed), settings)
        except Exception:
            return True
    return False


def play(
    rng: Random,
    settings: Settings | None = None,
    wrap: Callable[[ReferenceRunner], Runner] = lambda runner: runner,
) -> Outcome:
    """One workload from its first request to an empty engine. Raises AssertionError for anything that is wrong."""
    settings = settings or Settings()
    steps = range(200)
    store, drive = drives.Store(), None
    if settings.drives and rng.random() < settings.drives:
        drive = drives.LateDrive(
            Random(rng.getrandbits(32)),
            store,
            latest=rng.choice((0, 2, 6)),
            loses=rng.choice((0.0, 0.1, 0.5)),
            fits=rng.random() < 0.5,
        )
    faulty = settings.faults and rng.random() < 0.4
    fail = {i: rng.choice(("launch", "half", "wait")) for i in steps if faulty and rng.random() < 0.06}
    nan = {i: rng.randrange(8) for i in steps if faulty and rng.random() < settings.spoils}
    eos = (EOS,)
    priorities = rng.choice(((0,), (0,), (0, 0, -1, 5)))
    limited = rng.random() < 0.3
    options = _draw_windows(rng) if settings.windows else {}
    if settings.states and rng.random() < settings.states:
        options = _draw_states(rng)
    windows: Windows = options.get("windows", (None,))
    engine = make_engine(
        num_blocks=rng.choice((7, 9, 12, 30, 90) if drive is None else (9, 12, 16, 30)),
        block_size=rng.choice((1, 2, 4, 4)),
        max_num_seqs=rng.randint(1, 6),
        max_loras=rng.randint(1, 3),
        depth=rng.choice(settings.depths),
        eos=eos,
        prefill_batch_size=rng.randint(1, 2) if limited else 0,
        max_inflight_tokens=rng.choice((10, 40)) if limited else 0,
        wrap=wrap,
        drive=drive,
        write_through=drive is not None and rng.random() < 0.5,
        piggybacked=rng.choice((0, 3, 50)),
        read_seconds=rng.choice((0.0, 60.0, 60.0)) if drive is not None else 0.0,
        fail=fail,
        again=frozenset(i for i in fail if i % 3 == 0),
        nan=nan,
        **options,
    )
    loop, scheduler = engine.loop, engine.scheduler
    apart = Random(str(rng.getstate()))  # what is drawn for learning changes nothing of the rest
    learning = Learning(apart) if apart.random() < settings.trainers else None
    if scheduler.offload is not None:
        link = scheduler.offload.link
        link.step_bytes = rng.choice((1, 2, 50)) * link.blocks.nbytes
    if rng.random() < 0.8:
        scheduler.prefill.cost = OddChunks(rng, rng.choice((1, 3, 7)))
    masks = scheduler.mask_maker = Masks(eos, rng.choice((1, 2, 4))) if rng.random() < settings.masks else None
    if masks is not None and settings.late:
        masks = scheduler.mask_maker = LateMasks(Random(f"late {rng.getstate()}"), settings.late, eos, masks.share)
    if rng.random() < settings.drafts:
        scheduler.drafting.proposer = Guesses(rng, eos, windows, masks)
        scheduler.drafting.most_tokens = rng.choice((engine.max_num_seqs, 64, 64))
    elif apart.random() < settings.ngrams:
        method = apart.choice(("none", "ngram", "draft", "draft"))
        own = SpeculationConfig(method, dynamic=apart.random() < 0.7, ngram_min=1, prompt_lookup=apart.random() < 0.7)
        smaller = _draft_model(apart, engine) if method == "draft" else None
        scheduler.drafting.proposer = Speculation(own, smaller, clock=apart.random)
    proposer = scheduler.drafting.proposer
    names = ["a", "b", "c", "d", "e"][: rng.randint(0, 5)]
    publishes = rng.choice((0.0, 0.1, 0.5)) if names else 0.0
    background = rng.choice((0.0, 0.0, 0.5))
    held_back = 0
    prompts = [[rng.randrange(VOCAB) for _ in range(14)] for _ in range(3)]
    invoked = _Invocations(Random(f"called {rng.getstate()}"), prompts, settings.activated)
    adapters: list[AdapterRef | None] = [None, *(invoked.ref(name, 1, name) for name in names)]
    total = rng.randint(1, settings.most_requests) * (1 if drive is None else 2)
    eager = rng.choice((0.2, 0.6, 1.0))
    cancels = settings.cancels and rng.random() < 0.5
    work = 0
    while True:
        while len(loop.requests) < total and rng.random() < eager:
            request = draw_request(rng, len(loop.requests), engine, prompts, adapters, priorities, background)
            if apart.random() < settings.predictions:
                said = expected(request, 0, eos, windows, masks)
                request = structs.replace(request, prediction=_changed(apart, said))
            loop.add(request)
            work += request.n * (len(request.prompt) + request.params.max_tokens)
        if cancels and rng.random() < 0.1:
            open_choices = loop.open_choices()
            if open_choices:
                key = rng.choice(open_choices)
                loop.cancel(key[0], rng.choice((None, key[1])))
        if rng.random() < publishes:
            place = rng.randrange(1, len(adapters))
            adapters[place] = ref = _publish(rng, adapters[place], invoked)
            loop.follow(ref)
        due = rng.random() < 0.5
        if learning is not None:
            learning.turn(due)
        held_back += not due and scheduler.has_users and scheduler.has_background
        busy = loop.step(due)
        most = 2 * work * (1 + bool(scheduler.drafting.proposer or masks))
        assert loop.steps <= 30 + (10 * most if settings.late else most), "no progress"
        if not busy and len(loop.requests) == total:
            break
    loop.assert_idle()
    assert scheduler.drafting.proposer is proposer, "the proposer was asked wrongly, and given up"
    messages = 0 if learning is None else learning.finish()
    assert_exact(loop, eos, windows, masks)
    assert masks is None or not masks.open, "the maker of masks keeps choices that have ended"
    # One step ahead, a sequence may end while the row that spoils its blocks is still on the device; else nobody meets
    # what another has spoilt.
    assert not engine.runner.spoiled or loop.depth, "one row's failure spoilt another's"
    assert not engine.runner.infected, "what was not finite was found by another"
    assert_overtaken_at_most(loop, settings.patience)
    assert drive is None or drive.is_idle, "a read is never forgotten"
    return Outcome(
        requests=total,
        finished=len(loop.finished),
        preemptions=scheduler.queue.preemptions,
        failures=loop.failures,
        failed=len(loop.failed),
        cancelled=len(loop.cancelled),
        cached=sum(loop.cached.values()),
        moved=len(loop.moved),
        switched=sum(len(set(versions)) > 1 for versions in loop.versions.values()),
        held_back=held_back,
        messages=messages,
        loads=engine.runner.loads,
        saves=len(store.blocks),
        masked=engine.runner.masked,
        drafted=engine.runner.drafted,
        accepted=engine.runner.accepted,
        floated=engine.runner.floated,
        piggybacked=loop.piggybacked,
        given_back=engine.runner.given_back,
        steps=loop.steps,
        work=work,
        most_steps=loop.steps / max(work, 20),
    )


def _draw_windows(rng: Random) -> dict[str, Any]:
    """Return options of a model whose layers all have a window, or whose windowed layers have a pool of their own."""
    window = rng.choice((1, 2, 3, 5, 8))
    chunk = {"max_chunk_tokens": rng.choice((8, 8, 64))}
    if rng.random() < 0.3:
        return {"windows": (window,), **chunk}
    return {"windows": (None, window), "window_blocks": rng.choice((5, 7, 9, 14, 30)), **chunk}


def _draw_states(rng: Random) -> dict[str, Any]:
    """Return options of a model some or all of whose layers keep a state. Others see a window or everything."""
    window = rng.choice((1, 2, 3, 5, 8))
    windows = rng.choice(((None, window, STATE), (None, window, STATE), (None, STATE), (STATE,)))
    return {
        "windows": windows,
        "window_blocks": rng.choice((7, 9, 14, 30)),
        "state_blocks": rng.choice((7, 9, 14, 30)),
        "max_chunk_tokens": rng.choice((8, 8, 64)),
    }


class _Invocations:
    """The tokens that invoke each adapter. Prompts contain them; an adapter without any applies everywhere."""

    def __init__(self, rng: Random, prompts: list[list[int]], share: float):
        self._rng, self._prompts = rng, prompts
        self._share = rng.choice((0.5, 1.0)) if rng.random() < share else 0.0
        self._known: dict[str, tuple[int, ...]] = {}

    def ref(self, name: str, version: int, digest: str) -> AdapterRef:
        if digest not in self._known:
            at, length = self._rng.randrange(10), self._rng.choice((1, 1, 2, 3))
            tokens = tuple(self._rng.choice(self._prompts)[at : at + length])
            self._known[digest] = tokens if self._rng.random() < self._share else ()
        return AdapterRef(name, version, digest, self._known[digest])


def _publish(rng: Random, old: AdapterRef | None, invoked: _Invocations) -> AdapterRef:
    """Return the next version of an adapter, now and then with the content of the first."""
    assert old is not None
    version = old.version + 1
    return invoked.ref(old.name, version, old.name if rng.random() < 0.2 else f"{old.name}{version}")


def assert_overtaken_at_most(loop: Loop, patience: int) -> None:
    """Requests start to run in the order of their arrival, but for `patience` that overtake and those that matter
    more."""
    for request, asked in loop.requests.items():
        place = loop.admitted.get(request)
        if place is None:
            continue
        overtakers = [
            r
            for r, p in loop.admitted.items()
            if r > request and p < place and _priority(loop.requests[r]) >= _priority(asked)
        ]
        assert len(overtakers) <= patience, f"{len(overtakers)} requests overtook request {request}"


def _priority(request: Request) -> tuple[bool, int]:
    return request.background, request.priority
