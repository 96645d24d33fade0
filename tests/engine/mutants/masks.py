"""Planted bugs in the masks by which rows draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlx_tandem.engine import masks, scheduler
from mlx_tandem.engine.plan import Mask, StepPlan
from mlx_tandem.engine.scheduler import Scheduler
from tests.engine.mutants.planting import Plant, attribute, preset


def _masks(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """Rows draw by other masks than were made for them."""
    original = Scheduler.masks
    return attribute(Scheduler, "masks", lambda self, *args: change(original(self, *args)))


def _mask_before_the_token_is_known(patch: pytest.MonkeyPatch) -> None:
    """Masks are made when the plan is, although the tokens before them may be on the device."""

    def plan(self: Scheduler, *args: Any) -> StepPlan | None:
        made = original(self, *args)
        if made is not None:
            early[id(self)] = masks_of(self, made)
        return made

    early: dict[int, list[list[Mask]]] = {}
    original, masks_of = Scheduler.plan, Scheduler.masks
    patch.setattr(Scheduler, "plan", plan)
    patch.setattr(Scheduler, "masks", lambda self, plan, *args: early[id(self)])


def _mask_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """Masks are made without the newest token."""
    original = masks.Place
    patch.setattr(masks, "Place", lambda request, choice, tokens: original(request, choice, tokens[:-1]))


_masks_of = Scheduler.masks


def _mask_behind_the_end(patch: pytest.MonkeyPatch) -> None:
    """The maker of masks is asked what follows tokens that end their choice."""

    def masks_of_plan(maker: Any, plan: StepPlan, sequences: Any, size: int, drawn: Any) -> list[list[Mask]]:
        ends = {id: s.stop_ids for id, s in sequences.items()}
        for s in sequences.values():
            s.stop_ids = frozenset()
        try:
            return original(maker, plan, sequences, size, drawn)
        finally:
            for id, s in sequences.items():
                s.stop_ids = ends[id]

    original = masks.masks_of_plan
    patch.setattr(scheduler, "masks_of_plan", masks_of_plan)


def _mask_drafts_alike(patch: pytest.MonkeyPatch) -> None:
    """All positions of a row draw by the mask of its first."""
    patch.setattr(masks, "allows", lambda mask, token: False)


def _mask_some_choices(patch: pytest.MonkeyPatch) -> None:
    """Only the first choice of a request draws by masks."""

    def plan(self: Scheduler, *args: Any) -> StepPlan | None:
        made = original(self, *args)
        if made is None:
            return None
        firsts = [i for i in made.masked if self._sequences[made.rows[i].sequence].choice == 0]
        return replace(made, masked=tuple(firsts))

    original = Scheduler.plan
    patch.setattr(Scheduler, "plan", plan)


PLANTS: dict[str, Plant] = {
    "masks are those of other rows": _masks(lambda made: made[::-1]),
    "masks are turned around": _masks(lambda made: [own[::-1] for own in made]),
    "everything may be drawn": _masks(lambda made: [[b"\xff" * 4] * len(own) for own in made]),
    "a mask does not wait for the token before it": _mask_before_the_token_is_known,
    "a mask made early lacks the tokens that are not taken in": attribute(
        Scheduler, "masks", lambda self, plan, drawn=None: _masks_of(self, plan)
    ),
    "a mask made early is asked for behind the end": _mask_behind_the_end,
    "the maker of masks keeps what has ended": preset(Scheduler, "_end", "is_masked", False),
    "a mask is one token old": _mask_the_token_before,
    "drafts draw by one mask": _mask_drafts_alike,
    "other choices draw without masks": _mask_some_choices,
}
