"""What the groups of a model take for a sequence, keep of it and give back, by what their layers see."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.groups.state import HELD, StateGroup
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.pool import SCRATCH, BlockPool, Window

SIZE, WINDOW, ROW = 4, 10, 6
KINDS = ["attention", "window", "state"]


def group_of(kind: str, blocks: int = 40) -> Any:
    pool = BlockPool(blocks, SIZE)
    if kind == "window":
        return WindowGroup(pool, Window(WINDOW, ROW))
    return StateGroup(pool) if kind == "state" else AttentionGroup(pool)


def seen_from(kind: str, position: int) -> set[int]:
    """The blocks before `position` with what a token there reads."""
    if kind == "state":
        return {(position - 1) // SIZE} if position else set()
    first = max(position + 1 - WINDOW, 0) if kind == "window" else 0
    return {at // SIZE for at in range(first, position)}


@given(kind=st.sampled_from(KINDS), length=st.integers(1, 60), kept=st.sets(st.integers(1, 15)), data=st.data())
def test_what_is_given_back_is_what_nobody_needs_from_the_last_full_block_on(
    kind: str, length: int, kept: set[int], data: st.DataObject
) -> None:
    """Neither the sequence, nor whoever finds its full blocks and goes on from there."""
    group = group_of(kind)
    computed = data.draw(st.integers(0, length))
    table = tuple(group.pool.allocate(-(-length // SIZE)))
    needed = set.union(*(seen_from(kind, at) for at in range(computed // SIZE * SIZE, length + 1)))
    rest, gone = group.give_back(table, computed, kept)
    stays = {
        i for i in range(len(table)) if i >= computed // SIZE or i in needed or (kind == "state" and i + 1 in kept)
    }
    assert rest == tuple(b if i in stays else SCRATCH for i, b in enumerate(table))
    assert sorted(gone) == sorted(b for i, b in enumerate(table) if i not in stays)
    assert group.give_back(rest, computed, kept) == (rest, ()), "once"
    assert group.first_needed(computed) <= min(seen_from(kind, computed), default=0)


@given(kind=st.sampled_from(KINDS), before=st.integers(0, 40), positions=st.integers(0, 60))
def test_blocks_are_taken_for_as_many_positions_as_are_lacked(kind: str, before: int, positions: int) -> None:
    """Of a state the last row alone is needed."""
    group = group_of(kind)
    table = group.take((), before)
    free = group.pool.free_blocks
    lacks, taken = group.lacks(table, positions), group.take(table, positions)
    missing = max(-(-positions // SIZE) - -(-before // SIZE), 0)
    assert lacks == free - group.pool.free_blocks == (min(missing, 1) if kind == "state" else missing)
    assert group.room(taken) == SIZE * len(taken) == SIZE * -(-max(before, positions) // SIZE)
    assert taken[: len(table)] == table and taken.count(SCRATCH) == len(taken) - len({*taken} - {SCRATCH})
    assert not taken or taken[-1] != SCRATCH
    group.release(taken)
    assert group.pool.used_blocks == 0


@given(kind=st.sampled_from(KINDS), length=st.integers(1, 40), data=st.data())
def test_a_copy_shares_whole_blocks_and_has_its_own_of_the_one_it_parts_in(
    kind: str, length: int, data: st.DataObject
) -> None:
    group = group_of(kind)
    table = group.take((), length)
    parted = data.draw(st.integers(1, length))
    own, copied = group.copy(table, parted)
    whole = parted // SIZE
    assert own[:whole] == table[:whole]
    assert (copied is None) == (parted % SIZE == 0)
    assert own[whole:] == (() if copied is None else (copied[1],))
    assert copied is None or (copied[0] == table[whole] and copied[1] not in table)
    group.pool.check([table, own])


@given(
    kind=st.sampled_from(["attention", "window"]), start=st.integers(0, 30), drafts=st.integers(1, 12), data=st.data()
)
def test_of_the_blocks_of_drafts_those_of_accepted_ones_stay(
    kind: str, start: int, drafts: int, data: st.DataObject
) -> None:
    group = group_of(kind)
    table = group.take((), start)
    free, wanted = group.pool.free_blocks, group.draft_blocks(table, start, drafts)
    longer = group.take_drafts(table, start, drafts)
    assert free - group.pool.free_blocks == wanted
    assert group.room(longer) == SIZE * -(-(start + 1 + drafts) // SIZE)
    positions = start + 1 + data.draw(st.integers(0, drafts))
    cut = group.truncate(longer, positions)
    assert cut == longer[: -(-positions // SIZE)]
    group.pool.check([cut])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [2, 3, 4, 5, 6, 7, 8, 9])
def test_the_longest_sequence_is_one_that_can_be_read_in_rows(kind: str, blocks: int) -> None:
    """Read as the engine does: what is behind the window is given back before blocks for another row are taken."""
    group = group_of(kind, blocks)
    longest = min(group.longest, 200)
    table: tuple[int, ...] = ()
    for start in range(0, longest, ROW):
        table, gone = group.give_back(table, start)
        group.pool.release(gone)
        end = min(start + ROW, longest)
        assert group.lacks(table, end) <= group.pool.free_blocks, f"{start} of {longest}"
        table = group.take(table, end)
    enough = {"attention": None, "window": Window(WINDOW, ROW).most(SIZE), "state": HELD}[kind]
    assert (group.longest > 200) == (enough is not None and blocks - 1 >= enough)
    assert group.longest > 200 or group.longest == (blocks - 1) * SIZE
