"""What the loop does by itself: whatever is due next, for as long as it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import TandemError
from mlx_tandem.training.online.learner import Learner
from mlx_tandem.training.trajectories import Trajectory

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""How long the loop waits after an error."""

POLL_SECONDS = 0.05
"""How often the loop looks whether an engine is there, while none is."""

Work = Callable[[], Coroutine[Any, Any, bool]]


class Loop:
    """`alone` runs work with nobody else at the trainer. `compare` has prompts of the control arm answered a second
    time, also while updates wait, and `sample` makes completions of its own; False: there is nothing to do.
    """

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        learner: Learner,
        alone: Callable[[Work], Awaitable[bool]],
        compare: Work,
        sample: Work,
    ) -> None:
        self.running = False
        self.reason = ""
        """Why it stopped by itself."""
        self.task: asyncio.Task[None] | None = None
        self._waits = False
        self._wake = asyncio.Event()
        self._config, self._training = config, config.rl_training
        self._client, self._learner, self._alone = client, learner, alone
        self._compare, self._sample = compare, sample

    def start(self) -> None:
        """Run from now on; what stopped it before is forgotten."""
        self.running, self.reason = True, ""
        course = self._learner.ledger.counters.course
        course.in_a_row = 0 if course.lost else course.in_a_row
        self.wake()
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._run())

    def stop(self, reason: str = "") -> None:
        """End after what it is doing."""
        self.running, self.reason = False, reason
        self.wake()

    def wake(self) -> None:
        """Look again, since there may be something to do."""
        self._wake.set()

    async def _run(self) -> None:
        while self.running:
            self._wake.clear()
            try:
                again = await self._turn()
            except TandemError as e:
                log.warning("learning waits", extra={"fields": {"error": e.message}})
                await asyncio.sleep(RETRY_SECONDS)
                again = True
            except Exception:
                log.exception("learning stopped")
                self.stop("an error that nobody expected; the log has more")
            else:
                self.look_back()
            if self.running and not again:
                self._waits = True
                await self._wake.wait()
                self._waits = False

    @property
    def is_resting(self) -> bool:
        """Whether nothing is due until somebody calls `wake`."""
        return self.task is None or self.task.done() or (self._waits and not self._wake.is_set())

    async def _turn(self) -> bool:
        """Do whatever is due; return False when nothing is."""
        while not (self._client.state == "ready" and (self._learner.is_up or self._learner.astray)):
            self._client.wake()
            await asyncio.sleep(POLL_SECONDS)
        compared = await self._compare()
        return await self._alone(self._advance) or compared or await self._sample()

    async def _advance(self) -> bool:
        learner = self._learner
        if learner.ledger.pending is not None:
            await learner.finish()
            return True
        for due in (
            learner.return_if_worse,
            learner.saver.propose_if_due,
            self.save_if_due,
            learner.saver.judge_checkpoints,
        ):
            if await due():
                return True
        groups = self._enough()
        if groups:
            await learner.learn(groups)
        return bool(groups)

    async def save_if_due(self) -> bool:
        """Save a checkpoint if there were enough updates since the last; return whether it was."""
        if self._learner.ledger.counters.since_checkpoint < self._config.checkpointing.interval:
            return False
        await self._learner.saver.checkpoint(None)
        return True

    @property
    def has_enough(self) -> bool:
        """Whether there are completions for an update."""
        return self._learner.ledger.buffer.usable >= self._need

    def lacking(self) -> int | None:
        """Return how many completions are lacking for an update; None while the loop is stopped."""
        return self._need - self._learner.ledger.buffer.usable if self.running else None

    @property
    def _need(self) -> int:
        steps = self._training.gradient_accumulation_steps
        return min(self._training.update_frequency * steps, self._learner.ledger.buffer.capacity)

    def _enough(self) -> list[list[Trajectory]]:
        """Return the groups of one update; none while there are too few."""
        ledger, version = self._learner.ledger, self._learner.version
        if self.has_enough:
            ledger.take(0, version)  # what is too old goes
        return ledger.take(self._need, version) if self.has_enough else []

    def look_back(self) -> None:
        """Pause when nothing good came of the last updates."""
        course = self._learner.ledger.counters.course
        if course.lost and self.running:
            reason = f"{course.in_a_row} updates in a row were rolled back"
            log.error("training diverged", extra={"fields": {"reason": reason}})
            self.stop(reason)
