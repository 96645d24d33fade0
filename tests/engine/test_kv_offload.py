"""The KV offload under the scheduler, on the reference runner: what comes back from the drive is right or missing."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from random import Random
from typing import Any

import pytest

from mlx_tandem.engine import prefix_leaders, run_queue
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.block_writes import BlockWrites
from mlx_tandem.engine.kv_offload import reads
from mlx_tandem.engine.kv_offload.forms import RecordForm
from mlx_tandem.engine.kv_offload.reads import KVReads, Prefix
from mlx_tandem.engine.kv_offload.saves import KVSaves
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.disk.records import BlockId
from mlx_tandem.kv.hashing import ROOT, Chain
from mlx_tandem.kv.prefix import Match, PrefixCache
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests.engine.drive import LateDrive, Store
from tests.engine.random_workloads import Outcome, Settings, play, some_workload_fails
from tests.engine.toy_model import STATE
from tests.engine.workloads import Engine, assert_exact, make_engine

PATIENCE = 2
PROMPT = tuple(i * i % 13 for i in range(50))
WHOLE = (len(PROMPT) - 1) // 4  # blocks of it that can be found


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "OVERTAKEN_FOR_SLOT", PATIENCE)
    monkeypatch.setattr(prefix_leaders, "WORTH_WAITING", 1)
    monkeypatch.setattr(reads, "WORTH_READING", 1)


def ask(number: int, prompt: tuple[int, ...] = PROMPT, adapter: AdapterRef | None = None, **more: Any) -> Request:
    return Request(number, prompt, SamplingParams(max_tokens=3, seed=number), adapter, **more)


def serve(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.loop.add(request)
    engine.loop.run()
    engine.loop.assert_idle()
    assert_exact(engine.loop)


def server(store: Store, *, latest: int = 0, **options: Any) -> tuple[Engine, LateDrive]:
    drive = LateDrive(Random(1), store, latest=latest, most=1)
    return make_engine(num_blocks=100, drive=drive, **options), drive


def filled(*adapters: AdapterRef | None) -> Store:
    """With the prompt under each of these."""
    store = Store()
    engine, _ = server(store, write_through=True)
    serve(engine, *(ask(i, adapter=adapter) for i, adapter in enumerate(adapters or (None,))))
    return store


def test_what_a_failed_row_has_written_is_never_saved() -> None:
    """Also where the step behind the failed one has copied it out already."""
    saved = []
    for failed_step in range(6):
        store = Store()
        engine, _ = server(store, write_through=True, depth=1, nan={failed_step: 0})
        engine.loop.add(Request(1, PROMPT, SamplingParams(max_tokens=10, seed=1)))
        engine.loop.run()
        engine.loop.assert_idle()
        assert engine.loop.failed == {1}
        saved.append(len(store.blocks))
    assert saved[:3] == [0, 0, 0]
    assert saved[-1] > 0, "what was on the drive before is whole"


# --- random workloads --------------------------------------------------------------------------------------------


@pytest.mark.promise("PRP-3")
@pytest.mark.parametrize("part", range(2))
def test_every_sequence_is_exact_with_a_drive(part: int) -> None:
    """Tiny pools, both policies; reads come late, or not, or with less; steps fail, requests are cancelled."""
    outcome = Outcome()
    for seed in range(part * 300, (part + 1) * 300):
        try:
            outcome += play(Random(seed), Settings(drives=1.0))
        except Exception as e:
            e.add_note(f"in workload {seed}")
            raise
    assert outcome.finished > 3000
    assert min(outcome.preemptions, outcome.failures, outcome.failed, outcome.cancelled) > 200
    assert outcome.loads > 300
    assert outcome.saves > 3000


def _load_another_s(patch: pytest.MonkeyPatch) -> None:
    """Blocks are asked for under their tokens alone: whose adapter computed them is left out."""
    original = Chain.__init__

    def init(self: Chain, namespace: bytes) -> None:
        original(self, bytes(32))

    patch.setattr(Chain, "__init__", init)


def _keep_what_was_read(patch: pytest.MonkeyPatch) -> None:
    """A sequence that goes on under another version has what was read for the one before."""
    patch.setattr(BlockManager, "forget", lambda self, s: None)

    original = KVReads.coming

    def coming(self: KVReads, sequence: int, chain: Chain, tokens: list[int], match: Match) -> Prefix:
        fetch = self._fetches.get(sequence)
        if fetch is not None:
            fetch.key = chain.key(fetch.end - 1, tokens, 4)
        return original(self, sequence, chain, tokens, match)

    patch.setattr(KVReads, "coming", coming)


def _publish_before_loaded(patch: pytest.MonkeyPatch) -> None:
    """Blocks can be found as soon as it is known what will be loaded into them."""
    original = BlockManager.begin

    def begin(self: BlockManager, s: Sequence) -> None:
        original(self, s)
        if self.writes.has_loads:
            for cache, table in zip(self._caches, s.tables, strict=True):
                cache.publish(self._keys.chain(s), s.tokens[: s.scheduled], table, s.published)

    patch.setattr(BlockManager, "begin", begin)


def _run_before_loaded(patch: pytest.MonkeyPatch) -> None:
    """A sequence runs when the first of its blocks are there."""
    patch.setattr(BlockWrites, "is_loading", lambda self, tables: False)


def _load_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """What was to be loaded for a sequence that has left is loaded into its blocks all the same."""
    original = BlockManager.leave

    def leave(self: BlockManager, s: Sequence) -> None:
        loads = dict(self.writes._loads)
        original(self, s)
        self.writes._loads = loads

    patch.setattr(BlockManager, "leave", leave)


def _load_one_further(patch: pytest.MonkeyPatch) -> None:
    """Where the pool has got more of a prompt meanwhile, what was read goes behind it as it is."""
    original = KVReads.take

    def take(self: KVReads, sequence: int, chain: Chain, tokens: list[int], match: Match) -> Prefix:
        fetch = self._fetches.get(sequence)
        if fetch and fetch.payloads and fetch.first < match.whole:
            fetch.payloads = fetch.payloads[: fetch.end - match.whole]
            fetch.first = match.whole
        return original(self, sequence, chain, tokens, match)

    patch.setattr(KVReads, "take", take)


def _load_the_state_before(patch: pytest.MonkeyPatch) -> None:
    """The state that is read is that at the end of the block before."""
    original = KVReads._fetch

    def fetch(self: KVReads, chain: Chain, tokens: list[int], first: int, end: int, *, with_state: bool) -> Any:
        found = original(self, chain, tokens, first, end, with_state=with_state)
        if with_state and end > 1:
            found.records[-1] = original(self, chain, tokens, end - 1, end - 1, with_state=True).records[-1]
        return found

    patch.setattr(KVReads, "_fetch", fetch)


def _go_on_without_its_state(patch: pytest.MonkeyPatch) -> None:
    """A prefix whose state did not come is used all the same."""
    original = KVReads.poll

    def poll(self: KVReads) -> None:
        original(self)
        for fetch in self._fetches.values():
            if fetch.payloads is not None and fetch.with_state and len(fetch.payloads) == len(fetch.records) - 1:
                fetch.payloads = [*fetch.payloads, memoryview(bytes(8))]

    patch.setattr(KVReads, "poll", poll)


def _one_key_for_both(patch: pytest.MonkeyPatch) -> None:
    """The record of a state has the key of the block that it follows."""
    patch.setattr(RecordForm, "key", lambda self, key: key)


def _save_a_step_late(patch: pytest.MonkeyPatch) -> None:
    """What a block held is read when its next owner may have written to it."""
    original = KVSaves.take
    held: dict[int, dict[bytes, Any]] = {}

    def take_saves(self: KVSaves) -> tuple[int, ...]:
        before, held[id(self)] = held.get(id(self), {}), self._evicted
        self._evicted = before
        return original(self)

    patch.setattr(KVSaves, "take", take_saves)


def _save_under_the_next_id(patch: pytest.MonkeyPatch) -> None:
    """The bytes of a plan's blocks are taken in another order than they were asked for."""
    original = KVSaves.saved
    patch.setattr(KVSaves, "saved", lambda self, payloads: original(self, list(payloads)[::-1]))


