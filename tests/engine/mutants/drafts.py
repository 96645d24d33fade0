"""Planted bugs in verifying drafts: which are accepted, and what becomes of the blocks of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlx_tandem.engine import drafting
from mlx_tandem.engine.draft_blocks import DraftBlocks
from mlx_tandem.engine.drafting import Drafting
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.plan import Row, RowKind, StepPlan, StepResult
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.groups import room_of
from tests.engine.mutants.planting import Plant, attribute


def _drawn(change: Callable[[Row, tuple[int, ...]], tuple[int, ...]]) -> Plant:
    """The scheduler gets other tokens than rows with drafts have drawn."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        tokens = [
            change(row, drawn) if row.kind is RowKind.VERIFY and drawn[-1] >= 0 else drawn
            for row, drawn in zip(plan.rows, result.tokens, strict=True)
        ]
        return original(self, plan, replace(result, tokens=tokens))

    original = Scheduler.update_from_output
    return lambda patch: patch.setattr(Scheduler, "update_from_output", update_from_output)


def _truncate(positions: int) -> Plant:
    """A row keeps `positions` more of its drafts than were accepted."""
    original = DraftBlocks.truncate
    changed = lambda self, s, n: original(self, s, n + positions)  # noqa: E731
    return attribute(DraftBlocks, "truncate", changed)


