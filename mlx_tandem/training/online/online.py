"""The online loop: collect, score, update, validate, publish, beside a server that goes on serving.

Every trajectory and every update is in the journal before anything follows from it, so that after the end of the
engine or of the process the trainer comes back to exactly where it was and nothing is trained on twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from mlx_tandem import limits
from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import Conflict, EngineDied, EngineUnavailable, TandemError
from mlx_tandem.training.online import prompts
from mlx_tandem.training.online.learner import Learner
from mlx_tandem.training.online.loop import Loop
from mlx_tandem.training.online.prompts import Prompt, Recorded
from mlx_tandem.training.online.serving import Sampled, Serving, TrainingStatus, UpdateReport
from mlx_tandem.training.rewards import RewardPool, Scoring
from mlx_tandem.training.trajectories import DropReason, Trajectory
from mlx_tandem.types import AdapterRef, SamplingParams

__all__ = ["OnlineLearner", "Sampled", "Serving", "TrainingStatus", "UpdateReport"]

log = logging.getLogger(__name__)
T = TypeVar("T")

LAST_SAVE_SECONDS = 30.0
"""Time for a last checkpoint, which saves the next start from computing updates again."""


class OnlineLearner:
    """Belongs to one event loop. `bring_up` comes first, and again each time an engine is ready.

    One thing at a time is done to the trainer; whoever asks for another waits. A caller who goes away does not stop
    what was begun.
    """

    def __init__(
        self, config: Config, client: EngineClient, serving: Serving, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.rewards = RewardPool(config.rl_training)
        self._config, self._training = config, config.rl_training
        self._client, self._serving, self._clock = client, serving, clock
        self._learner = Learner(config, client, serving, self.rewards, clock)
        self._recorded = Recorded()
        self._lock = asyncio.Lock()
        self._loop = Loop(config, client, self._learner, self._alone, self._sample)
        self._work: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def history(self) -> deque[UpdateReport]:
        """Of the last updates, oldest first."""
        return self._learner.history

    @property
    def newest_version(self) -> int:
        """The highest version number of the trained adapter that was ever given."""
        return self._learner.versions.last

    # -- life -----------------------------------------------------------------------------------------------------

    async def bring_up(self) -> None:
        """Open the trainer and serve a version of it. Raises StorageError, InvalidRequest, EngineError.

        Where updates have to be computed again before it is where it was, that is done while everything else goes on.
        """
        async with self._lock:
            await self._learner.bring_up()
        if self._learner.trainer.left:
            log.warning("recovering", extra={"fields": {"updates": self._learner.trainer.left}})
            self._begin(self._caught_up).add_done_callback(self._after_recovery)
        self._loop.wake()

    async def _caught_up(self) -> None:
        log.info("recovered", extra={"fields": {"step": self._learner.trainer.step}})

    def _after_recovery(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineDied | EngineUnavailable):  # the next engine is brought up to there, too
            return
        if error is not None and self._learner.astray:
            log.error("learning cannot go on", extra={"fields": {"error": str(error)}})
            self._loop.stop(f"updates could not be computed again: {error}")

    def start(self) -> None:
        """Let the loop learn from what is collected; without effect where nothing is trained."""
        if self._learner.trains:
            self._loop.start()

    def stop(self) -> None:
        """End the loop after what it is doing; completions are still collected."""
        self._loop.stop()

    async def close(self) -> None:
        """End the loop and the reward workers, and bring what is known to the drive. What is cut off goes on at the
        next start.
        """
        self._closed = True  # whatever began from here on would be forgotten by the last checkpoint
        self._loop.stop()
        tasks = [t for t in (self._loop.task, *self._work) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._learner.ledger.settled()
        try:
            await self._save_at_the_end()
        finally:
            await self.rewards.close()
            await self._learner.ledger.close()

    async def _save_at_the_end(self) -> None:
        learner = self._learner
        if not (learner.is_up and learner.trains and learner.ledger.counters.since_checkpoint):
            return
        if learner.ledger.pending is None:
            try:
                async with asyncio.timeout(LAST_SAVE_SECONDS):
                    await learner.checkpoint(None)
            except (TandemError, TimeoutError) as e:
                log.warning("no last checkpoint", extra={"fields": {"error": str(e)}})

    # -- what comes in --------------------------------------------------------------------------------------------

    def is_stale(self, versions: Sequence[int]) -> bool:
        """Return whether a completion by these versions is too old already to be learned from."""
        learner = self._learner
        return learner.is_up and learner.ledger.is_stale(versions, learner.version)

    async def add(self, trajectories: Sequence[Trajectory], size: int = 0) -> frozenset[str]:
        """Take scored completions, which are on the drive when this returns; those that were added before are left out.

        `size`: how many the group of each will have in all; 0: nobody knows. Returns the ids of those that were dropped
        since they are too old already. Raises StorageError, EngineUnavailable.
        """
        ledger = self._learner.ledger
        if not ledger.is_open:
            raise EngineUnavailable("learning has not started yet")
        for t in trajectories:
            if t.versions and t.versions[-1] and not t.external and not self._training.validation_prompts:
                self._learner.watch.add(t.versions[-1], t.reward)
        stale = [t for t in trajectories if self.is_stale(t.versions)]
        gone = Counter(t.group for t in stale)
        ids = frozenset(t.id for t in stale)
        ledger.drop_stale(stale)
        try:
            await ledger.add([(t, size and size - gone[t.group]) for t in trajectories if t.tokens and t.id not in ids])
        finally:
            self._loop.wake()
        return ids

    def record_prompt(self, prompt: tuple[int, ...], scoring: Scoring, params: SamplingParams, text: str = "") -> None:
        """Keep a prompt that the loop may answer itself, `group_size` times, when it lacks something to learn from."""
        if self._training.group_size > 1:
            self._recorded.add(Prompt(prompt, scoring, params, text))
            self._loop.wake()

    # -- what can be asked for ------------------------------------------------------------------------------------

    async def update(
        self, trajectories: Sequence[Trajectory] = (), *, publish: bool = True, checkpoint_name: str | None = None
    ) -> UpdateReport:
        """Learn now, from these or else from what the buffer holds. Raises Conflict, EngineError, StorageError."""
        self._check_trains()
        ledger = self._learner.ledger
        if checkpoint_name is not None:
            limits.check_name(checkpoint_name, "checkpoint_name")
            if any(info.name == checkpoint_name for info in ledger.listed):
                raise Conflict(f"there is a checkpoint {checkpoint_name!r}", param="checkpoint_name")

        async def work() -> UpdateReport:
            await self._finish()
            dropped: dict[DropReason, list[int]] = {}
            if trajectories:
                groups, dropped = ledger.accept(trajectories, self._learner.version)
            else:
                groups = ledger.take(ledger.buffer.capacity, self._learner.version)
            if groups:
                report = await self._learner.learn(groups, publish=publish)
            else:
                report = self._learner.nothing()
            self._loop.look_back()
            if checkpoint_name is not None:
                await self._learner.checkpoint(checkpoint_name)
            await self._loop.save_if_due()
            await self._learner.judge_checkpoints()
            return msgspec.structs.replace(report, dropped_at={why: tuple(at) for why, at in dropped.items()})

        return await self._alone(work)

    async def checkpoint(self, name: str | None = None) -> str:
        """Save the trainer as it is and return the checkpoint's name. Raises Conflict, StorageError, EngineError."""
        self._check_trains()

        async def work() -> str:
            await self._finish()
            return await self._learner.checkpoint(name)

        return await self._alone(work)

    async def rollback(self, to: str | None = None) -> AdapterRef:
        """Take trainer and serving back: to a version, a checkpoint, or (None) the last good one. Raises NotFound."""
        self._check_trains()
        return await self._alone(lambda: self._learner.rollback(to, manual=True))

    async def switch(self, to: str) -> AdapterRef:
        """Serve another version or checkpoint, until the next one is published. Raises NotFound."""
        return await self._alone(lambda: self._learner.switch(to))

    def status(self) -> TrainingStatus:
        """Return how the loop is doing now."""
        learner, ledger = self._learner, self._learner.ledger
        counters, counts = ledger.counters, ledger.buffer.counts
        current = self._serving.current()
        last = learner.history[-1] if learner.history else None
        when = counters.last_update
        return TrainingStatus(
            training_enabled=self._training.enabled,
            mode=self._config.engine.duty.mode,
            running=self._loop.running,
            busy=self._loop.running and (bool(self._work) or self._loop.has_enough),
            reason=self._loop.reason,
            recovering=learner.trainer.left,
            current_lora="" if current is None else current.label,
            version=0 if current is None else current.version,
            step=learner.trainer.step,
            updates=counters.updates,
            trajectories_collected=counts.collected,
            buffered=len(ledger.buffer),
            dropped_stale=counts.dropped_stale,
            dropped_duplicate=counts.dropped_duplicate,
            dropped_overflow=counts.dropped_overflow,
            skipped_groups=counts.skipped_groups,
            advice=self._advice(),
            last_update=None if when is None else datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            loss=0.0 if last is None else last.loss,
            kl=0.0 if last is None else last.kl,
            mean_reward=0.0 if last is None else last.mean_reward,
            grad_norm=0.0 if last is None else last.grad_norm,
            learning_rate=self._training.learning_rate * counters.course.rate_scale,
            rollbacks=counters.course.rollbacks,
            last_verdict="ok" if last is None else last.verdict,
            checkpoint_saves=counters.checkpoint_saves,
            publishes=counters.publishes,
            available_checkpoints=tuple(info.name for info in ledger.listed),
            serving_ms=self._client.stats.serving_ms,
            training_ms=self._client.stats.training_ms,
        )

    def _advice(self) -> str:
        """Return what to do about trajectories that are dropped; empty: none are."""
        counts, training = self._learner.ledger.buffer.counts, self._training
        said = []
        if counts.dropped_stale:
            said.append(
                f"{counts.dropped_stale} trajectories were not learned from because the versions that made them were "
                f"more than max_staleness = {training.max_staleness} away from the one that was trained: ask for "
                f"{training.adapter} itself rather than for the base or an older version, raise "
                "rl_training.max_staleness, or raise rl_training.update_frequency, so that there are fewer versions."
            )
        if counts.dropped_overflow:
            said.append(
                f"{counts.dropped_overflow} trajectories were not learned from because the buffer was full: raise "
                "rl_training.trajectory_buffer_size or learning's share of the device, or collect fewer."
            )
        return " ".join(said)

    # -- one thing at a time --------------------------------------------------------------------------------------

    def _check_trains(self) -> None:
        if not self._learner.trains:
            raise Conflict("nothing is trained here: the mode is inference_only", param="mode")

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        async def run() -> T:
            async with self._lock:
                if self._closed:
                    raise EngineUnavailable("the server is shutting down")
                if self._learner.astray:
                    await self._learner.catch_up()
                if not self._learner.is_up:
                    raise EngineUnavailable("the engine is not there")
                return await work()

        task = asyncio.create_task(run())
        self._work.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left who waits for it

    async def _finish(self) -> None:
        """Bring what was begun to its end before anything else is done to the trainer."""
        if self._learner.ledger.pending is not None:
            await self._learner.finish()

    async def _sample(self) -> bool:
        """Answer recorded prompts, as many as an update needs."""
        size = self._training.group_size
        if not len(self._recorded):
            return False
        chosen = self._recorded.next(max(1, -(-self._training.update_frequency // size)))
        ref = self._learner.ref
        for group in await prompts.groups(self._serving, self.rewards, chosen, size, ref, self._clock):
            if group:
                await self.add(group, len(group))
        return True
