"""Adapters in the engine's memory: what may be dropped, and that nothing needed ever is."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.adapters.store import MOST_SOURCES, AdapterStore
from mlx_tandem.types import AdapterInfo, AdapterSource

SIZES = {"a": 10, "b": 20, "c": 30, "d": 40, "e": 100}
LIMIT = 65


def weights(digest: str) -> AdapterWeights:
    return AdapterWeights(AdapterInfo(digest, 8, 1.0, "mlx-lm", ("q_proj",), 1, SIZES[digest]), {})


def loaded(store: AdapterStore, *digests: str) -> None:
    for d in digests:
        store.know(d, AdapterSource(f"/{d}"), SIZES[d])
        store.put(weights(d))


def test_the_least_recently_used_goes_first() -> None:
    store = AdapterStore(held := {}, most_bytes=LIMIT)
    loaded(store, "a", "b", "c")
    assert list(held) == ["a", "b", "c"]
    store.acquire("a")
    assert store.release("a") == []
    loaded(store, "d")  # 100 bytes of 65
    assert list(held) == ["a", "d"]
    assert (store.nbytes, store.evictions) == (50, 2)
    assert store.source("b") == AdapterSource("/b")


def test_what_is_forgotten_and_comes_back_stays_and_is_pinned_no_more() -> None:
    """While a request still uses it."""
    for comes_back in (lambda s: loaded(s, "a"), lambda s: s.hold(weights("a"))):
        store = AdapterStore(held := {}, most_bytes=LIMIT)
        store.know("a", AdapterSource("/a"), SIZES["a"], pinned=True)
        store.put(weights("a"))
        store.acquire("a")
        assert store.forget("a") == [] and not store.knows("a")
        comes_back(store)
        assert store.knows("a") and store.release("a") == [] and list(held) == ["a"]
        loaded(store, "b", "d")
        assert list(held) == ["b", "d"], "the least recently used has gone"
        store.check()


def test_the_number_can_be_limited_too() -> None:
    store = AdapterStore(held := {}, most_bytes=1000, most=2)
    loaded(store, "a", "b", "c")
    assert list(held) == ["b", "c"]


def test_what_is_larger_than_the_limit_can_be_used_alone() -> None:
    store = AdapterStore(held := {}, most_bytes=LIMIT)
    store.know("e", AdapterSource("/e"), SIZES["e"])
    assert store.has_room("e")
    loaded(store, "e")
    store.acquire("e")
    store.know("a", AdapterSource("/a"), SIZES["a"])
    assert not store.has_room("a")
    assert store.release("e") == ["e"]
    assert held == {}


def test_what_is_being_read_takes_room() -> None:
    store = AdapterStore({}, most_bytes=LIMIT)
    for d in "abcd":
        store.know(d, AdapterSource(f"/{d}"), SIZES[d])
    assert store.has_room("c", ["a", "b"])
    assert not store.has_room("d", ["a", "b"])


def test_what_is_used_or_being_read_takes_room_of_the_number_too() -> None:
    store = AdapterStore({}, most_bytes=1000, most=3)
    for d in "abcd":
        store.know(d, AdapterSource(f"/{d}"), SIZES[d])
    store.put(weights("a"))
    store.put(weights("b"))
    for d in "ab":
        store.acquire(d)
        assert store.has_room("d") and store.has_room("d", ["c"]) == (d == "a")
    store.put(weights("c"))
    assert store.has_room("d"), "an idle one goes for it"
    store.acquire("c")
    assert not store.has_room("d")


def test_nobody_waits_for_room_that_only_pins_take() -> None:
    store = AdapterStore({}, most_bytes=LIMIT, most=1)
    loaded(store, "a")
    store.know("a", AdapterSource("/a"), SIZES["a"], pinned=True)
    store.know("b", AdapterSource("/b"), SIZES["b"])
    assert store.has_room("b")
    assert not store.has_room("b", ["a"])
    assert store.has_room("b", ["forgotten meanwhile"])


def test_a_pinned_adapter_stays() -> None:
    store = AdapterStore(held := {}, most_bytes=LIMIT)
    loaded(store, "a")
    store.know("a", AdapterSource("/a"), SIZES["a"], pinned=True)
    loaded(store, "b", "d", "c")
    assert "a" in held
    store.know("a", AdapterSource("/a"), SIZES["a"], pinned=False)
    loaded(store, "e")
    assert list(held) == ["e"]


def test_what_was_made_here_stays_until_it_is_somewhere_else() -> None:
    store = AdapterStore(held := {}, most_bytes=LIMIT)
    store.hold(weights("e"))
    loaded(store, "a", "b")
    assert list(held) == ["e", "b"]
    assert store.source("e") is None
    assert store.get("e") is held["e"]
    store.know("e", AdapterSource("/e"), SIZES["e"])
    loaded(store, "a")
    assert "e" not in held
    assert store.knows("e")
    store.hold(weights("d"))
    assert store.forget("d") == ["d"]
    assert "d" not in held
    assert not store.knows("d")


def test_released_too_often() -> None:
    store = AdapterStore({}, most_bytes=LIMIT)
    loaded(store, "a")
    with pytest.raises(AssertionError):
        store.release("a")


def test_of_several_folders_the_latest_is_read_and_a_wrong_one_no_more() -> None:
    store = AdapterStore({}, most_bytes=LIMIT)
    folders = [AdapterSource(f"/{i}") for i in range(MOST_SOURCES + 2)]
    for folder in folders:
        store.know("a", folder, SIZES["a"])
        assert store.source("a") == folder
    store.know("a", folders[4], SIZES["a"])
    assert store.source("a") == folders[4], "it was named last"
    left = [folders[4], *reversed(folders[5:]), *reversed(folders[2:4])][:MOST_SOURCES]
    for wrong, other in pairwise(left):
        assert store.other_source("a", wrong) == store.source("a") == other
    assert store.other_source("a", left[-1]) is None
    assert store.source("a") == left[-1], "it may be there again later"


class Store(RuleBasedStateMachine):
    """Against a plain account of users: what is used or pinned is in memory, and the limit holds for the rest, of which
    those that were used or loaded the longest ago have gone, and no more than had to."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, AdapterWeights] = {}
        self.store = AdapterStore(self.held, most_bytes=LIMIT)
        self.users: Counter[str] = Counter()
        self.pinned: set[str] = set()
        self.forgotten: set[str] = set()
        self.only_here: set[str] = set()  # no folder has it
        self.order: list[str] = []  # the contents, the one that was used or loaded last at the end

    digests = st.sampled_from(sorted(SIZES))

    def touch(self, d: str, dropped: list[str], before: set[str], keep: bool = True) -> None:
        """Content `d` was used or loaded, and `dropped` has left memory, which would hold `before` otherwise."""
        self.order = [*(x for x in self.order if x != d), d]
        needed = set(+self.users) | self.pinned | self.only_here
        left, expected = before, []
        for each in self.order:
            if sum(SIZES[x] for x in left) > LIMIT and each in left and each not in needed and not (keep and each == d):
                left = left - {each}
                expected.append(each)
        assert dropped == expected
        assert set(self.held) == left

    @rule(d=digests, pinned=st.booleans())
    def load(self, d: str, pinned: bool) -> None:
        self.forgotten.discard(d)
        self.only_here.discard(d)
        (self.pinned.add if pinned else self.pinned.discard)(d)
        before = {*self.held, d}
        dropped = self.store.know(d, AdapterSource(f"/{d}"), SIZES[d], pinned)
        self.touch(d, dropped + self.store.put(weights(d)), before)

    @rule(d=digests)
    def make(self, d: str) -> None:
        before = {*self.held, d}
        if d not in self.held and self.store.source(d) is None:
            self.only_here.add(d)
        self.forgotten.discard(d)
        self.touch(d, self.store.hold(weights(d)), before)

    @rule(d=digests)
    def save(self, d: str) -> None:
        """What was made is in a folder now."""
        if self.store.knows(d):
            self.only_here.discard(d)
            before = set(self.held)
            self.touch(d, self.store.know(d, AdapterSource(f"/{d}"), SIZES[d], d in self.pinned), before)

    @rule(d=digests)
    def use(self, d: str) -> None:
        if self.store.get(d) is not None:
            self.store.acquire(d)
            self.users[d] += 1

    @precondition(lambda self: +self.users)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        d = data.draw(st.sampled_from(sorted(+self.users)))
        before = set(self.held)
        dropped = self.store.release(d)
        self.users[d] -= 1
        if d in self.forgotten and not self.users[d]:
            self.only_here.discard(d)
            assert dropped == [d]
        else:
            self.touch(d, dropped, before, keep=False)

    @rule(d=digests)
    def forget(self, d: str) -> None:
        self.store.forget(d)
        self.pinned.discard(d)
        self.forgotten.add(d)
        if not self.users[d]:
            self.only_here.discard(d)

    @invariant()
    def holds(self) -> None:
        self.store.check()
        needed = set(+self.users) | self.pinned | self.only_here
        assert needed <= set(self.held)
        spare = [d for d in self.held if d not in needed]
        assert sum(SIZES[d] for d in self.held) <= LIMIT or len(spare) <= 1
        for d in self.forgotten:
            assert self.store.source(d) is self.store.get(d) is None
            assert self.users[d] or d not in self.held
        assert all(self.store.knows(d) == (d not in self.forgotten) for d in self.held)


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=200, stateful_step_count=30)
