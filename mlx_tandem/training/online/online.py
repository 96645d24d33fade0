"""The online loop: collect, score, update, validate, publish, beside a server that goes on serving.

Every trajectory and every update is in the database before anything follows from it, so that after the end of the
engine or of the process the trainer comes back to exactly where it was and nothing is trained on twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from mlx_tandem import limits
from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import Conflict, EngineDied, EngineUnavailable, TandemError
from mlx_tandem.training.online import advantages, lessons, prompts, status
from mlx_tandem.training.online.arms import Pair
from mlx_tandem.training.online.curriculum import Curriculum
from mlx_tandem.training.online.later import Later
from mlx_tandem.training.online.learner import Learner
from mlx_tandem.training.online.lessons import Lesson
from mlx_tandem.training.online.loop import Loop
from mlx_tandem.training.online.prompts import Prompt
from mlx_tandem.training.online.serving import Sampled, Serving, TrainingStatus, UpdateReport
from mlx_tandem.training.rewards import RewardModels, RewardPool, Scoring
from mlx_tandem.training.store.checkpoints import LATEST
from mlx_tandem.training.store.database import Statement
from mlx_tandem.training.store.shared import SharedDatabase
from mlx_tandem.training.trajectories import DropReason, Trajectory, is_across
from mlx_tandem.types import AdapterRef, SamplingParams

__all__ = ["OnlineLearner", "Sampled", "Serving", "TrainingStatus", "UpdateReport"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Alone = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Awaitable[Any]]

LAST_SAVE_SECONDS = 30.0
"""Time for a last checkpoint, which saves the next start from computing updates again."""


class OnlineLearner:
    """Belongs to one event loop. `bring_up` comes first, and again each time an engine is ready.

    One thing at a time is done to the trainer; whoever asks for another waits. A caller who goes away does not stop
    what was begun.
    """

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        serving: Serving,
        *,
        clock: Callable[[], float] = time.time,
        shared: SharedDatabase | None = None,
        models: RewardModels | None = None,
    ) -> None:
        """Begin without a trainer. `shared` is the database; None: one that lies beside the checkpoints.

        `models` are the reward models that scoring functions may name; None: there are none.
        """
        self.rewards = RewardPool(config.rl_training, models)
        self._config, self._training = config, config.rl_training
        self._client, self._serving, self._clock = client, serving, clock
        self._learner = Learner(config, client, serving, self.rewards, clock, shared)
        self._curriculum = Curriculum(config.rl_training.curriculum)
        self._lock = asyncio.Lock()
        self.later = Later(self._learner.ledger, self.add, clock)
        self._loop = Loop(config, client, self._learner, self._alone, self._compare, self._sample)
        self.lacking, self.waits = self._loop.lacking, partial(_waits, self._learner)
        self.export = partial(_export, self._learner, self._alone)
        self.adopt = partial(_adopt, self._learner, self._alone)
        self.teach = partial(_teach, self)
        self.is_resting = partial(_is_resting, self)
        self.save_for_idle = partial(_save_for_idle, self._learner, self._alone)
        self._work: set[asyncio.Task[Any]] = set()
        self.folder = self._learner.ledger.folder
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
        try:
            async with self._lock:
                await self._learner.bring_up()
        finally:
            self._loop.wake()  # what has failed is tried again by the loop
        if self._learner.trainer.left:
            log.warning("recovering", extra={"fields": {"updates": self._learner.trainer.left}})

            async def caught_up() -> None:
                log.info("recovered", extra={"fields": {"step": self._learner.trainer.step}})

            self._begin(caught_up).add_done_callback(self._after_recovery)

    def _after_recovery(self, task: asyncio.Task[None]) -> None:
        self._loop.wake()  # it tries again what has failed
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
        learner, ledger = self._learner, self._learner.ledger
        if not (learner.is_up and learner.trains) or ledger.pending is not None:  # of which the trainer may have a part
            return
        try:
            async with asyncio.timeout(LAST_SAVE_SECONDS):
                if ledger.unsaved:
                    await learner.saver.keep()
                if ledger.counters.since_checkpoint and not learner.saver.is_saved:
                    await learner.saver.checkpoint(None)
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
        self._learner.judging.see(trajectories)
        self._curriculum.see(trajectories)
        return await self._keep(trajectories, size)

    async def _keep(self, trajectories: Sequence[Trajectory], size: int) -> frozenset[str]:
        stale = [t for t in trajectories if self.is_stale(t.versions)]
        gone = Counter(t.group for t in stale)
        ids = frozenset(t.id for t in stale)
        fresh = [(t, size and size - gone[t.group]) for t in trajectories if t.tokens and t.id not in ids]
        try:
            await self._learner.ledger.add(fresh, [t.id for t in stale])
        finally:
            self._loop.wake()
        return ids

    def choose(self, asked: AdapterRef) -> Pair | None:
        """Return who answers a prompt that asks for this version and is collected; None: that version alone."""
        return self._learner.judging.choose(asked) if self._learner.is_up and self._loop.running else None

    def wait(self, prompt: Prompt, rewards: Sequence[float], n: int, pair: Pair) -> None:
        """Have a prompt, whose first answers got these rewards, answered by the pair's second version, too."""
        self._learner.judging.wait(prompt, rewards, n, pair)
        self._loop.wake()

    def record_prompt(
        self, prompt: tuple[int, ...], scoring: Scoring, params: SamplingParams, text: str = "", *, alone: bool = False
    ) -> None:
        """Keep a prompt that the loop may answer itself, `group_size` times, when it lacks something to learn from.

        With `alone` the request has one answer, which has nothing to be compared with: the loop then makes `siblings`
        answers to it once, also without `group_size`.
        """
        if self._training.group_size > 1:
            self._curriculum.add(Prompt(prompt, scoring, params, text))
        elif alone and self._training.siblings:
            self._curriculum.add(Prompt(prompt, scoring, params, text), 1)
        self._loop.wake()

    # -- what can be asked for ------------------------------------------------------------------------------------

    async def update(
        self,
        trajectories: Sequence[Trajectory] = (),
        *,
        ids: Sequence[str] = (),
        publish: bool = True,
        checkpoint_name: str | None = None,
    ) -> UpdateReport:
        """Learn now: from these, from those that wait under `ids`, or, without either, from all that the buffer holds.

        A checkpoint is saved only if something was learned and kept. Raises Conflict, EngineError, StorageError.
        """
        _check_trains(self._learner)
        ledger = self._learner.ledger
        if checkpoint_name is not None:
            limits.check_name(checkpoint_name, "checkpoint_name")
            if any(info.name == checkpoint_name for info in ledger.listed):
                raise Conflict(f"there is a checkpoint {checkpoint_name!r}", param="checkpoint_name")

        async def work() -> UpdateReport:
            await self._finish()
            await self._learner.saver.propose_if_due()
            dropped: dict[DropReason, list[int]] = {}
            if trajectories or ids:
                self._learner.judging.see_sent(trajectories)
                groups, dropped = ledger.accept(trajectories, self._learner.version)
                groups += advantages.varying(ledger.buffer.pick(ids))
            else:
                groups = ledger.take(ledger.buffer.capacity, self._learner.version)
            if groups:
                report = await self._learner.learn(groups, publish=publish)
            else:
                report = self._learner.nothing()
            await _conclude(self._learner, self._loop, report, checkpoint_name)
            return msgspec.structs.replace(report, dropped_at={why: tuple(at) for why, at in dropped.items()})

        return await self._alone(work)

    async def checkpoint(self, name: str | None = None) -> str:
        """Save the trainer as it is and return the checkpoint's name. Raises Conflict, StorageError, EngineError."""
        _check_trains(self._learner)

        async def work() -> str:
            await self._finish()
            return await self._learner.saver.checkpoint(name)

        return await self._alone(work)

    async def rollback(self, to: str | None = None) -> AdapterRef:
        """Take trainer and serving back: to a version, a checkpoint, or (None) the last good one. Raises NotFound."""
        _check_trains(self._learner)
        await _check_there(self._learner, to)
        return await self._alone(lambda: self._learner.rollback(to))

    async def switch(self, to: str) -> AdapterRef:
        """Serve another version or checkpoint, until the next one is published. Raises NotFound.

        LATEST is the version that the trainer's weights are.
        """
        to = str(self._learner.version) if to == LATEST else to
        await _check_there(self._learner, to)
        return await self._alone(lambda: self._learner.switch(to))

    def status(self) -> TrainingStatus:
        """Return how the loop is doing now."""
        return status.of(
            self._config,
            self._learner,
            self._loop,
            self._serving.current(),
            bool(self._work),
            self._curriculum.recorded,
        )

    # -- one thing at a time --------------------------------------------------------------------------------------

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._client.in_use():
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

        def done(task: asyncio.Task[T]) -> None:
            self._work.discard(task)
            if not task.cancelled():
                task.exception()  # nobody may be left who waits for it

        task = asyncio.create_task(run())
        self._work.add(task)
        task.add_done_callback(done)
        return task

    async def _finish(self) -> None:
        """Bring what was begun to its end before anything else is done to the trainer."""
        if self._learner.ledger.pending is not None:
            await self._learner.finish()

    async def _compare(self) -> bool:
        """Have prompts of the control arm answered by the other version, and keep these answers to learn from."""
        groups = await self._learner.judging.draw()
        for group in groups:
            self._curriculum.see(group)
            if not self.is_stale(group[0].versions):
                await self._keep(group, 0 if is_across(group[0].group) else len(group))
        return bool(groups)

    async def _sample(self) -> bool:
        """Answer recorded prompts, as many as an update needs."""
        size = self._training.group_size if self._training.group_size > 1 else self._training.siblings
        if not len(self._curriculum) or size < 2:
            return False
        chosen = self._curriculum.next(max(1, -(-self._training.update_frequency // size)))
        ref = self._learner.ref
        groups = await prompts.groups(self._serving, self.rewards, chosen, size, ref, self._clock)
        for prompt, group in zip(chosen, groups, strict=True):
            self._curriculum.answered(prompt, group, size)
            if group:
                await self._keep(group, len(group))
        return bool(chosen)


async def _adopt(learner: Learner, alone: Alone, number: int, write: Callable[[str], Awaitable[None]]) -> None:
    """Go on from the weights that `write` puts into the folder that it gets, as version `number` if that is new.

    Raises EngineError, StorageError.
    """
    await alone(lambda: learner.adopt(number, write))


async def _export(learner: Learner, alone: Alone, digest: str, folder: str) -> bool:
    """Write the adapter that the trainer is now into an empty folder if its content is `digest`; return whether it was.

    Raises EngineError, StorageError.
    """

    async def work() -> bool:
        head = learner.versions.head
        if head is None or head.ref.digest != digest:
            return False
        await learner.client.save_trainer(learner.trainer.name, folder, optimizer=False)
        return True

    return bool(await alone(work))


async def _conclude(learner: Learner, loop: Loop, report: UpdateReport, checkpoint_name: str | None = None) -> None:
    """Do what follows an update that somebody has asked for."""
    undone = await learner.return_if_worse()
    await learner.saver.propose_if_due()
    loop.look_back()
    if checkpoint_name is not None and report.outcome in ("published", "kept") and not undone:
        await learner.saver.checkpoint(checkpoint_name)
    await loop.save_if_due()
    await learner.saver.judge_checkpoints()


async def _teach(
    online: OnlineLearner, lesson: Lesson, learning_rate: float, noted: Sequence[Statement]
) -> UpdateReport:
    """Learn from a lesson now; `noted` is written with the update. Raises Conflict, EngineError, StorageError."""
    learner = online._learner
    _check_trains(learner)

    async def work() -> UpdateReport:
        await online._finish()
        await learner.saver.propose_if_due()
        report = await lessons.teach(learner, online._training, lesson, learning_rate, noted)
        await _conclude(learner, online._loop, report)
        return report

    return await online._alone(work)


def _waits(learner: Learner, id: str) -> Trajectory | None:
    """Return the collected trajectory with this id, if it waits to be learned from."""
    return learner.ledger.buffer.get(id)


async def _check_there(learner: Learner, to: str | None) -> None:
    """Raise NotFound at once for a version or checkpoint that does not exist, whatever is being learned meanwhile.

    While versions are being made again after a crash, nobody knows yet.
    """
    if to is not None and learner.is_up:
        await asyncio.to_thread(learner.find, to)


def _check_trains(learner: Learner) -> None:
    if not learner.trains:
        raise Conflict("nothing is trained here: the mode is inference_only", param="mode")


def _is_resting(online: OnlineLearner) -> bool:
    """Return whether nothing is done to the trainer, and nothing is due."""
    return online._loop.is_resting and not online._work and not online._lock.locked()


async def _save_for_idle(learner: Learner, alone: Alone) -> bool:
    """Save what the next engine needs to go on from here; return False if that is not possible.

    It is not while an update is under way, or while the trainer is not where it should be.
    """
    ledger = learner.ledger
    if not learner.is_up or ledger.pending is not None:
        return False
    if ledger.unsaved and learner.trains:
        await alone(learner.saver.try_to_keep)
        return not ledger.unsaved
    return True
