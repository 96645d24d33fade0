"""The engine's book of slots: which adapter lies where in the stacked arrays on the device.

Plain data, no arrays: it says what to upload, the runner uploads. Slot 0 is the base model and never given out.
A slot that any running sequence uses is never given to another adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """`slot` holds the adapter from now on. `upload`: its content is not there yet, so write it before the step.
    `evicted`: the digest whose content that write replaces."""

    slot: int
    upload: bool
    evicted: str | None = None


@dataclass
class _Resident:
    slot: int
    references: int = 0
    doomed: bool = False  # forgotten while in use


class SlotTable:
    """`n` slots, numbered 1 to n, shared by running sequences through reference counts."""

    def __init__(self, n: int) -> None:
        if n < 0:
            raise ValueError("the number of slots cannot be negative")
        self.n = n
        self._free = list(range(n, 0, -1))  # the lowest is taken first
        self._used: dict[str, _Resident] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # unreferenced residents, least recently used first
        self._pinned: set[str] = set()

    def acquire(self, digest: str) -> Assignment | None:
        """One more reference to `digest`; None, and nothing changed, when every slot is in use by others.

        A resident adapter keeps its slot. Otherwise it gets a free one, or that of the adapter whose last
        reference was given back the longest ago; a pinned one only when all others are in use or pinned, too.
        """
        resident = self._used.get(digest)
        if resident is not None:
            resident.references += 1
            resident.doomed = False  # asked for again: it may stay
            self._idle.pop(digest, None)
            return Assignment(resident.slot, upload=False)
        evicted = None
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            evicted = next((d for d in self._idle if d not in self._pinned), None) or next(iter(self._idle))
            del self._idle[evicted]
            slot = self._used.pop(evicted).slot
        else:
            return None
        self._used[digest] = _Resident(slot, references=1)
        return Assignment(slot, upload=True, evicted=evicted)

    def release(self, digest: str) -> int | None:
        """Give one reference back. The slot number when that frees the slot of a forgotten adapter, else None."""
        resident = self._used.get(digest)
        if resident is None or not resident.references:
            raise ValueError("released more often than acquired")
        resident.references -= 1
        if resident.references:
            return None
        if resident.doomed:
            return self._drop(digest)
        self._idle[digest] = None
        return None

    def forget(self, digest: str) -> int | None:
        """Unload `digest`: at once, then its freed slot number is returned, or when its last reference ends."""
        resident = self._used.get(digest)
        if resident is None:
            return None
        if resident.references:
            resident.doomed = True
            return None
        del self._idle[digest]
        return self._drop(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Whether `digest`, wherever it is now, shall be the last to lose a slot."""
        (self._pinned.add if pinned else self._pinned.discard)(digest)

    def lost(self, digest: str) -> int | None:
        """The content of the slot is not (or no longer) what it should be: an upload failed. The caller's
        references end with this; the slot number when there was one."""
        if digest not in self._used:
            return None
        self._idle.pop(digest, None)
        return self._drop(digest)

    def slot(self, digest: str) -> int | None:
        """Where `digest` lies, if anywhere."""
        resident = self._used.get(digest)
        return None if resident is None else resident.slot

    def references(self, digest: str) -> int:
        resident = self._used.get(digest)
        return 0 if resident is None else resident.references

    def residents(self) -> tuple[str, ...]:
        """The digests on the device, in slot order."""
        return tuple(sorted(self._used, key=lambda d: self._used[d].slot))

    def available(self) -> int:
        """How many adapters that are not resident could be acquired now."""
        return len(self._free) + len(self._idle)

    def check(self) -> None:
        """Raise AssertionError unless the books agree. For tests and for the engine's own watch."""
        slots = [r.slot for r in self._used.values()]
        assert sorted(slots + self._free) == list(range(1, self.n + 1)), "every slot is free or used, once"
        assert set(self._idle) == {d for d, r in self._used.items() if not r.references}, "idle is unreferenced"
        assert not any(r.doomed for r in self._used.values() if not r.references), "forgotten and idle"

    def _drop(self, digest: str) -> int:
        slot = self._used.pop(digest).slot
        self._free.append(slot)
        return slot
