"""Writes to blocks that wait for the next plans: copies of other blocks, contents from the drive, and scrubs."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_tandem.engine.plan import Bytes, Tables
from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.pool import SCRATCH, BlockPool


class BlockWrites:
    """The writes for the next plans, in the blocks of all groups.

    Attributes:
        copies: For the next plan: to block → from block.
    """

    def __init__(self, groups: Iterable[CacheGroup]):
        self.copies: dict[int, int] = {}
        self._groups = tuple(groups)
        self._loads: dict[int, Bytes] = {}  # by the block to write
        self._unclean: set[int] = set()  # blocks that may hold values that are not finite

    def copy(self, source: int, target: int) -> None:
        """Let the next plan copy a block. A copy of a block that is itself a target comes from that one's source."""
        self.copies[target] = self.copies.get(source, source)

    def load(self, block: int, content: Bytes) -> None:
        """Let one of the next plans write bytes from the drive into a block."""
        self._loads[block] = content

    def scrub(self, blocks: Iterable[int]) -> None:
        """Let the next plan clean those of these blocks that are free.

        A block that has a new owner already makes that owner fail too, and is passed here again then.
        """
        self._unclean |= {b for b in blocks if b != SCRATCH and not self._pool_of(b).count[b]}

    def scrub_vacant(self, group: CacheGroup, blocks: Iterable[int]) -> None:
        """Let the next plan clean those of a group's blocks that are free and that nobody can find."""
        self._unclean |= {b for b in blocks if group.pool.is_vacant(b)}

    def forget_copies(self, table: Iterable[int]) -> None:
        """Drop the copies into blocks that are given back: they would overwrite the content of the next owner."""
        for b in table:
            self.copies.pop(b, None)

    def forget_loads(self, tables: Tables) -> None:
        """Drop the loads of those blocks in these tables that nobody holds any more."""
        for b in (b for table in tables for b in table) if self._loads else ():
            if not self._pool_of(b).count[b]:
                self._loads.pop(b, None)

    def distrust(self) -> None:
        """Forget which blocks are unclean, since the runner starts again from an empty cache."""
        self._unclean = set()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the copies (from block, to block) for the plan that is being made.

        Stale values of a block are masked, but NaN survives a mask: blocks that may hold NaN are overwritten with the
        scratch block.
        """
        scrubs = [(self._pool_of(b).scratch, b) for b in sorted(self._unclean - self.copies.keys())]
        copies = (*scrubs, *((a, b) for b, a in self.copies.items()))
        self.copies, self._unclean = {}, set()
        return copies

    def take_loads(self, most: int) -> tuple[tuple[int, Bytes], ...]:
        """Return loads (block, its bytes) of at most `most` bytes, or one, for the plan that is being made."""
        loads: list[tuple[int, Bytes]] = []
        size = 0
        for block, content in self._loads.items():
            size += len(content)
            if loads and size > most:
                break
            loads.append((block, content))
        for block, _ in loads:
            del self._loads[block]
        return tuple(loads)

    def is_loading(self, tables: Tables) -> bool:
        """Return whether any block in these tables has contents that no plan has loaded yet."""
        return not all(self._loads.keys().isdisjoint(table) for table in tables)

    @property
    def has_loads(self) -> bool:
        """Whether any block waits to be loaded."""
        return bool(self._loads)

    def check(self) -> None:
        """Assert the invariants; for tests, between steps."""
        assert all(self._pool_of(b).count[b] for b in self._loads), "what nobody holds is loaded"

    def _pool_of(self, block: int) -> BlockPool:
        """Return the pool that a block belongs to."""
        return next(group.pool for group in self._groups if block < len(group.pool.count))
