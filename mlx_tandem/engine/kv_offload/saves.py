"""Saves: which blocks of the pools go to the drive.

A block is saved when the pool gives it out again, a little earlier where there is time, or as soon as it is full
(`write_through`). The number of blocks that a step reads for the drive is limited; blocks beyond it are not saved, and
are counted.

Where several cache groups have a block for the same tokens, one record on the drive combines them. It can be saved
while all of them can be found. A state is a record of its own (`forms.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from mlx_tandem.engine.kv_offload.drive import Link
from mlx_tandem.engine.kv_offload.forms import RecordForm
from mlx_tandem.kv.disk.records import Payload
from mlx_tandem.kv.pool import SCRATCH, BlockPool
from mlx_tandem.kv.prefix import Entry, PrefixCache

_AHEAD = 256
"""Number of the blocks to be given out next that each step considers for saving while few blocks are vacant."""


@dataclass(frozen=True, slots=True)
class _Save:
    """A record to be saved: its form, its entry, and the block of each of its pools that holds the content."""

    form: RecordForm
    entry: Entry
    blocks: tuple[int, ...]

    @property
    def key(self) -> bytes:
        """The key of the record."""
        return _key(self.form, self.entry)


def _key(form: RecordForm, entry: Entry) -> bytes:
    """Return the key of the record of a full block."""
    assert entry.key is not None
    return form.key(entry.key)


class KVSaves:
    """The blocks on their way to the drive.

    What is saved under an id is what the block held while it could be found by that id.
    """

    def __init__(self, link: Link, pools: Sequence[BlockPool], caches: Sequence[PrefixCache], *, write_through: bool):
        self._link = link
        self._pools = pools
        self._caches = caches
        self._write_through = write_through
        self._evicted: dict[bytes, _Save] = {}  # by key: saved in the next plan, or never
        self._wanted: dict[bytes, tuple[RecordForm, Entry]] = {}  # by key: saved in some plan, while they can be found
        self._offered: dict[int, Entry] = {}  # by block: entries that were saved ahead, which happens once
        # Saves of each plan in flight, with the number of their blocks; None: spoilt.
        self._flights: deque[list[tuple[int, _Save | None]]] = deque()
        self._under_way: set[bytes] = set()  # keys of the saves in flight
        self.unsaved = 0  # records whose blocks were given out before they could be saved
        self._forms = {i: form for form in link.forms for i in form.groups}
        for i, form in self._forms.items():
            caches[i].on_fill = partial(self._on_fill, form)
            caches[i].on_evict = partial(self._on_evict, form)

    @property
    def is_saving(self) -> bool:
        """Whether blocks are on their way to the drive or can be sent now."""
        drive = self._link.drive
        if drive is None:
            return False
        if self._flights:
            return True
        waiting = [form for form, _ in self._wanted.values()] + [save.form for save in self._evicted.values()]
        return any(drive.room(form.nbytes) > 0 for form in self._link.forms if form in waiting)

    @property
    def has_unsaved(self) -> bool:
        """Whether there are blocks to be saved, even if the drive accepts none now."""
        return bool(self._wanted or self._flights)

    def save_all(self) -> None:
        """Mark every record that the drive lacks, and whose content can be found, to be saved.

        With states, the newest states come first, each after the blocks that lead to it. Other blocks are not saved,
        since they cannot be used without a state.
        """
        if self._link.drive is None:
            return
        blocks, states = self._link.blocks, self._link.states
        if not states.nbytes:
            self._want(blocks, self._caches[blocks.groups[-1]].entries())
            return
        find = self._caches[blocks.groups[-1]].found if blocks.nbytes else lambda key: None
        seen: set[bytes | None] = set()
        for state in reversed(self._caches[states.groups[-1]].entries()):
            path: list[Entry] = []
            entry = find(state.key)
            while entry is not None and entry.key not in seen:
                seen.add(entry.key)
                path.append(entry)
                entry = find(entry.parent)
            self._want(blocks, reversed(path))
            self._want(states, (state,))

    def take(self) -> tuple[int, ...]:
        """Return the blocks that the plan that is being made should read for the drive."""
        if self._link.drive is None:
            return ()
        self._look_ahead()
        if not (self._evicted or self._wanted):
            return ()
        evicted, self._evicted = list(self._evicted.values()), {}
        chosen: list[_Save] = []
        for form in self._link.forms:
            room = self._room(form, chosen)
            own = [save for save in evicted if save.form is form]
            # The end of a sequence is evicted before its beginning, which is worth more: the last ones are kept.
            saves = own[max(len(own) - room, 0) :]
            self.unsaved += len(own) - len(saves)
            for key in [k for k, (f, _) in self._wanted.items() if f is form] if len(saves) < room else ():
                found = self._found(*self._wanted.pop(key))
                if found is not None:
                    saves.append(found)
                    if len(saves) == room:
                        break
            chosen += saves
        if chosen:
            self._flights.append([(len(save.blocks), save) for save in chosen])
            self._under_way |= {save.key for save in chosen}
        return tuple(block for save in chosen for block in save.blocks)

    def saved(self, payloads: Iterable[Payload]) -> None:
        """Hand the contents of the blocks of the oldest plan with saves to the drive."""
        assert self._link.drive is not None
        each = iter(payloads)
        for blocks, save in self._flights.popleft():
            parts = [next(each) for _ in range(blocks)]
            if save is not None:
                self._under_way.discard(save.key)
                entry = save.entry
                assert entry.key is not None
                record = self._link.id(save.form, entry.namespace, entry.parent, entry.key, entry.tokens)
                self._link.drive.put(record, parts[0] if len(parts) == 1 else b"".join(parts))

    def spoil(self, blocks: set[int]) -> None:
        """Do not save blocks that may hold values that are not finite."""
        self._evicted = {key: s for key, s in self._evicted.items() if blocks.isdisjoint(s.blocks)}
        self._wanted = {key: (form, e) for key, (form, e) in self._wanted.items() if e.block not in blocks}
        for flight in self._flights:
            spoilt = {s.key for _, s in flight if s is not None and not blocks.isdisjoint(s.blocks)}
            self._under_way -= spoilt
            flight[:] = [(n, None if s is None or s.key in spoilt else s) for n, s in flight]

    def distrust(self) -> None:
        """Save nothing of what is in the pools now, since it cannot be trusted."""
        self._evicted, self._wanted, self._flights, self._under_way = {}, {}, deque(), set()

    def _room(self, form: RecordForm, chosen: Sequence[_Save]) -> int:
        """Return how many records of a form the next plan may save besides those that are `chosen`."""
        assert self._link.drive is not None
        ahead = [*chosen, *(save for flight in self._flights for _, save in flight if save is not None)]
        taken = max(len(ahead), -(-sum(save.form.nbytes for save in ahead) // form.nbytes))
        most = max(1, self._link.step_bytes // form.nbytes)
        return max(0, min(most, self._link.drive.room(form.nbytes) - taken))

    def _look_ahead(self) -> None:
        """Mark blocks that will be given out soon to be saved, each entry once."""
        for i, form in self._forms.items():
            pool, cache = self._pools[i], self._caches[i]
            for block in pool.oldest(_AHEAD) if pool.vacant_blocks < pool.num_blocks // 8 else ():
                entry = cache.entry(block)
                if entry is not None and self._offered.get(block) is not entry and self._lacks(form, entry):
                    self._wanted[_key(form, entry)] = form, entry
                    self._offered[block] = entry

    def _want(self, form: RecordForm, entries: Iterable[Entry]) -> None:
        """Mark full blocks that the drive lacks to be saved."""
        if form.nbytes:
            self._wanted |= {_key(form, e): (form, e) for e in entries if self._lacks(form, e)}

    def _on_fill(self, form: RecordForm, entry: Entry) -> None:
        """Mark a block that has become full to be saved, with `write_through`."""
        if self._write_through:
            self._want(form, (entry,))

    def _on_evict(self, form: RecordForm, entry: Entry) -> None:
        """Mark a block that is being given out to be saved in the next plan, before it is overwritten."""
        self._wanted.pop(_key(form, entry), None)
        found = self._found(form, entry, entry.block)
        if found is not None:
            self._evicted[found.key] = found

    def _found(self, form: RecordForm, entry: Entry, going: int = SCRATCH) -> _Save | None:
        """Return the save of an entry if the drive lacks it and all pools of the form still have it.

        `going`: a block that cannot be found any more but still holds the content.
        """
        if not self._lacks(form, entry):
            return None
        blocks = []
        for i in form.groups:
            found = self._caches[i].found(entry.key)
            blocks.append(going if self._pools[i].has(going) else SCRATCH if found is None else found.block)
        return None if SCRATCH in blocks else _Save(form, entry, tuple(blocks))

    def _lacks(self, form: RecordForm, entry: Entry) -> bool:
        """Return whether the drive lacks a whole block that is not on its way there."""
        if self._link.drive is None or entry.key is None:
            return False
        key = form.key(entry.key)
        return key not in self._under_way and not self._link.drive.longest((key,))
