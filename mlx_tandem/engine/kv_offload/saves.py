"""Saves: which blocks of the pools go to the drive.

A block is saved when the pool gives it out again, a little earlier where there is time, or as soon as it is full
(`write_through`). The number of blocks that a step reads for the drive is limited; blocks beyond it are not saved, and
are counted.

Where a model has several cache groups, a block on the drive combines one block of each group, for the same tokens. It
can be saved while all of them can be found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_tandem.engine.kv_offload.drive import Link
from mlx_tandem.kv.disk.records import Payload
from mlx_tandem.kv.pool import SCRATCH, BlockPool
from mlx_tandem.kv.prefix import Entry, PrefixCache

_AHEAD = 256
"""Number of the blocks to be given out next that each step considers for saving while few blocks are vacant."""


@dataclass(frozen=True, slots=True)
class _Save:
    """A block to be saved: its entry, and the block of each pool that holds the content."""

    entry: Entry
    blocks: tuple[int, ...]


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
        self._wanted: dict[bytes, Entry] = {}  # by key: saved in some plan, while they can be found
        self._offered: dict[int, Entry] = {}  # by block: entries that were saved ahead, which happens once
        self._flights: deque[list[_Save | None]] = deque()  # saves of each plan in flight; None: spoilt
        self._under_way: set[bytes] = set()  # keys of the saves in flight
        self.unsaved = 0  # blocks that were given out before they could be saved
        for cache in caches:
            cache.on_fill, cache.on_evict = self._on_fill, self._on_evict

    @property
    def is_saving(self) -> bool:
        """Whether blocks are on their way to the drive or can be sent now."""
        if self._link.drive is None or not (self._wanted or self._evicted or self._flights):
            return False
        return bool(self._flights) or self._link.drive.room(self._link.block_bytes) > 0

    @property
    def has_unsaved(self) -> bool:
        """Whether there are blocks to be saved, even if the drive accepts none now."""
        return bool(self._wanted or self._flights)

    def save_all(self) -> None:
        """Mark all whole blocks that can be found, and that the drive lacks, to be saved."""
        if self._link.drive is not None:
            self._wanted |= {e.key: e for e in self._caches[-1].entries() if e.key and self._lacks(e)}

    def take(self) -> tuple[int, ...]:
        """Return the blocks that the plan that is being made should read for the drive."""
        if self._link.drive is None:
            return ()
        self._look_ahead()
        if not (self._evicted or self._wanted):
            return ()
        on_the_way = sum(map(len, self._flights))
        room = max(0, min(self._link.step_blocks, self._link.drive.room(self._link.block_bytes) - on_the_way))
        evicted, self._evicted = list(self._evicted.values()), {}
        # The end of a sequence is evicted before its beginning, which is worth more: the last ones are kept.
        chosen = evicted[max(len(evicted) - room, 0) :]
        self.unsaved += len(evicted) - len(chosen)
        for key in list(self._wanted) if len(chosen) < room else ():
            found = self._found(self._wanted.pop(key))
            if found is not None:
                chosen.append(found)
                if len(chosen) == room:
                    break
        if chosen:
            self._flights.append(list(chosen))
            self._under_way |= {save.entry.key for save in chosen if save.entry.key is not None}
        return tuple(block for save in chosen for block in save.blocks)

    def saved(self, payloads: Iterable[Payload]) -> None:
        """Hand the contents of the blocks of the oldest plan with saves to the drive."""
        assert self._link.drive is not None
        each = iter(payloads)
        for save in self._flights.popleft():
            parts = [next(each) for _ in self._pools]
            if save is not None:
                entry = save.entry
                assert entry.key is not None
                self._under_way.discard(entry.key)
                payload = parts[0] if len(parts) == 1 else b"".join(parts)
                self._link.drive.put(self._link.id(entry.namespace, entry.parent, entry.key, entry.tokens), payload)

    def spoil(self, blocks: set[int]) -> None:
        """Do not save blocks that may hold values that are not finite."""
        self._evicted = {key: s for key, s in self._evicted.items() if blocks.isdisjoint(s.blocks)}
        self._wanted = {key: e for key, e in self._wanted.items() if e.block not in blocks}
        for flight in self._flights:
            spoilt = {s.entry.key: s for s in flight if s is not None and not blocks.isdisjoint(s.blocks)}
            self._under_way -= spoilt.keys()
            flight[:] = [None if s is None or s.entry.key in spoilt else s for s in flight]

    def distrust(self) -> None:
        """Save nothing of what is in the pools now, since it cannot be trusted."""
        self._evicted, self._wanted, self._flights, self._under_way = {}, {}, deque(), set()

    def _look_ahead(self) -> None:
        """Mark blocks that will be given out soon to be saved, each entry once."""
        for pool, cache in zip(self._pools, self._caches, strict=True):
            for block in pool.oldest(_AHEAD) if pool.vacant_blocks < pool.num_blocks // 8 else ():
                entry = cache.entry(block)
                if entry is not None and self._offered.get(block) is not entry and self._lacks(entry):
                    assert entry.key is not None
                    self._wanted[entry.key] = self._offered[block] = entry

    def _on_fill(self, entry: Entry) -> None:
        """Mark a block that has become full to be saved, with `write_through`."""
        if self._write_through and self._lacks(entry):
            assert entry.key is not None
            self._wanted[entry.key] = entry

    def _on_evict(self, entry: Entry) -> None:
        """Mark a block that is being given out to be saved in the next plan, before it is overwritten."""
        assert entry.key is not None
        self._wanted.pop(entry.key, None)
        found = self._found(entry, entry.block)
        if found is not None:
            self._evicted[entry.key] = found

    def _found(self, entry: Entry, going: int = SCRATCH) -> _Save | None:
        """Return the save of an entry if the drive lacks it and all pools still have it.

        `going`: a block that cannot be found any more but still holds the content.
        """
        if not self._lacks(entry):
            return None
        assert entry.key is not None
        blocks = [
            going if pool.has(going) else cache.holder(entry.key) or SCRATCH
            for pool, cache in zip(self._pools, self._caches, strict=True)
        ]
        return None if SCRATCH in blocks else _Save(entry, tuple(blocks))

    def _lacks(self, entry: Entry) -> bool:
        """Return whether the drive lacks a whole block that is not on its way there."""
        if self._link.drive is None or entry.key is None or entry.key in self._under_way:
            return False
        return not self._link.drive.longest((entry.key,))
