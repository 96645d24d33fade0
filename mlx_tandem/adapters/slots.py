"""The engine's table of slots: which adapter lies where in the stacked arrays on the device.

Plain data, no arrays: the table says what to upload, and the runner uploads it. Slot 0 is the base model and is
never given out. A slot that any running sequence uses is never given to another adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """The slot that holds an adapter from now on."""

    slot: int
    upload: bool  # whether its content must be written before the next step
    evicted: str | None = None  # digest of the adapter that the write replaces


@dataclass
class _Resident:
    slot: int
    references: int = 0
    doomed: bool = False  # to be dropped when the last reference ends


class SlotTable:
    """A table of `n` slots, numbered 1 to n, which running sequences share through reference counts."""

    def __init__(self, n: int) -> None:
        if n < 0:
            raise ValueError("the number of slots cannot be negative")
        self.n = n
        self._free = list(range(n, 0, -1))  # the lowest is taken first
        self._used: dict[str, _Resident] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # unreferenced residents, least recently used first
        self._pinned: set[str] = set()

    def acquire(self, digest: str) -> Assignment | None:
        """Add a reference to `digest` and return its slot; return None and change nothing if others use every slot.

        A resident adapter keeps its slot. Another one gets a free slot, or that of the adapter whose last reference
        ended the longest ago; a pinned one loses its slot only if all others are in use or pinned, too.
        """
        resident = self._used.get(digest)
        if resident is not None:
            resident.references += 1
            resident.doomed = False  # it is asked for again and may stay
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
        """End one reference. Return the slot's number if that frees the slot of a forgotten adapter, else None."""
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
        """Unload `digest` now and return its freed slot, or return None and unload it when its last reference ends."""
        resident = self._used.get(digest)
        if resident is None:
            return None
        if resident.references:
            resident.doomed = True
            return None
        del self._idle[digest]
        return self._drop(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Set whether `digest`, wherever it is now, is the last to lose a slot."""
        (self._pinned.add if pinned else self._pinned.discard)(digest)

    def lost(self, digest: str) -> int | None:
        """Free the slot of `digest`, whose upload failed, and end all its references; return the slot if it had one."""
        if digest not in self._used:
            return None
        self._idle.pop(digest, None)
        return self._drop(digest)

    def slot(self, digest: str) -> int | None:
        """Return the slot of `digest`, None if it has none."""
        resident = self._used.get(digest)
        return None if resident is None else resident.slot

    def references(self, digest: str) -> int:
        """Return how many references `digest` has."""
        resident = self._used.get(digest)
        return 0 if resident is None else resident.references

    def residents(self) -> tuple[str, ...]:
        """Return the digests on the device, in slot order."""
        return tuple(sorted(self._used, key=lambda d: self._used[d].slot))

    def available(self) -> int:
        """Return how many adapters that are not resident could be acquired now."""
        return len(self._free) + len(self._idle)

    def check(self) -> None:
        """Raise AssertionError unless the table is consistent. For tests and for the engine's own watch."""
        slots = [r.slot for r in self._used.values()]
        assert sorted(slots + self._free) == list(range(1, self.n + 1)), "every slot is free or used, once"
        assert set(self._idle) == {d for d, r in self._used.items() if not r.references}, "idle is unreferenced"
        assert not any(r.doomed for r in self._used.values() if not r.references), "forgotten and idle"

    def _drop(self, digest: str) -> int:
        slot = self._used.pop(digest).slot
        self._free.append(slot)
        return slot
