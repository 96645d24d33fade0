"""Cache groups: layers of a model that cache a sequence in the same way.

Each group has its own pool of blocks, and a sequence has a table of blocks in each group. A block stands for
`pool.block_size` positions, whatever the group stores for them. Callers loop over the groups and depend on neither
their number nor their kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.groups.state import StateGroup
from mlx_tandem.kv.groups.table import Table
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.pool import BlockPool, Window
from mlx_tandem.types import MemoryBudget


class CacheGroup(Protocol):
    """The rules by which sequences take and give back blocks in one group.

    A table is immutable: a method that changes one returns a new table. SCRATCH in a table stands for a block that was
    given back.
    """

    pool: BlockPool
    block_bytes: int
    divides: bool
    """Whether a block holds data for each of its tokens, so that another sequence can use only its first tokens."""
    keeps_all: bool
    """Whether a sequence needs all of its blocks for as long as it runs."""

    snapshots: bool
    """Whether a sequence keeps the blocks at chosen boundaries only, and gives the others back at every step."""

    most_drafts: int
    """Most drafts that one row may verify."""

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence that fits when no other runs."""

    def first_needed(self, position: int) -> int:
        """Return the first block of a sequence that is still needed when all before `position` is computed."""

    def end_at_begin(self, known: int, tokens: int) -> int:
        """Return the number of the first block that a sequence does not get when it begins.

        The sequence has `tokens` tokens, of which `known` are computed.
        """

    def room(self, table: Table) -> int:
        """Return how many positions a table has blocks for."""

    def lacks(self, table: Table, positions: int) -> int:
        """Return how many blocks `take` would add."""

    def take(self, table: Table, positions: int) -> Table:
        """Return the table with blocks for so many positions. The pool must have the blocks that the table lacks."""

    def copy(self, table: Table, positions: int) -> tuple[Table, tuple[int, int] | None]:
        """Return the table of another sequence that continues after the first `positions` of this one.

        Whole blocks are shared. The second value is (from block, to block) where a block has to be copied, else None.
        The pool must have a free block.
        """

    def give_back(self, table: Table, computed: int, kept: Collection[int] = ()) -> tuple[Table, Table]:
        """Return the table without the blocks that no position from `computed` on needs, and these blocks.

        The caller releases them. A group with `snapshots` leaves the blocks in the table that end at the boundaries
        `kept`, which are counted in blocks.
        """

    def draft_blocks(self, table: Table, start: int, drafts: int) -> int:
        """Return how many blocks `take_drafts` would take."""

    def take_drafts(self, table: Table, start: int, drafts: int) -> Table:
        """Return the table with blocks for the token at `start` and so many drafts after it."""

    def truncate(self, table: Table, positions: int) -> Table:
        """Return the table cut to `positions`, once it is known how many of the drafts of `take_drafts` were accepted.

        Blocks that are no longer needed are released.
        """

    def release(self, table: Table) -> None:
        """Release the blocks of a table, the last block first, which is then the first to be given out again."""


def open_groups(memory: MemoryBudget, block_size: int) -> tuple[CacheGroup, ...]:
    """Return the groups of a model, one for each pool of its memory budget."""
    groups: list[CacheGroup] = []
    first = 0
    for own in memory.pools:
        pool = BlockPool(own.num_blocks, block_size, first=first)
        if own.state:
            groups.append(StateGroup(pool, own.block_bytes))
        elif own.window:
            groups.append(WindowGroup(pool, Window(own.window, own.row), own.block_bytes))
        else:
            groups.append(AttentionGroup(pool, own.block_bytes))
        first += own.num_blocks
    return tuple(groups)


def room_of(groups: Iterable[CacheGroup], tables: Iterable[Table]) -> int:
    """Return for how many positions all tables of a sequence, one in each group, have blocks."""
    return min([group.room(table) for group, table in zip(groups, tables, strict=True)])
