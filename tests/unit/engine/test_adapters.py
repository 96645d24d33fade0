"""Requests and their adapters: whoever waits for a read, room or another version runs or fails in the end, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.adapters.store import AdapterStore
from mlx_tandem.engine import adapters as module
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapters import Adapters, Reread
from mlx_tandem.errors import InvalidRequest, ModelError, TandemError
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, Request, SamplingParams

SIZE = 10
OVERTAKEN = 2
NAMES = {"a": "x", "b": "x", "c": "y", "d": "z"}  # of the versions with these contents
CONTENTS = st.sampled_from(sorted(NAMES))
FOLDERS = st.sampled_from(["/a", "/b", "/c", "/a again"])


def weights(digest: str) -> AdapterWeights:
    return AdapterWeights(AdapterInfo(digest, 8, 1.0, "mlx-lm", ("q_proj",), 1, SIZE), {})


def ref(digest: str) -> AdapterRef:
    return AdapterRef(NAMES[digest], ord(digest), digest)


class Reader:
    """A loader whose reads end when the test says so. `folders` says what is in each."""

    def __init__(self) -> None:
        self.folders = {"/a": "a", "/b": "b", "/c": "c", "/a again": "a"}
        self.under_way: list[tuple[Any, AdapterSource]] = []
        self._done: list[tuple[Any, AdapterWeights | TandemError]] = []

    @property
    def pending(self) -> int:
        return len(self.under_way) + len(self._done)

    def start(self, key: Any, source: AdapterSource) -> None:
        self.under_way.append((key, source))

    def read(self, index: int) -> None:
        key, source = self.under_way.pop(index % len(self.under_way))
        content = self.folders[source.path]
        self._done.append((key, weights(content) if content else ModelError("it is gone")))

    @property
    def done(self) -> list[tuple[Any, AdapterWeights | TandemError]]:
        return [*self._done]

    def results(self) -> Iterator[tuple[Any, AdapterWeights | TandemError]]:
        while self._done:
            yield self._done.pop(0)


class Engine(RuleBasedStateMachine):
    """Two adapters fit into memory beside those that are pinned or were made here."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, AdapterWeights] = {}
        self.reader, self.slots = Reader(), SlotTable(2)
        self.store = AdapterStore(self.held, most_bytes=2 * SIZE)
        self.adapters = Adapters(self.store, cast(Any, self.reader), self.slots)
        self.requests = 0
        self.waiting: dict[int, Request] = {}  # in the order of arrival
        self.running: dict[int, Request] = {}
        self.before: dict[int, set[str]] = {}  # former versions of requests that have moved
        self.follows: dict[str, AdapterRef] = {}  # the newest version of each name that is to be followed
        self.passed = 0  # requests that began though the first that waits came before them
        self.calls = 0
        self.called: dict[int, bool] = {}  # calls that are not answered, and whether each is to pin what it loads
        self.pinned: set[str] = set()
        self.done: list[tuple[Any, AdapterWeights | TandemError]] = []  # what the last poll has taken in

    # -- what the front says

    @initialize(known=st.sets(st.sampled_from("abc")))
    def begin(self, known: set[str]) -> None:
        """An earlier engine had loaded these."""
        for content in sorted(known):
            self.know(content, f"/{content}", False)

    @rule(folder=FOLDERS, pin=st.booleans())
    def load(self, folder: str, pin: bool) -> None:
        self.calls += 1
        self.called[self.calls] = pin
        self.adapters.load(m.LoadAdapter(self.calls, AdapterSource(folder), pin))

    @rule(content=CONTENTS, folder=FOLDERS, pin=st.booleans())
    def know(self, content: str, folder: str, pin: bool) -> None:
        """The folder may hold something else by now."""
        self.adapters.know(m.KnowAdapter(weights(content).info, AdapterSource(folder), pin))
        (self.pinned.add if pin else self.pinned.discard)(content)
        assert self.store.knows(content) and self.store.source(content) == AdapterSource(folder)

    @rule(content=CONTENTS)
    def unload(self, content: str) -> None:
        self.adapters.unload(content)
        self.pinned.discard(content)
        assert not self.store.knows(content) and self.store.source(content) is None
        assert (content in self.held) == (self.users(content) > 0), "only who uses it keeps it"

    @rule(content=CONTENTS)
    def make(self, content: str) -> None:
        self.adapters.publish(weights(content))
        assert self.store.knows(content)

    @rule(folder=FOLDERS, content=st.sampled_from(["a", "b", "c", "d", ""]))
    def change(self, folder: str, content: str) -> None:
        self.reader.folders[folder] = content

    @rule(content=CONTENTS, follows=st.booleans(), n=st.integers(1, 2))
    def submit(self, content: str, follows: bool, n: int) -> None:
        self.requests += 1
        asked = Request(self.requests, (1,), SamplingParams(1), ref(content), n=n, follow=follows)
        if not self.store.knows(content):
            with pytest.raises(InvalidRequest) as e:
                self.adapters.hold(asked)
            assert e.value.code == "model_not_found"
        elif self.adapters.hold(asked):
            assert content in self.held
            assert not self.waiting or self.passed < OVERTAKEN, "whoever waits is overtaken for ever"
            self.passed += bool(self.waiting)
            self.running[asked.id] = asked
        else:
            self.waiting[asked.id] = asked

    @rule(contents=st.lists(CONTENTS, min_size=2, max_size=6))
    def submit_many(self, contents: list[str]) -> None:
        for content in contents:
            self.submit(content, content == "a", 1)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.waiting)))
        self.adapters.cancel(gone)
        self.passed *= gone != min(self.waiting)
        del self.waiting[gone]

    @rule(content=CONTENTS)
    def follow(self, content: str) -> None:
        """A newer version of its name is published. The last one counts."""
        new = ref(content)
        self.follows.pop(new.name, None)
        if self.adapters.can_follow(new):
            self.go_on(new)
        elif self.store.source(content) is not None:
            self.follows[new.name] = new

    def go_on(self, new: AdapterRef) -> None:
        assert new.digest in self.held
        moved = [r for r in self.running.values() if r.follow and r.adapter is not None and r.adapter.name == new.name]
        self.adapters.follow(new, [r.id for r in moved])
        for r in moved:
            assert r.adapter is not None
            if r.adapter.digest != new.digest:
                self.before.setdefault(r.id, set()).add(r.adapter.digest)
                self.before[r.id].discard(new.digest)
            self.running[r.id] = Request(r.id, r.prompt, r.params, new, n=r.n, follow=True)
        for id, r in self.waiting.items():
            if r.follow and r.adapter is not None and r.adapter.name == new.name:
                self.waiting[id] = Request(r.id, r.prompt, r.params, new, n=r.n, follow=True)

    # -- what the engine does

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))

    def end(self, request: int) -> None:
        self.adapters.holds.release(request)
        del self.running[request]
        self.let_go()

    @rule()
    def let_go(self) -> None:
        """Rows go on under the new version: half of the requests that moved have none under the old one."""
        kept = {id: old for id, old in self.before.items() if id % 2 and id in self.running}
        self.adapters.holds.let_go(lambda id: kept.get(id, ()))
        self.before = {id: old for id, old in kept.items() if old}
        assert self.adapters.holds.has_left == bool(self.before)

    @rule(indices=st.lists(st.integers(0, 5), max_size=3))
    def read_and_poll(self, indices: list[int]) -> None:
        for index in indices:
            if self.reader.under_way:
                self.reader.read(index)
        self.poll()

    def poll(self) -> None:
        first, self.done = min(self.waiting, default=0), self.reader.done
        held = {content for content in self.held if self.store.knows(content)}
        arrived = self.adapters.poll()
        for new in arrived.followed:
            assert self.follows.pop(new.name) == new, "an older version is followed"
        for asked in arrived.requests:
            assert asked.adapter is not None and asked.adapter.digest in self.held
            waited = self.waiting.pop(asked.id)
            assert waited == asked
            same = [r for r in self.waiting.values() if r.adapter == asked.adapter and r.id < asked.id]
            assert not same, "who came first for the same adapter runs first"
            self.running[asked.id] = asked
        for answer in arrived.answers:
            self.answered(answer, held)
        later = sum(asked.id > first for asked in arrived.requests)
        self.passed = self.passed + later if first in self.waiting else 0
        for new in arrived.followed:
            self.go_on(new)
        reads = {key.digest for key, _ in self.reader.under_way if isinstance(key, Reread)}
        for new in [f for f in self.follows.values() if f.digest not in reads]:
            assert new.digest not in self.held or new.digest in self.read_again, "nobody follows what is there"
            del self.follows[new.name]  # it was unloaded, or cannot be read

    @property
    def read_again(self) -> set[str]:
        """The contents whose reads the last poll has taken in."""
        return {key.digest for key, _ in self.done if isinstance(key, Reread)}

    def answered(self, answer: m.Outbound, held: set[str]) -> None:
        """Take in an answer of a poll, before which `held` was in memory and known."""
        if isinstance(answer, m.Failed):
            asked = self.waiting.pop(answer.request)
            assert asked.adapter is not None and asked.adapter.label in answer.message
            assert (answer.param, answer.retryable) == ("model", False)
            if answer.code == "model_not_found":
                assert not self.store.knows(asked.adapter.digest)
            else:
                assert answer.code == "adapter_changed"
                assert any(isinstance(key, Reread) and key.digest == asked.adapter.digest for key, _ in self.done), (
                    "it was not even read"
                )
        elif isinstance(answer, m.AdapterLoaded):
            (self.pinned.add if self.called.pop(answer.call) else self.pinned.discard)(answer.info.digest)
            assert self.store.knows(answer.info.digest)
            assert answer.info.digest in self.held or len(self.done) > 1
        else:
            assert isinstance(answer, m.CallFailed) and answer.message == "it is gone"
            del self.called[answer.call]

    def users(self, content: str) -> int:
        now = Counter(r.adapter.digest for r in self.running.values() if r.adapter is not None)
        return now[content] + sum(content in old for old in self.before.values())

    @invariant()
    def nothing_is_lost(self) -> None:
        self.store.check()
        self.slots.check()
        assert self.slots._pinned == self.pinned
        assert self.pinned <= {content for content in NAMES if self.store.knows(content)}
        assert self.adapters.num_waiting == sum(r.n for r in self.waiting.values())
        for content in NAMES:
            assert self.store.users(content) == self.users(content)
            assert content in self.held or not self.users(content)

    def teardown(self) -> None:
        """When every read ends and every request that runs, nobody is left."""
        for _ in range(4 * self.requests + 12):
            for request in list(self.running):
                self.end(request)
            while self.reader.under_way:
                self.reader.read(0)
            self.poll()
        assert not self.waiting and not self.running and not self.called
        assert self.adapters.is_idle and not self.adapters.is_loading
        self.nothing_is_lost()


