"""The block pool: which blocks of the KV cache are free and how many sequences read each of the others.

A free block may be kept for what it holds. Kept blocks are given out after those that hold nothing, the block that has
been unread for longest first. A model has one pool for each of its cache groups, and blocks are numbered through all of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

SCRATCH = 0
"""Number of the first pool's scratch block, to which padded rows and positions write; it is never given out. The first
block of every other pool is scratch as well. In a table, SCRATCH stands for a block that the sequence has given back
because no position that it will compute needs it."""


def first_block(position: int, window: int | None, block_size: int) -> int:
    """Return the first block that a query at `position` sees. `window`: positions that the layer sees; None: all."""
    return 0 if window is None else max(position + 1 - window, 0) // block_size


@dataclass(frozen=True, slots=True)
class Window:
    """The window of layers that see the last `tokens` positions, including the query's own.

    `row` is the largest number of tokens in one row of a step.
    """

    tokens: int
    row: int

    def first(self, position: int, block_size: int) -> int:
        """Return the first block that a query at `position`, or any query after it, sees."""
        return first_block(position, self.tokens, block_size)

    def held(self, block_size: int) -> int:
        """Return the most blocks that a decoding sequence has: its window, and what is not given back at once."""
        return -(-self.tokens // block_size) + 2

    def most(self, block_size: int) -> int:
        """Return a number of blocks that suffices for one sequence at any time, also while it reads its prompt."""
        return self.held(block_size) - (-self.row // block_size)


class BlockPool:
    """A pool of `num_blocks` reference-counted blocks of `block_size` token positions, numbered from `first` on.

    A block is free exactly when its count is 0. `allocate` returns all blocks that were asked for or none. Allocations
    of more than two blocks are contiguous, in rising order, where a free run is long enough, so that the sequence can
    be read without a gather. A kept block is given out only when no other is free, after `on_evict` was called with it.
    """

    def __init__(self, num_blocks: int, block_size: int, *, first: int = 0):
        if num_blocks < 2:
            raise ValueError("a pool needs at least two blocks: one is scratch")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scratch = first
        end = first + num_blocks
        self.count = [0] * end  # by number; numbers below `first` belong to other pools
        self.count[first] = 1
        # Vacant blocks, the lowest on top. Entries that `_run` took stay in the stack and are skipped later.
        self._stack = list(range(end - 1, first, -1))
        self._free = np.zeros(end, dtype=bool)
        self._free[first + 1 :] = True
        self.free_blocks = num_blocks - 1  # including kept ones
        self._kept = bytearray(end)
        self._idle: dict[int, None] = {}  # kept and free blocks, those unread for longest first
        self.on_evict: Callable[[int], None] = lambda block: None

    @property
    def usable_blocks(self) -> int:
        """Number of blocks without the scratch block."""
        return self.num_blocks - 1

    @property
    def used_blocks(self) -> int:
        """Number of blocks that some sequence reads."""
        return self.usable_blocks - self.free_blocks

    @property
    def vacant_blocks(self) -> int:
        """Number of free blocks that hold nothing."""
        return self.free_blocks - len(self._idle)

    def has(self, block: int) -> bool:
        """Return whether the block of this number belongs to this pool; the scratch block does not."""
        return self.scratch < block < len(self.count)

    def is_vacant(self, block: int) -> bool:
        """Return whether a block is free and holds nothing."""
        return bool(self._free[block])

    def oldest(self, n: int) -> list[int]:
        """Return up to `n` kept blocks that nobody reads, in the order in which they will be given out."""
        return list(islice(self._idle, n))

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks so many tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, n: int) -> list[int] | None:
        """Return `n` blocks with one reference each, or None when fewer are free."""
        if n > self.free_blocks:
            return None
        while n > self.vacant_blocks:
            self._evict(next(iter(self._idle)))
        blocks = self._run(n) if n > 2 else None
        if blocks is None:
            blocks = []
            while len(blocks) < n:
                b = self._stack.pop()
                if self._free[b]:
                    self._free[b] = False
                    blocks.append(b)
        for b in blocks:
            self.count[b] = 1
        self.free_blocks -= n
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reader to each block. Each of them has readers or is kept."""
        for b in blocks:
            if self.count[b] == 0:
                assert b in self._idle, f"block {b} is free"
                del self._idle[b]
                self.free_blocks -= 1
            self.count[b] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reader from each block and free those without readers."""
        for b in blocks:
            assert self.count[b] > 0, f"block {b} is not held"
            assert b != self.scratch
            self.count[b] -= 1
            if self.count[b] == 0:
                self.free_blocks += 1
                if self._kept[b]:
                    self._idle[b] = None
                else:
                    self._vacate(b)
        if len(self._stack) > 4 * self.num_blocks:
            self._stack = np.flatnonzero(self._free)[::-1].tolist()

    def keep(self, block: int) -> None:
        """Keep a block that has readers: its content stays when nobody reads it any more."""
        assert self.count[block] > 0, f"block {block} is free"
        self._kept[block] = True

    def forget(self, block: int) -> None:
        """Keep a block no longer: once nobody reads it, it holds nothing."""
        assert self._kept[block], f"block {block} is not kept"
        self._kept[block] = False
        if self.count[block] == 0:
            del self._idle[block]
            self._vacate(block)

    def kept(self) -> set[int]:
        """Return the blocks that are kept, or will be when nobody reads them."""
        return {b for b, is_kept in enumerate(self._kept) if is_kept}

    def _evict(self, block: int) -> None:
        """Make a kept block that nobody reads vacant, so that it can be given out."""
        self.on_evict(block)
        self.forget(block)

    def _vacate(self, block: int) -> None:
        """Note that a free block holds nothing that anybody may read."""
        self._free[block] = True
        self._stack.append(block)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that the counts are exactly the references of `tables`; for tests."""
        expected = [0] * len(self.count)
        for table in tables:
            for b in table:
                expected[b] += 1
        expected[SCRATCH] = 0  # in tables it stands for blocks that were given back, which are not counted
        expected[self.scratch] = 1
        assert expected == self.count, "reference counts and tables differ"
        free = {b for b in range(self.scratch, len(expected)) if expected[b] == 0}
        idle = {b for b in free if self._kept[b]}
        assert idle == self._idle.keys(), "a kept block is lost"
        assert free - idle == set(np.flatnonzero(self._free).tolist()), "free map and counts differ"
        assert len(free) == self.free_blocks, "free count is off"
        assert free - idle <= set(self._stack), "a free block is lost"

    def _run(self, n: int) -> list[int] | None:
        """Take and return the first run of `n` free blocks; None when there is no such run."""
        free = np.flatnonzero(self._free)
        if len(free) < n:
            return None
        starts = np.flatnonzero(free[n - 1 :] - free[: len(free) - n + 1] == n - 1)
        if len(starts) == 0:
            return None
        first = int(free[starts[0]])
        self._free[first : first + n] = False
        return list(range(first, first + n))
