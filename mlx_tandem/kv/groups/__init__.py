"""Cache groups: layers of a model that keep what they have computed of a sequence in the same way.

Each group has a pool of blocks of its own, and a sequence has a table of them in each. A block stands for
`pool.block_size` positions, whatever it holds of these. Those who use groups loop over them and know neither their
number nor their kinds.
"""

from __future__ import annotations

from typing import Protocol

from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.groups.table import Table
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.pool import BlockPool, Window
from mlx_tandem.types import MemoryBudget


class CacheGroup(Protocol):
    """Which blocks sequences need in one group, and the verbs by which they get and lose them.

    A table is immutable: a verb that changes one returns another. SCRATCH stands in it for a block that was given back.
    """

    pool: BlockPool
    block_bytes: int
    divides: bool
    """Whether a block holds something for each of its tokens, so that others can use its beginning alone."""
    keeps_all: bool
    """Whether a sequence needs all of its blocks as long as it runs."""

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence that fits when there is no other."""

    def first_needed(self, position: int) -> int:
        """Return the first block of a sequence that is needed once all before `position` is computed."""

    def end_of_seating(self, known: int, tokens: int) -> int:
        """Return up to which block a sequence of `tokens`, of which `known` are computed, gets its blocks at once."""

    def room(self, table: Table) -> int:
        """Return how many positions a table has blocks for."""

    def lacks(self, table: Table, positions: int) -> int:
        """Return how many blocks `take` would add."""

    def take(self, table: Table, positions: int) -> Table:
        """Return the table with blocks for so many positions; the pool has those that it lacks."""

    def copy(self, table: Table, positions: int) -> tuple[Table, tuple[int, int] | None]:
        """Return the table of another sequence that goes on behind the first `positions` of this one, and which block
        has to be copied into which, if any: whole blocks are shared. The pool has a free block.
        """

    def give_back(self, table: Table, computed: int) -> tuple[Table, Table]:
        """Return the table without what no position from `computed` on needs, and these blocks, which the caller
        releases.
        """

    def draft_blocks(self, table: Table, start: int, drafts: int) -> int:
        """Return how many blocks `take_drafts` would take."""

    def take_drafts(self, table: Table, start: int, drafts: int) -> tuple[Table, Table]:
        """Return the table for so many drafts behind position `start`, and blocks that only these drafts have. What
        the runner is given is the one followed by the other.
        """

    def truncate(self, table: Table, spare: Table, start: int, positions: int) -> Table:
        """Return the table once it is known that the first `positions` stay of what `take_drafts` made room for."""

    def release(self, table: Table) -> None:
        """Give back what a sequence holds, the last block first: it is the first that others may take."""


def open_groups(memory: MemoryBudget, block_size: int) -> tuple[CacheGroup, ...]:
    """Return all groups of a model, as its memory was divided."""
    groups: list[CacheGroup] = []
    first = 0
    for own in memory.pools:
        pool = BlockPool(own.num_blocks, block_size, first=first)
        window = Window(own.window, own.row)
        bounded = WindowGroup(pool, window, own.block_bytes) if own.window else None
        groups.append(bounded or AttentionGroup(pool, own.block_bytes))
        first += own.num_blocks
    return tuple(groups)
