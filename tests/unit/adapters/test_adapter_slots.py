"""Slots: a state machine against a simple model of what they promise."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_tandem.adapters.slots import Assignment, SlotTable

DIGESTS = st.sampled_from("abcde")


class Slots(RuleBasedStateMachine):
    @initialize(n=st.integers(0, 3))
    def start(self, n: int) -> None:
        self.table = SlotTable(n)
        self.n = n
        self.device: dict[int, str] = {}  # what uploads have written
        self.running: dict[int, tuple[str, int]] = {}  # sequence -> (digest, slot)
        self.forgotten: set[str] = set()  # and not asked for since
        self.idle: list[str] = []  # in order of their last release
        self.pinned: set[str] = set()
        self.next = 0

    def users(self, digest: str) -> int:
        return sum(d == digest for d, _ in self.running.values())

    @rule(digest=DIGESTS)
    def acquire(self, digest: str) -> None:
        before = self.table.slot(digest)
        busy = {d for d, _ in self.running.values()}
        got = self.table.acquire(digest)
        if got is None:
            assert before is None and len(busy) == self.n
            return
        assert 1 <= got.slot <= self.n
        assert got.upload == (before is None)
        if not got.upload:
            assert got.slot == before and got.evicted is None
        else:
            assert all(slot != got.slot for _, slot in self.running.values()), "a slot in use was given away"
            if got.evicted is not None:
                others = [d for d in self.idle if d not in self.pinned] or self.idle
                assert got.evicted == others[0], "not the least recently used, and pinned ones last"
                assert len(self.device) == self.n
            self.idle = [d for d in self.idle if d != got.evicted]
            self.device[got.slot] = digest
        self.idle = [d for d in self.idle if d != digest]
        self.forgotten.discard(digest)
        self.running[self.next] = (digest, got.slot)
        self.next += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        digest, slot = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        freed = self.table.release(digest)
        if self.users(digest):
            assert freed is None
        elif digest in self.forgotten:
            assert freed == slot
            self.forgotten.discard(digest)
            del self.device[slot]
        else:
            assert freed is None
            self.idle.append(digest)

    @rule(digest=DIGESTS)
    def forget(self, digest: str) -> None:
        slot = self.table.slot(digest)
        freed = self.table.forget(digest)
        if slot is None:
            assert freed is None
        elif self.users(digest):
            assert freed is None
            self.forgotten.add(digest)
        else:
            assert freed == slot
            del self.device[slot]
            self.idle.remove(digest)

    @rule(digest=DIGESTS, pinned=st.booleans())
    def pin(self, digest: str, pinned: bool) -> None:
        self.table.pin(digest, pinned)
        (self.pinned.add if pinned else self.pinned.discard)(digest)

    @rule(digest=DIGESTS)
    def lose(self, digest: str) -> None:
        """Its upload failed: whoever was to run under it does not."""
        slot = self.table.slot(digest)
        assert self.table.lost(digest) == slot
        self.running = {s: (d, at) for s, (d, at) in self.running.items() if d != digest}
        self.forgotten.discard(digest)
        self.idle = [d for d in self.idle if d != digest]
        if slot is not None:
            del self.device[slot]

    @rule(digest=DIGESTS)
    def release_what_nobody_has(self, digest: str) -> None:
        if not self.users(digest):
            with pytest.raises(ValueError):
                self.table.release(digest)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        for digest, slot in self.running.values():
            assert self.device[slot] == digest, "a running sequence's slot holds another adapter"
            assert self.table.slot(digest) == slot
            assert self.table.references(digest) == self.users(digest)
        assert set(self.table.residents()) == set(self.device.values())
        assert self.table.available() == self.n - len({d for d, _ in self.running.values()})


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=200, stateful_step_count=50)


def test_a_pinned_adapter_is_the_last_to_lose_its_slot() -> None:
    table = SlotTable(2)
    for digest in "ab":
        table.acquire(digest)
        table.release(digest)
    table.pin("a", True)
    for digest, evicted in (("c", "b"), ("d", "c")):
        got = table.acquire(digest)
        assert got is not None and got.evicted == evicted, "though the pinned one was used before"
        table.release(digest)
    table.pin("d", True)
    got = table.acquire("e")
    assert got is not None and got.evicted == "a", "of pinned ones the one that was used the longest ago"
    table.pin("d", False)
    assert table.acquire("f") == Assignment(2, upload=True, evicted="d")


def test_what_is_asked_for_again_after_it_was_forgotten_keeps_its_slot() -> None:
    table = SlotTable(1)
    table.acquire("a")
    assert table.forget("a") is None, "it is in use"
    table.acquire("a")
    assert (table.release("a"), table.release("a"), table.slot("a")) == (None, None, 1)
    assert table.acquire("a") == Assignment(1, upload=False)


def test_no_slots() -> None:
    assert SlotTable(0).acquire("a") is None
    with pytest.raises(ValueError):
        SlotTable(-1)
