"""The task that turns feedback into updates of the adapter that learns from it, for as long as the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct, structs

from mlx_tandem.config import Config
from mlx_tandem.errors import TandemError
from mlx_tandem.log import log, log_exception
from mlx_tandem.training.feedback.lessons import lesson, teaches
from mlx_tandem.training.feedback.opinions import Stored
from mlx_tandem.training.feedback.store import FeedbackStore, learned_once_more
from mlx_tandem.training.online.online import OnlineLearner

LOOK_SECONDS = 1.0
"""Most seconds between two checks for feedback that has waited for long enough."""

REMEMBERED = 1024
"""Earlier good answers are drawn from this many of the newest feedback that was learned from."""


MOST_TOKENS = 1 << 18
"""Most tokens of the feedback of one update, and also of what it repeats. The first of each may be longer."""


def _within(feedback: Sequence[Stored], tokens: int) -> list[Stored]:
    """Return the first feedback, and as many after it as have at most `tokens` tokens together with it."""
    found: list[Stored] = []
    for each in feedback:
        f = each.feedback
        tokens -= (len(f.answers) + 1) * len(f.prompt) + sum(map(len, f.answers)) + len(f.corrected)
        if found and tokens < 0:
            break
        found.append(each)
    return found


class TeacherStatus(Struct):
    """Counts of the teacher since the server's start, with what it does now."""

    adapter: str
    state: Literal["waiting", "learning", "stopped"] = "waiting"  # stopped: with all learning
    updates: int = 0
    learned: int = 0  # feedback of these updates, as often as it was learned from
    replayed: int = 0
    error: str = ""  # the last one; empty since it was overcome


class Teacher:
    """The teacher of one adapter. `close` ends it."""

    def __init__(self, config: Config, learner: OnlineLearner, store: FeedbackStore, clock: Callable[[], float]):
        """Prepare to learn from feedback on the adapter, and on the base if the adapter began as a new one.

        `clock` returns the time in Unix seconds.
        """
        self._settings, self._learner, self._store, self._clock = config.feedback, learner, store, clock
        name = config.feedback.learn
        self.adapters = (name,) if config.rl_training.init_from else ("", name)
        """The adapters on whose answers it learns from feedback; an empty name is the base."""
        self.status = TeacherStatus(name)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a second call does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look for feedback now."""
        self._wake.set()

    async def close(self) -> None:
        """End the task. The next start goes on with what it has begun."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def describe(self) -> dict[str, object]:
        """Return the status for clients."""
        return structs.asdict(self.status)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            again = False
            try:
                again = await self._turn()
                self.status.error = ""
            except TandemError as e:
                self._fail(e.message)
            except Exception as e:
                log_exception("learning from feedback failed", e)
                self.status.error = f"internal error: {type(e).__name__}"
            if not again:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)

    async def _turn(self) -> bool:
        """Do the update that is due; return False when none is."""
        if self._learner.lacking() is None:
            self.status.state = "stopped"
            return False
        settings = self._settings
        due = await self._due()
        waited = bool(due) and min(each.feedback.created for each in due) + settings.wait_s <= self._clock()
        if not due or (len(due) < settings.batch_size and not waited):
            self.status.state = "waiting"
            return False
        self.status.state = "learning"
        due = _within(due, MOST_TOKENS)
        replayed = await self._replayed(due)
        plan = lesson(due, replayed, settings.beta)
        await self._learner.teach(plan, settings.learning_rate, learned_once_more(due))
        self.status.updates += 1
        self.status.learned += len(due)
        self.status.replayed += len(replayed)
        return True

    async def _due(self) -> list[Stored]:
        """Return the feedback that the next update learns from, at most `batch_size`."""
        settings = self._settings
        while True:
            due = await self._store.due(self.adapters, settings.epochs, settings.batch_size)
            idle = [each for each in due if not teaches(each.feedback)]
            if not idle:
                return due
            await self._store.pass_over(idle, settings.epochs)

    async def _replayed(self, due: Sequence[Stored]) -> list[Stored]:
        """Return earlier good answers, drawn by lot: about `replay` for each feedback that is due.

        They are answers that were called good as they were: what the adapter could do already, and should keep.
        """
        count = round(self._settings.replay * len(due))
        if not count:
            return []
        known = await self._store.learned(self.adapters, self._settings.epochs, REMEMBERED)
        good = [each for each in known if each.feedback.good and each.feedback.good in each.feedback.answers]
        lot = random.Random(f"{due[0].number}/{due[0].learned}")
        return _within(lot.sample(good, min(count, len(good))), MOST_TOKENS)

    def _fail(self, error: str) -> None:
        """Record an error, which is logged once."""
        if error != self.status.error:
            log("learning from feedback waits", logging.WARNING, error=error)
        self.status.error = error
