"""The block pool: counts are exact, allocation is all or nothing, and long tables are contiguous where they can be."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_tandem.kv.pool import SCRATCH, BlockPool

BLOCKS = 24


class PoolMachine(RuleBasedStateMachine):
    """Tables come, are forked, shrink and go, in any order; a plain set of free blocks is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 4)
        self.tables: list[list[int]] = []

    @property
    def free(self) -> set[int]:
        return set(range(BLOCKS)) - {SCRATCH} - {b for t in self.tables for b in t}

    @rule(n=st.integers(0, BLOCKS))
    def allocate(self, n: int) -> None:
        free = self.free
        blocks = self.pool.allocate(n)
        if n > len(free):
            assert blocks is None, "more than there is"
            return
        assert blocks is not None, "fewer than there are"
        assert len(blocks) == len(set(blocks)) == n
        assert set(blocks) <= free, "a block that is held, or the scratch block"
        if n > 2 and any(free.issuperset(range(b, b + n)) for b in free):
            assert blocks == list(range(blocks[0], blocks[0] + n)), "a free run is used"
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(shared)
        self.tables.append(list(shared))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        kept = data.draw(st.integers(0, len(table)))
        self.pool.release(table[kept:])
        if kept:
            self.tables.append(table[:kept])

    @invariant()
    def books_agree(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.free_blocks == len(self.free)
        assert self.pool.used_blocks + self.pool.free_blocks == self.pool.usable_blocks == BLOCKS - 1


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, derandomize=True)
TestPool = pytest.mark.promise("PRP-1")(PoolMachine.TestCase)


def test_a_fresh_pool_gives_rising_contiguous_blocks() -> None:
    pool = BlockPool(100, 16)
    assert pool.allocate(50) == list(range(1, 51))
    assert pool.allocate(1) == [51]
    assert pool.allocate(48) == list(range(52, 100))
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_run_is_found_between_held_blocks() -> None:
    pool = BlockPool(20, 16)
    tables = [pool.allocate(1) for _ in range(19)]
    for i in (2, 3, 9, 10, 11, 12, 17):
        pool.release(tables[i] or [])
    assert pool.allocate(4) == [10, 11, 12, 13]
    assert sorted(pool.allocate(3) or []) == [3, 4, 18]  # no run of three is left
    assert pool.free_blocks == 0


def test_what_is_shared_is_free_when_its_last_reader_leaves() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.share(blocks[:2])
    pool.release(blocks)
    assert (pool.free_blocks, pool.used_blocks) == (1, 2)
    pool.release(blocks[:2])
    assert pool.free_blocks == 3


def test_a_long_life_does_not_grow_the_books() -> None:
    pool = BlockPool(8, 16)
    for i in range(5000):
        taken = pool.allocate(3 + i % 5)
        pool.release(taken or [])
    assert len(pool._stack) <= 4 * pool.num_blocks + 8
    pool.check([])


@pytest.mark.parametrize("wrong", [[SCRATCH], [5]])
def test_releasing_what_is_not_held_is_a_bug_that_says_so(wrong: list[int]) -> None:
    with pytest.raises(AssertionError):
        BlockPool(8, 16).release(wrong)


def test_sharing_a_free_block_is_a_bug_that_says_so() -> None:
    with pytest.raises(AssertionError):
        BlockPool(8, 16).share([5])


def test_check_sees_a_lost_and_a_doubled_reference() -> None:
    pool = BlockPool(8, 16)
    table = pool.allocate(2) or []
    pool.check([table])
    for wrong in ([], [table, table], [table[:1]]):
        with pytest.raises(AssertionError):
            pool.check(wrong)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(8, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_a_pool_needs_a_block_beside_scratch() -> None:
    with pytest.raises(ValueError):
        BlockPool(1, 16)
