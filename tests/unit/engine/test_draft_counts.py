"""Drafts are counted by where they come from, since the start and by the minute, with moving averages."""

from __future__ import annotations

import pytest

from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.plan import Row, RowKind, StepPlan
from mlx_tandem.engine.proposers.counts import MINUTES, Counts
from mlx_tandem.engine.proposers.speculation import Speculation
from mlx_tandem.types import DraftCounts, Request, SamplingParams


def plan(*tokens: int) -> StepPlan:
    """A step with a row for each number: of that many tokens, the first of which is not a draft."""
    kinds = [RowKind.VERIFY if n > 1 else RowKind.DECODE for n in tokens]
    return StepPlan(
        tuple(Row(k, i, i, 0, 5, (1,) * n, (), True) for i, (k, n) in enumerate(zip(kinds, tokens, strict=True)))
    )


def test_rows_by_source_and_minute() -> None:
    now = [1000.0]
    counts = Counts(lambda: now[0])
    assert (counts.minutes(), counts.decoded.sources(), counts.per_row) == ((), (), 0.0)
    counts.add("draft", 4, 1)
    counts.observe(plan(5, 1, 1, 2))
    assert counts.per_row == 2.5
    now[0] += 59
    counts.add("ngram", 3, 3)
    now[0] += 62
    counts.observe(plan(1))
    assert counts.per_row == 2.5, "of the newest step with any"
    counts.add("draft", 2, 0)
    first, third = counts.minutes()
    assert (first.minutes_ago, first.undrafted, third.minutes_ago, third.undrafted) == (2, 2, 0, 1)
    assert first.sources == (DraftCounts("draft", 1, 4, 1, 0.25), DraftCounts("ngram", 1, 3, 3, 1.0))
    assert [(c.source, c.rows, c.drafted, c.accepted) for c in third.sources] == [("draft", 1, 2, 0)]
    draft, ngram = counts.decoded.sources()
    assert (draft.rows, draft.drafted, draft.accepted, ngram.rows) == (2, 6, 1, 1)
    assert draft.recent_acceptance == pytest.approx(0.98 / (0.98 * 4 + 2))
    assert (counts.all.rows, counts.all.drafted, counts.all.accepted, counts.decoded.undrafted) == (3, 9, 4, 3)
    assert counts.by_position[:4] == [2, 1, 1, 0]


def test_old_minutes_are_forgotten_and_the_average_follows_what_is_new() -> None:
    now = [0.0]
    counts = Counts(lambda: now[0])
    for minute in range(3 * MINUTES):
        now[0] = 60.0 * minute
        for _ in range(20):
            counts.add("ngram", 4, 4 if minute < 2 * MINUTES else 0)
    assert [m.minutes_ago for m in counts.minutes()] == list(range(MINUTES))[::-1]
    assert counts.all.recent < 0.02 and counts.all.accepted / counts.all.drafted > 0.6
    now[0] += 60.0 * MINUTES
    assert not counts.minutes(), "nothing has happened since"


def test_a_row_is_judged_by_its_own_drafts_though_others_were_proposed_since() -> None:
    """A step is in flight while the next is planned: what is copied by then is not what the head drafted before."""
    proposer = Speculation(SpeculationConfig("mtp"), clock=lambda: 0.0)
    request = Request(0, (1, 2, 3, 1, 2), SamplingParams(100), prediction=(7, 8, 9, 10, 11))
    assert list(proposer.propose(request, 0, [1, 2, 3, 1, 2, 7], 0, 3)) == [8, 9, 10]
    source = proposer.source(request, 0)
    assert not proposer.propose(request, 0, [1, 2, 3], 0, 3)
    assert (source, proposer.source(request, 0)) == ("prediction", "mtp")
    proposer.settle(request, 0, 3, 3, source)
    assert [c.source for c in proposer.counts.decoded.sources()] == ["prediction"]
    assert proposer._drafters[0, 0].drafts == 11, "it gets more copies, since all of these were right"