def _shorten_without_release(patch: pytest.MonkeyPatch) -> None:
    """The blocks of rejected drafts leave the table and are nobody's."""

    def truncate(self: DraftBlocks, s: Sequence, positions: int) -> None:
        s.tables = tuple(table[: -(-positions // self._groups[0].pool.block_size)] for table in s.tables)
        s.room = room_of(self._groups, s.tables)

    patch.setattr(DraftBlocks, "truncate", truncate)


def _stay_behind_drafts(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts that were scheduled count as computed."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        ends = {row.sequence: row.start + len(row.tokens) for row in plan.rows if row.kind is RowKind.VERIFY}
        outcome = original(self, plan, result)
        for sequence, end in ends.items():
            s = self._sequences.get(sequence)
            if s is not None and s.seat >= 0:
                s.scheduled = end
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _roll_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """A sequence that lost its seat while its drafts were on the device is rolled back in its new seat."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        verified = [self._sequences.get(row.sequence) for row in plan.rows if row.kind is RowKind.VERIFY]
        waiting = [s for s in verified if s is not None and s.seat < 0]
        seats = {s: s.seat for s in waiting}
        for s in waiting:
            s.seat = 0
        outcome = original(self, plan, result)
        for s in waiting:
            s.seat = seats[s]
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _say_everything(patch: pytest.MonkeyPatch) -> None:
    """All that was drawn is said, also behind the token that ends its choice."""

    def say(self: Sequence, drawn: tuple[int, ...]) -> Any:
        return drawn, original(self, drawn)[1]

    original = Sequence.say
    patch.setattr(Sequence, "say", say)


def _look_at_the_last(patch: pytest.MonkeyPatch) -> None:
    """Only the last of several tokens can end a choice."""

    def say(self: Sequence, drawn: tuple[int, ...]) -> Any:
        self.tokens += drawn
        return drawn, self.finish_reason(drawn[-1])

    patch.setattr(Sequence, "say", say)


def _index_drafts(patch: pytest.MonkeyPatch) -> None:
    """Drafts can be found by others before they are accepted."""

    def row(self: Scheduler, s: Sequence, kind: RowKind, tokens: Any, *args: Any) -> Row:
        made = original(self, s, kind, tokens, *args)
        if kind is RowKind.VERIFY and s.is_pure and self._blocks._caches:
            known = [*s.tokens, *tokens[1:]]
            chain = self._blocks._keys.chain(s).fork()
            s.published = self._blocks._caches[0].publish(chain, known, s.table, s.published)
        return made

    original = Scheduler._row
    patch.setattr(Scheduler, "_row", row)


def _draft_beyond(patch: pytest.MonkeyPatch) -> None:
    """Drafts may reach behind the last token that a choice may have."""

    def drafts(self: Drafting, s: Sequence, rows: list[Row]) -> tuple[int, ...]:
        s.most_tokens += 3
        drafts = original(self, s, rows)
        s.most_tokens -= 3
        return drafts

    original = Drafting.drafts
    patch.setattr(Drafting, "drafts", drafts)


def _trust_proposers(patch: pytest.MonkeyPatch) -> None:
    """A draft that is no token goes to the device."""
    patch.setattr(drafting, "takewhile", lambda condition, tokens: tokens)


def _draft_without_blocks(patch: pytest.MonkeyPatch) -> None:
    """Drafts are sent for which there are no blocks."""
    patch.setattr(DraftBlocks, "take", lambda self, s, drafts, running: drafts)


def _forget_the_row_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Settled drafts leave a sequence where it was before the row that follows them."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        verified = [(r, d) for r, d in zip(plan.rows, result.tokens, strict=True) if r.kind is RowKind.VERIFY]
        outcome = original(self, plan, result)
        for row, drawn in verified:
            s = self._sequences.get(row.sequence)
            if s is not None and s.seat >= 0 and s.pending:
                s.scheduled = row.start + len(drawn)
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _shorten_under_the_row_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Settled drafts give back the blocks of the row that follows them."""

    def truncate(self: DraftBlocks, s: Sequence, positions: int) -> None:
        original(self, s, positions - s.slack)

    original = DraftBlocks.truncate
    patch.setattr(DraftBlocks, "truncate", truncate)


def _settle_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Drafts that were read count as drafts on the device."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        before = {s.id: s.slack for s in self._sequences.values()}
        outcome = original(self, plan, result)
        for s in self._sequences.values():
            s.slack = before[s.id]
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _draft_as_if_read(patch: pytest.MonkeyPatch) -> None:
    """Tokens on the device do not count among those that a choice may have when it drafts."""

    def drafts(self: Drafting, s: Sequence, rows: list[Row]) -> tuple[int, ...]:
        s.most_tokens += s.pending
        drafts = original(self, s, rows)
        s.most_tokens -= s.pending
        return drafts

    original = Drafting.drafts
    patch.setattr(Drafting, "drafts", drafts)


def _count_deltas(patch: pytest.MonkeyPatch) -> None:
    """The scheduler counts rows, not tokens, as generated."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        before = self.generated_tokens
        outcome = original(self, plan, result)
        self.generated_tokens = before + len(outcome.deltas)
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


PLANTS: dict[str, Plant] = {
    "all drafts are accepted": _drawn(lambda row, drawn: (*row.tokens[1:], drawn[-1])),
    "no draft is accepted": _drawn(lambda row, drawn: drawn[-1:]),
    "a draft that was accepted is said twice": _drawn(lambda row, drawn: (*drawn[:1], *drawn)),
    "the last token is a draft": _drawn(lambda row, drawn: (*drawn[:-1], row.tokens[-1])),
    "a position that was accepted is given back": _truncate(-1),
    "blocks of rejected drafts are kept": _shorten_without_release,
    "rejected drafts count as computed": _stay_behind_drafts,
    "whoever has no seat is rolled back": _roll_nothing_back,
    "what is behind the end is said": _say_everything,
    "an end among accepted drafts is not seen": _look_at_the_last,
    "drafts can be found": _index_drafts,
    "drafts reach too far": _draft_beyond,
    "a draft is no token": _trust_proposers,
    "drafts have no blocks": _draft_without_blocks,
    "settled drafts forget the row behind them": _forget_the_row_in_flight,
    "settled drafts take the blocks of the row behind them": _shorten_under_the_row_in_flight,
    "drafts are never settled": _settle_for_ever,
    "drafts behind the device's are one too many": _draft_as_if_read,
    "rows are counted as tokens": _count_deltas,
}
