"""What proposers of tests have in common."""

from __future__ import annotations

from mlx_tandem.engine.plan import StepPlan, StepResult
from mlx_tandem.types import Request


class RowByRow:
    """A proposer that drafts for each row by itself and keeps no counts; `needs_newest` and `propose` are missing."""

    for_all, together, in_steps = True, False, False

    def prepare(self, asked: object) -> None:
        raise AssertionError("drafts are made one by one")

    def offer(self, request: Request, choice: int, tokens: int, draft: int) -> None:
        raise AssertionError("steps make no drafts")

    def source(self, request: Request, choice: int) -> None:
        return None

    def stats(self) -> None:
        return None

    def is_on(self, rows: int) -> bool:
        return True

    def settle(self, request: Request, choice: int, drafts: int, accepted: int, source: None) -> None:
        pass

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        pass

    def forget(self, request: Request, choice: int) -> None:
        pass