def _save_the_lost(patch: pytest.MonkeyPatch) -> None:
    """After a failed step the next plan's bytes are taken for those that were lost with it."""
    patch.setattr(KVSaves, "distrust", lambda self: None)


def _wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks what has come."""
    patch.setattr(BlockManager, "poll", lambda self: None)


def _never_forget(patch: pytest.MonkeyPatch) -> None:
    """What is read for a request that is cancelled is not forgotten."""
    original = Scheduler.cancel

    def cancel(self: Scheduler, request: int, choice: int | None = None) -> None:
        forget = self._blocks.forget
        self._blocks.forget = lambda s: None  # type: ignore[method-assign]
        original(self, request, choice)
        self._blocks.forget = forget  # type: ignore[method-assign]

    patch.setattr(Scheduler, "cancel", cancel)


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "another adapter's block is loaded": _load_another_s,
    "another version's block is loaded": _keep_what_was_read,
    "blocks are published before they are loaded": _publish_before_loaded,
    "rows run before their blocks are loaded": _run_before_loaded,
    "blocks are loaded for whoever has left": _load_for_nobody,
    "blocks are loaded in the wrong place": _load_one_further,
    "another state is loaded": _load_the_state_before,
    "a state that did not come is missing": _go_on_without_its_state,
    "a state and its block have one key": _one_key_for_both,
    "blocks are saved after they were overwritten": _save_a_step_late,
    "blocks are saved under another's id": _save_under_the_next_id,
    "what a failed step would have saved is saved": _save_the_lost,
    "what comes from the drive is not looked at": _wait_for_ever,
    "a read for a cancelled request goes on": _never_forget,
}


FOUND_BY = {
    "another version's block is loaded": 10,
    "rows run before their blocks are loaded": 11,
    "blocks are loaded for whoever has left": 6,
    "blocks are loaded in the wrong place": 22,
    "another state is loaded": 16,
    "a state that did not come is missing": 40,
    "what a failed step would have saved is saved": 6,
    "a read for a cancelled request goes on": 10,
}
"""A workload that finds a bug which few find."""


@pytest.mark.parametrize("name", PLANTS)
def test_the_suite_finds_planted_bugs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    assert some_workload_fails(600, Settings(drives=1.0), FOUND_BY.get(name, 0)), "no workload found it"


# --- step by step ------------------------------------------------------------------------------------------------


def test_a_prompt_comes_back_after_a_restart() -> None:
    """All that was whole, for the adapter that computed it and nobody else; twice the same, for one reading."""
    a, b = AdapterRef("a", 1, "a"), AdapterRef("b", 1, "b")
    store = filled(None, a)
    for adapter, hits in ((None, True), (a, True), (b, False), (AdapterRef("other", 7, "a"), True)):
        engine, drive = server(store, latest=3)
        serve(engine, ask(0, adapter=adapter), ask(1, adapter=adapter))
        assert engine.loop.cached[0] == (4 * WHOLE if hits else 0)
        assert engine.loop.cached[1] >= 4 * WHOLE
        assert drive.read_blocks == (WHOLE if hits else 0)
        assert engine.scheduler.offload is not None
        assert engine.scheduler.offload.reads.hit_tokens == 4 * drive.read_blocks


def test_what_is_given_to_others_comes_back() -> None:
    """evict_only, a pool for little more than one prompt."""
    store = Store()
    drive = LateDrive(Random(1), store, most=50)
    engine = make_engine(num_blocks=18, drive=drive)
    other = tuple(12 - t for t in PROMPT)
    serve(engine, ask(0))
    assert not store.blocks, "nothing goes to the drive while it has a place"
    serve(engine, ask(1, other), ask(2))
    assert engine.loop.cached[2] == 4 * WHOLE
    assert engine.runner.loads > 0


def test_others_overtake_one_that_waits_for_the_drive() -> None:
    store = filled()
    engine, drive = server(store)
    drive.poll = lambda: []  # type: ignore[method-assign]
    loop = engine.loop
    loop.add(ask(0))
    for i in range(1, 4):
        loop.add(ask(i, (i, 5, 5)))
    for _ in range(12):
        loop.step()
    assert list(loop.admitted) == [1, 2], "as many as patience allows"
    loop.cancel(0)
    loop.run()
    loop.assert_idle()
    assert_exact(loop)


def test_a_drive_that_takes_too_long_is_not_waited_for() -> None:
    engine, drive = server(filled(), read_seconds=-1.0)
    drive.poll = lambda: []  # type: ignore[method-assign]
    serve(engine, ask(0))
    assert engine.loop.cached[0] == 0
    assert drive.is_idle, "it is told so"


def test_blocks_that_are_not_what_they_should_be_are_not_loaded() -> None:
    """Shorter or longer than a block is here."""
    store = filled()
    for key, (block, payload) in list(store.blocks.items())[3:]:
        store.blocks[key] = block, payload + b"12345678"
    engine, _ = server(store)
    serve(engine, ask(0))
    assert engine.loop.cached[0] == 12


def test_the_blocks_of_one_prompt_are_loaded_in_several_plans() -> None:
    """A stream beside it gets its tokens meanwhile."""
    engine, _ = server(filled(), depth=0)
    assert engine.scheduler.offload is not None
    link = engine.scheduler.offload.link
    link.step_bytes = 2 * link.blocks.nbytes
    loop = engine.loop
    loop.add(Request(1, (9,), SamplingParams(max_tokens=30, seed=1)))
    loop.step()
    loop.add(ask(0))
    before = len(loop.tokens[1, 0])
    while not loop.tokens[0, 0]:
        loop.step()
    assert len(loop.tokens[1, 0]) - before >= WHOLE // 2
    loop.run()
    assert_exact(loop)
    assert loop.cached[0] == 4 * WHOLE


def test_what_cannot_be_saved_in_time_is_counted() -> None:
    store = Store()
    drive = LateDrive(Random(1), store, most=0)
    engine = make_engine(num_blocks=18, drive=drive)
    serve(engine, ask(0), ask(1, tuple(12 - t for t in PROMPT)))
    assert engine.scheduler.offload is not None
    assert engine.scheduler.offload.saves.unsaved > 0
    assert not store.blocks


@pytest.mark.parametrize("ended", ["fail", "nan"])
def test_blocks_whose_save_was_given_up_are_saved_later(ended: str) -> None:
    """The next request for the prompt publishes them again, and they come back after a restart."""
    failed = 0
    for step in range(6):
        store = Store()
        engine, _ = server(store, write_through=True, **{ended: {step: "wait" if ended == "fail" else 0}})
        engine.loop.add(ask(0))
        engine.loop.run()
        failed += engine.loop.failed == {0}
        engine.loop.add(ask(1))
        engine.loop.run()
        again, _ = server(store)
        serve(again, ask(2))
        assert again.loop.cached[2] == 4 * WHOLE, step
    assert failed > 1


def test_blocks_that_the_drive_did_not_take_are_saved_when_they_are_given_out() -> None:
    store = Store()
    drive = LateDrive(Random(1), store, loses=1.0, most=50)
    engine = make_engine(num_blocks=18, drive=drive, write_through=True)
    serve(engine, ask(0))
    assert not store.blocks
    drive.loses = 0.0
    serve(engine, ask(1, tuple(12 - t for t in PROMPT)), ask(2))
    assert engine.loop.cached[2] == 4 * WHOLE
    assert engine.runner.loads > 0


# --- states ------------------------------------------------------------------------------------------------------


HYBRID = (None, STATE)
LONGER = (*PROMPT, *PROMPT[:9])


def hybrid(store: Store, **options: Any) -> tuple[Engine, LateDrive]:
    drive = LateDrive(Random(1), store, most=50)
    return make_engine(num_blocks=100, windows=HYBRID, state_blocks=30, drive=drive, **options), drive


def serve_hybrid(engine: Engine, *requests: Request) -> list[int]:
    """How many tokens each of these finds, one after the other."""
    for request in requests:
        engine.loop.add(request)
        engine.loop.run()
    engine.loop.assert_idle()
    assert_exact(engine.loop, windows=HYBRID)
    return [engine.loop.cached[request.id] for request in requests]


def states_of(engine: Engine) -> PrefixCache:
    return engine.scheduler._blocks._caches[1]


def test_only_the_state_is_read_where_memory_has_the_blocks() -> None:
    engine, drive = hybrid(Store(), write_through=True)
    serve_hybrid(engine, ask(0))
    states = states_of(engine)
    states.drop([entry.block for entry in states.entries()])
    assert serve_hybrid(engine, ask(1)) == [4 * WHOLE]
    assert drive.read_blocks == 1


def test_only_blocks_are_read_where_memory_has_the_state() -> None:
    engine, drive = hybrid(Store(), write_through=True)
    serve_hybrid(engine, ask(0))
    blocks = engine.scheduler._blocks._caches[0]
    blocks.drop([entry.block for entry in blocks.entries() if entry.parent != ROOT])
    assert serve_hybrid(engine, ask(1)) == [4 * WHOLE]
    assert drive.read_blocks == WHOLE - 1


def test_a_damaged_state_is_left_for_the_one_before_it() -> None:
    """The blocks up to there are read again."""
    store = Store()
    engine, _ = hybrid(store, write_through=True)
    assert serve_hybrid(engine, ask(0), ask(1, LONGER)) == [0, 4 * WHOLE]
    end = (len(LONGER) - 1) // 4
    damaged = sha256(b"state" + states_of(engine).chain("").key(end - 1, LONGER, 4)).digest()
    engine, drive = hybrid(store)
    find = drive._find

    def damaging(blocks: list[BlockId]) -> list[memoryview]:
        if blocks[-1].key == damaged:
            del store.blocks[damaged]
        return find(blocks)

    drive._find = damaging  # type: ignore[method-assign]
    assert serve_hybrid(engine, ask(2, LONGER)) == [4 * WHOLE]
    assert damaged not in store.blocks
    assert drive.read_blocks == end + WHOLE + 1


def test_the_end_of_a_server_saves_each_state_behind_its_blocks() -> None:
    """The newest first, and no block that leads to no state."""
    store = Store()
    engine, drive = hybrid(store)
    other = tuple(12 - t for t in PROMPT)
    serve_hybrid(engine, ask(0), ask(1, other))
    offload = engine.scheduler.offload
    assert offload is not None and not store.blocks
    offload.saves.save_all()
    wanted = [form is offload.link.states for form, _ in offload.saves._wanted.values()]
    assert wanted.count(True) == len(states_of(engine).entries())
    engine.loop.run()
    engine, drive = hybrid(store)
    assert serve_hybrid(engine, ask(2), ask(3, other)) == [4 * WHOLE] * 2
    assert drive.read_blocks == 2 * (WHOLE + 1)
