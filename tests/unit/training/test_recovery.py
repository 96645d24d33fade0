"""What the records of a journal come to beside the checkpoint that was made of some of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mlx_tandem.engine.learning import AdamParams
from mlx_tandem.training.online import recovery
from mlx_tandem.training.open_trajectories import OpenTrajectories
from mlx_tandem.training.store.records import FORMAT, Added, Began, Dropped, Ended, Forgotten, Opened, Record, Seen
from mlx_tandem.training.trajectories import Buffer, Counts, Trajectory

BEFORE = Counts(collected=100, taken=50, dropped_stale=7, dropped_no_reward=3)
"""What the checkpoint has counted."""


def trajectory(number: int, reward: float) -> Trajectory:
    return Trajectory(f"t{number}", "g", (1,), (2,), (-1.0,), (-1.0,), (1,), 1.0, reward)


def began(step: int, *ids: str) -> Began:
    return Began(step, ids, (), AdamParams(0.0), 0)


RECORDS: list[Record] = [
    Opened(FORMAT, "c#1", 4, 0),
    Seen(("s",)),
    Added(trajectory(0, 0.0)),
    Added(trajectory(1, 1.0)),
    Dropped(("late", "later")),
    began(1, "t0", "t1"),
    Forgotten(("f",)),
]
AFTER = [  # what each record adds to the counts
    Counts(),
    Counts(),
    Counts(collected=1),
    Counts(collected=1),
    Counts(dropped_stale=2),
    Counts(taken=2),
    Counts(dropped_no_reward=1),
]


def added(counts: Counts, more: list[Counts]) -> Counts:
    names = counts.__struct_fields__
    return replace(counts, **{n: getattr(counts, n) + sum(getattr(each, n) for each in more) for n in names})


@pytest.mark.parametrize("counted", [0, 2, 3, 4, 5, 6, 7, 8, 20])
def test_what_the_checkpoint_has_counted_is_not_counted_again(counted: int) -> None:
    """0: it came before the journal. More than there are: the last of them did not reach the drive any more."""
    counts = replace(BEFORE)
    found = recovery.rebuild(RECORDS, Buffer(9), OpenTrajectories(9, 9.0), 0, counts, counted)
    assert found.buffer.counts == added(BEFORE, AFTER[max(counted, 2) :])
    assert counts == BEFORE, "it is the checkpoint's own"


UPDATES: list[Record] = [
    *RECORDS[:2],
    began(1),
    Ended(1, "published", "a", 1),
    began(2),
    Ended(1, "rolled_back"),
    began(2),
    Ended(2, "published", "b", 2),
    began(3),
    Ended(3, "published", "a", 3),
    began(4),
]


@pytest.mark.parametrize(("held", "steps"), [(0, [1, 1, 2, 3]), (1, [1, 2, 3]), (3, [3]), (4, []), (5, [])])
def test_updates_that_a_checkpoint_holds_are_not_computed_again(held: int, steps: list[int]) -> None:
    assert [end.step for _, end in recovery.ended(UPDATES, held)] == steps
    found = recovery.rebuild(UPDATES, Buffer(9), OpenTrajectories(9, 9.0), held, Counts())
    assert (found.begun, found.pending is None) == (5, held == 5)


@pytest.mark.parametrize(("held", "digest", "count"), [(0, "a", 4), (0, "b", 3), (1, "b", 2), (3, "b", 0), (0, "c", 0)])
def test_the_way_to_a_version_is_as_many_updates_as_lead_to_where_it_came_last(
    held: int, digest: str, count: int
) -> None:
    assert recovery.updates_to(UPDATES, held, digest) == count


def test_what_is_counted_of_updates_that_have_ended() -> None:
    """The highest number stays that of the last version, also when later updates were not published."""
    counters = recovery.Counters()
    for end in (Ended(1, "published", "a", 3), Ended(2, "kept"), Ended(2, "rolled_back"), Ended(2, "skipped")):
        counters.note(end)
    assert (counters.updates, counters.since_checkpoint, counters.trial.updates) == (4, 4, 4)
    assert (counters.last_version, counters.course.rollbacks, counters.course.in_a_row) == (3, 1, 1)
    assert recovery.counters(None) == recovery.Counters()
