"""Planted bugs in the order in which sequences run: admission, preemption, priorities, failed steps and ends."""

from __future__ import annotations

from bisect import insort_right
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from mlx_tandem.engine import run_queue
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.plan import Row, StepPlan, StepResult
from mlx_tandem.engine.prefill import Prefill
from mlx_tandem.engine.run_queue import RunQueue
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.types import Delta
from tests.engine.mutants.planting import Plant, attribute, kept


def _speak_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Tokens of sequences that ended meanwhile are passed on."""

    def add(self: Scheduler, request: Any) -> None:
        original_add(self, request)
        owners.update({s.id: (request.id, s.choice) for s in self._choices[request.id].values()})

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        gone = [
            Delta(*owners[row.sequence], drawn)
            for row, drawn in zip(plan.rows, result.tokens, strict=True)
            if drawn and row.sequence not in self._sequences
        ]
        outcome = original_update(self, plan, result)
        outcome.deltas += gone
        return outcome

    owners: dict[int, tuple[int, int]] = {}
    original_add, original_update = Scheduler.add, Scheduler.update_from_output
    patch.setattr(Scheduler, "add", add)
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _never_mind_pending(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence comes back although a token of it is still on the device."""

    def preempt(self: RunQueue, s: Sequence) -> None:
        original(self, s)
        s.pending = 0

    original = RunQueue.preempt
    patch.setattr(RunQueue, "preempt", preempt)


def _lose_heirs(patch: pytest.MonkeyPatch) -> None:
    """The end of a leader takes the choices with it that wait for its prompt."""

    def end(self: Scheduler, s: Sequence) -> None:
        for f in s.siblings:
            self.queue._leave(f)
        s.siblings = []
        original(self, s)

    original = Scheduler._end
    patch.setattr(Scheduler, "_end", end)


def _preempt_oldest(patch: pytest.MonkeyPatch) -> None:
    """Blocks are taken from the oldest sequence, whose row may be in the plan already."""

    def reserve(self: RunQueue, s: Sequence, positions: int, rows: list[Row]) -> bool:
        while not self._blocks.reserve(s, positions):
            victim = self.running[0]
            self.preempt(victim)
            if victim is s:
                return False
        return True

    patch.setattr(RunQueue, "reserve", reserve)


def _forget_nothing(patch: pytest.MonkeyPatch) -> None:
    """After a failed step everything that was not in it goes on as if nothing had happened."""

    def fail(self: Scheduler, plans: Any, again: bool = False) -> list[int]:
        sequences = [self._sequences.get(row.sequence) for plan in plans for row in plan.rows]
        failed = list(dict.fromkeys(s.request.id for s in sequences if s is not None))
        for request in failed:
            self.cancel(request)
        return failed

    patch.setattr(Scheduler, "fail", fail)


def _wait_for_lost_tokens(patch: pytest.MonkeyPatch) -> None:
    """Tokens of a step that is computed again are still waited for."""
    right = Scheduler.fail

    def fail(self: Scheduler, plans: Any, *, again: bool = False) -> list[int]:
        pending = {s: s.pending for s in self._sequences.values()}
        failed = right(self, plans, again=again)
        for s in self._sequences.values():
            s.pending = pending[s]
        return failed

    patch.setattr(Scheduler, "fail", fail)


def _never_stop(patch: pytest.MonkeyPatch) -> None:
    def init(self: Sequence, *args: Any) -> None:
        original(self, *args)
        self.stop_ids = frozenset()

    original = Sequence.__init__
    patch.setattr(Sequence, "__init__", init)


def _one_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "is_complete", property(lambda s: s.generated > s.request.params.max_tokens))
    patch.setattr(
        Sequence,
        "finish_reason",
        lambda s, token: (
            "stop"
            if token in s.stop_ids
            else "length"
            if len(s.tokens) - s.prompt_length > s.request.params.max_tokens
            else None
        ),
    )
    patch.setattr(
        Sequence,
        "wants_decode",
        property(lambda s: s.scheduled == s.total - 1 and s.generated <= s.request.params.max_tokens),
    )


def _nan_is_a_token(patch: pytest.MonkeyPatch) -> None:
    """A row that is not finite draws token 0."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        return original(self, plan, replace(result, tokens=[tuple(max(t, 0) for t in own) for own in result.tokens]))

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _first_come_first_served(patch: pytest.MonkeyPatch) -> None:
    """The priorities of requests are ignored, and so is the check that would notice."""
    patch.setattr(run_queue, "_PRIORITY", lambda s: (False, 0))


def _lose_the_place(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence waits behind those of its priority."""

    def preempt(self: RunQueue, s: Sequence) -> None:
        original(self, s)
        self.waiting.remove(s)
        insort_right(self.waiting, s, key=lambda x: x.priority)

    original = RunQueue.preempt
    patch.setattr(RunQueue, "preempt", preempt)


def _score_twice(patch: pytest.MonkeyPatch) -> None:
    """After a preemption what is known of the prompt is taken in again."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        for row in plan.rows:
            s = self._sequences.get(row.sequence)
            if row.targets and s is not None and s.scores is not None:
                s.scores += s.scores[row.start :]
        return original(self, plan, result)

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _hand_out_again(patch: pytest.MonkeyPatch) -> None:
    """Each choice hands out the prompt's logprobs."""
    patch.setattr(Scheduler, "_hand_out_scores", lambda self, s: tuple(s.scores))


def _read_everything(patch: pytest.MonkeyPatch) -> None:
    def plan(self: Prefill, *args: Any) -> None:
        config, self._config = self._config, structs.replace(self._config, prefill_batch_size=0)
        original(self, *args)
        self._config = config

    original = Prefill.plan
    patch.setattr(Prefill, "plan", plan)


def _leave_nobody_out(patch: pytest.MonkeyPatch) -> None:
    """Rows made for training run whenever they can."""
    original = Scheduler.plan
    patch.setattr(Scheduler, "plan", lambda self, background=True: original(self, True))


def _wait_behind_training(patch: pytest.MonkeyPatch) -> None:
    """Requests of users do not come before those made for training."""
    patch.setattr(Sequence, "priority", property(lambda s: (False, s.request.priority)))


PLANTS: dict[str, Plant] = {
    "preemption keeps the seat's state": kept(RunQueue, "_leave", "is_seated"),
    "an outcome speaks of what has ended": _speak_of_the_dead,
    "an outcome forgets what was pending": _never_mind_pending,
    "a cancelled leader takes its siblings along": _lose_heirs,
    "a planned sequence is preempted": _preempt_oldest,
    "survivors of a failed step keep their cache": _forget_nothing,
    "tokens of a lost step are waited for": _wait_for_lost_tokens,
    "stop ids are ignored": _never_stop,
    "one token too many": _one_too_many,
    "not a number is a token": _nan_is_a_token,
    "a priority is not heard": _first_come_first_served,
    "whoever was preempted waits at the end": _lose_the_place,
    "what is known of a prompt is taken in twice": _score_twice,
    "a prompt's logprobs are handed out twice": _hand_out_again,
    "any number of prompts is read at once": _read_everything,
    "any number of tokens is in flight": attribute(RunQueue, "_has_tokens_for", lambda self, s: True),
    "rows made for training are never left out": _leave_nobody_out,
    "users wait behind training": _wait_behind_training,
}
