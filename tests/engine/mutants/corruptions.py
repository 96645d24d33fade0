"""Plans that differ from what the scheduler has decided, as a runner would get them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from mlx_tandem.engine.plan import CARRY, Row, RowKind, StepPlan
from tests.engine.reference import ReferenceRunner, WrappedRunner


class Corrupting(WrappedRunner):
    """A runner that executes another plan than it was given."""

    def __init__(self, inner: ReferenceRunner, change: Callable[[StepPlan], StepPlan]):
        super().__init__(inner)
        self._change = change

    def launch(self, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Any:
        return super().launch(self._change(plan), on_built)


def _rows(plan: StepPlan, change: Callable[[Row], Row]) -> StepPlan:
    return replace(plan, rows=tuple(change(r) for r in plan.rows))


def _keep_old_seats() -> Callable[[StepPlan], StepPlan]:
    taken: set[int] = set()

    def change(plan: StepPlan) -> StepPlan:
        kept = tuple(s for s in plan.seatings if s.seat not in taken)
        taken.update(s.seat for s in plan.seatings)
        return replace(plan, seatings=kept)

    return change


def _stale_carry() -> Callable[[StepPlan], StepPlan]:
    """The carried token is the one before the last."""
    return lambda plan: _rows(plan, lambda r: structs.replace(r, tokens=(0,)) if r.tokens == (CARRY,) else r)


def _last_block_of_neighbour(plan: StepPlan) -> StepPlan:
    if len(plan.rows) < 2:
        return plan
    tables = [r.tables[0] for r in plan.rows]
    return replace(
        plan,
        rows=tuple(
            structs.replace(r, tables=((*tables[i][:-1], tables[i - 1][-1]), *r.tables[1:])) if i == 1 else r
            for i, r in enumerate(plan.rows)
        ),
    )


CORRUPTIONS: dict[str, Callable[[], Callable[[StepPlan], StepPlan]]] = {
    "copies are skipped": lambda: lambda p: replace(p, copies=()),
    "uploads are skipped": lambda: lambda p: replace(p, uploads=()),
    "an upload goes to the next slot": lambda: (
        lambda p: replace(p, uploads=tuple((1 + slot % 3, d) for slot, d in p.uploads))
    ),
    "a seat is not reset": _keep_old_seats,
    "a seat forgets the output of before": lambda: (
        lambda p: replace(p, seatings=tuple(replace(s, history=s.history[: s.prompt_length]) for s in p.seatings))
    ),
    "all choices sample as the first": lambda: (
        lambda p: replace(p, seatings=tuple(replace(s, choice=0) for s in p.seatings))
    ),
    "a seat does not know what ends it": lambda: (
        lambda p: replace(p, seatings=tuple(replace(s, stop_ids=frozenset()) for s in p.seatings))
    ),
    "targets are skipped": lambda: lambda p: _rows(p, lambda r: structs.replace(r, targets=())),
    "targets are the tokens themselves": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, targets=r.tokens[: len(r.targets)]))
    ),
    "a stale token is carried": _stale_carry,
    "every decode carries": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, tokens=(CARRY,)) if r.kind is RowKind.DECODE else r)
    ),
    "rows start one too early": lambda: lambda p: _rows(p, lambda r: structs.replace(r, start=max(r.start - 1, 0))),
    "a row writes into its neighbour's block": lambda: _last_block_of_neighbour,
    "all rows run as the base": lambda: lambda p: _rows(p, lambda r: structs.replace(r, lora_slot=0)),
    "drafts are a chunk": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, kind=RowKind.PROMPT) if r.kind is RowKind.VERIFY else r)
    ),
    "a chunk is drafts": lambda: (
        lambda p: _rows(
            p,
            lambda r: (
                structs.replace(r, kind=RowKind.VERIFY)
                if r.kind is RowKind.PROMPT and r.sample and len(r.tokens) > 1
                else r
            ),
        )
    ),
    "drafts begin one too early": lambda: (
        lambda p: _rows(
            p,
            lambda r: structs.replace(r, tokens=r.tokens[1:]) if r.kind is RowKind.VERIFY and len(r.tokens) > 2 else r,
        )
    ),
    "the next row draws by the mask": lambda: (
        lambda p: replace(p, masked=tuple((i + 1) % len(p.rows) for i in p.masked))
    ),
    "no row draws by a mask": lambda: lambda p: replace(p, masked=()),
    "a row behind drafts begins where the host says": lambda: lambda p: _rows(p, lambda r: structs.replace(r, slack=0)),
    "a row behind drafts begins too far": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, start=r.start + 1) if r.slack else r)
    ),
    "a chunk loses its last token": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, tokens=r.tokens[:-1]) if len(r.tokens) > 2 else r)
    ),
}