def test_whoever_waits_runs_or_fails_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OVERTAKEN_FOR_MEMORY", OVERTAKEN)
    run_state_machine_as_test(Engine, settings=settings(max_examples=100, stateful_step_count=50))


def test_who_waits_for_room_is_overtaken_by_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by those that came after it and wait themselves; whoever is first then is overtaken by as many again."""
    monkeypatch.setattr(module, "OVERTAKEN_FOR_MEMORY", OVERTAKEN)
    reader = Reader()
    store = AdapterStore({}, most_bytes=100, most=1)
    adapters = Adapters(store, cast(Any, reader), SlotTable(1))
    for content in "abc":
        adapters.know(m.KnowAdapter(weights(content).info, AdapterSource(f"/{content}")))
    store.put(weights("a"))

    def hold(number: int, content: str) -> bool:
        return adapters.hold(Request(number, (1,), SamplingParams(1), ref(content)))

    def poll() -> list[int]:
        while reader.under_way:
            reader.read(0)
        return [request.id for request in adapters.poll().requests]

    assert hold(1, "a")
    assert not hold(2, "b")
    assert [hold(number, "a") for number in (3, 4, 5)] == [True, True, False]
    assert poll() == [] and not reader.under_way, "5 overtakes 2 no more, though its adapter is there"
    for number in (1, 3, 4):
        adapters.holds.release(number)
    assert poll() == [5] and [source.path for _, source in reader.under_way] == ["/b"], "2 has its room"
    assert poll() == [2]
    assert not hold(6, "c")
    assert [hold(number, "a") for number in (7, 8, 9)] == [True, True, False]
    adapters.cancel(6)
    assert [hold(number, "b") for number in (10, 11, 12)] == [True, True, False], "9 is the first that waits now"
