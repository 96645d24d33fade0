"""What is done to the one trainer: brought back, updated, judged, published, saved, rolled back. One thing at a time.

An update is written down before it is computed and its end afterwards. What fails in between because the engine ended
is computed again on the next one; what the engine refuses, or fails at too often, is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from msgspec.structs import asdict, replace

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import AdamParams
from mlx_tandem.errors import EngineError, EngineUnavailable, ModelError, NotFound, TandemError
from mlx_tandem.files import StorageError
from mlx_tandem.training.online import advantages, baselines, takeover, update
from mlx_tandem.training.online.judging import Judging
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.policy import Behind, PolicyTrainer
from mlx_tandem.training.online.prompts import Scorer
from mlx_tandem.training.online.reference import ReferencePolicy
from mlx_tandem.training.online.saving import Saver
from mlx_tandem.training.online.serving import Serving, UpdateReport
from mlx_tandem.training.online.states import States, Way
from mlx_tandem.training.online.update import Finding, Pending
from mlx_tandem.training.online.versions import Versions
from mlx_tandem.training.store.checkpoints import BEST, CheckpointInfo
from mlx_tandem.training.store.records import GOOD, Began, Ended
from mlx_tandem.training.store.rows import MOST_UPDATES
from mlx_tandem.training.store.shared import SharedDatabase
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""An update that has failed so often with its engine is not tried again."""


class Learner:
    """Used by one task at a time; `OnlineLearner` sees to that."""

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        serving: Serving,
        rewards: Scorer,
        clock: Callable[[], float],
        shared: SharedDatabase | None = None,
    ) -> None:
        """Begin without a trainer. `shared` is the database; None: one that lies beside the checkpoints."""
        self.ledger = Ledger(config, shared)
        self.versions = Versions(client, serving)
        self.states = States(self.ledger, config.rl_training.adapter)
        self.trainer = PolicyTrainer(config, client, self.versions, self.states)
        self.history: deque[UpdateReport] = deque(maxlen=MOST_UPDATES)
        """The reports of the last updates, oldest first."""
        self.judging = Judging(config.rl_training, self.ledger, self.versions, serving, rewards, clock)
        self._config, self._training = config, config.rl_training
        self.client, self._serving, self._clock = client, serving, clock
        self.reference = ReferencePolicy(config.rl_training, client, self.trainer, self.ledger)
        self.saver = Saver(config, client, serving, self.ledger, self.versions, self.trainer, self.judging, self.states)
        self._was_up = False
        self._epoch = -1  # client.epoch of the engine that the trainer lives in
        self._is_open = False
        self._behind: Behind | None = None

    @property
    def is_up(self) -> bool:
        """Whether the trainer is where the ledger says, in the engine that runs now."""
        return self._is_open and self._epoch == self.client.epoch

    @property
    def astray(self) -> bool:
        """Whether the trainer still has to be recovered although its engine runs."""
        return not self._is_open and self._epoch == self.client.epoch

    @property
    def ref(self) -> AdapterRef | None:
        """The version that the trainer's weights are, or the one that is served when they were never published."""
        return self._serving.current() if self.versions.head is None else self.versions.head.ref

    @property
    def version(self) -> int:
        """The number of the version that the trainer's weights are; 0: there is none."""
        return 0 if self.ref is None else self.ref.version

    # -- coming back ----------------------------------------------------------------------------------------------

    async def bring_up(self) -> None:
        """Open a trainer on the engine that runs now, and serve a version of it.

        Both are exactly where the last ones were, unless updates since the newest state have to be computed again for
        that, which `catch_up` does.
        """
        self._is_open, self._behind, self._epoch = False, None, self.client.epoch
        self.saver.saved = ""
        if not self.ledger.is_open:
            reports = await self.ledger.open(lambda manifest: takeover.take_over(self.ledger, manifest))
            self.history.extendleft(reversed(reports))
            await asyncio.to_thread(takeover.clear, self.ledger.checkpoints.folder)
            await self.states.read()
        if not self._was_up:
            await asyncio.to_thread(self.judging.validation.read, self._training, self.client.info)
            self.judging.live.means.update(self.ledger.counters.means)
            self._was_up = True
        start = await self.states.start()
        highest = max([self.ledger.counters.last_version, *(s.version for s in self.states)])
        folders = {i.digest: str(self.ledger.checkpoints.path(i.name)) for i in reversed(self.ledger.listed)}
        if not self.trains:
            start = start._replace(way=start.way._replace(updates=()))
        self._behind = await self.trainer.begin(start, folders, highest)
        if start.is_lost:
            where = "the very beginning" if start.way.base is None else start.way.base.folder
            log.warning("updates lost", extra={"fields": {"continues from": where}})
        if not self.trainer.left:
            await self.catch_up()
        if self.judging.compares and self.trains:
            await self.judging.find_accepted(self.client)

    async def catch_up(self) -> None:
        """Take the trainer, which is not up, to exactly where the last one was, and serve its version."""
        if self._behind is None:  # it has failed at this before
            await self.bring_up()
        behind, self._behind = self._behind, None
        if behind is not None:
            await self.trainer.catch_up(behind)
            head = self.versions.head
            if head is not None:
                self.saver.saved = _twin(self.ledger.listed, head.ref.digest, self.trainer.step)
            self._is_open = True
            if self.ledger.unsaved and self.trains:
                await self.saver.try_to_keep()  # so that nothing of it is computed a third time

    @property
    def trains(self) -> bool:
        """Whether anything is trained at all."""
        return self._config.engine.duty.mode != "inference_only"

    # -- updates --------------------------------------------------------------------------------------------------

    async def learn(self, groups: Sequence[Sequence[Trajectory]], *, publish: bool = True) -> UpdateReport:
        """Do one update from groups that vary. Raises EngineError and StorageError; it is pending then, and `finish`
        goes on with it.
        """
        trajectories = [t for group in groups for t in group]
        config = self._training
        began = Began(
            step=self.trainer.step + 1,
            trajectories=tuple(t.id for t in trajectories),
            batches=advantages.batches(groups, config, self.ledger.counters.baselines),
            adam=update.adam(config, self.trainer.step + 1, self.ledger.counters.course.learning_rate),
            micro_batch_tokens=self.client.check_ready().micro_batch_tokens,
            publish=publish,
            steps=config.steps_per_update,
            rewards=baselines.rewards_across(groups),
        )
        self.ledger.begin(Pending(began, trajectories, self.ledger.untold()), write=self.reference.is_base)
        return await self.finish()

    async def finish(self) -> UpdateReport:
        """Do the pending update."""
        pending = self.ledger.pending
        assert pending is not None
        pending.attempts += 1
        started = time.monotonic()
        try:
            if not pending.written:  # the database gets everything that the result depends on
                pending.began = await self.reference.filled(pending.began)
                self.ledger.begin(pending)
            await self.ledger.flush()
            head = self.versions.head
            version = 0 if head is None else head.ref.version
            finding = await update.attempt(self.client, pending, version, self._training)
            report = await self._conclude(pending, finding, started)
        except TandemError as e:
            report = await self._failed(pending, e, started)
        await self._tidy()
        return report

    async def _conclude(self, pending: Pending, finding: Finding, started: float) -> UpdateReport:
        if finding.outcome is not None:
            return self._end(pending, finding, started)
        if not pending.began.publish:
            await self.client.settle_trainer(self.trainer.name, keep=True)
            return self._end(pending, replace(finding, outcome="kept"), started)
        asked = time.perf_counter()
        try:
            info = await self.client.publish_trainer(self.trainer.name)
        except ModelError as e:
            return await self._roll_back(pending, replace(finding, reason=e.message), started)
        ready = _Ready(info, (time.perf_counter() - asked) * 1e3)
        reward = None
        if self.judging.validation.prompts:
            new = info.digest not in self.versions.digests
            candidate = self.versions.reserve(info).ref
            reward = await self.judging.validate(candidate)
            if reward is None or self.ledger.counters.trial.is_worse(self._training.guard_false_rollback):
                reason = "no rewards on the validation prompts" if reward is None else self.judging.said_worse
                report = await self._roll_back(pending, replace(finding, reason=reason), started, reward)
                if new:
                    await self.versions.retire(candidate)
                if reward is not None:
                    await self._return()
                return report
        await self.client.settle_trainer(self.trainer.name, keep=True)
        return self._end(pending, replace(finding, outcome="published"), started, ready, reward)

    async def _roll_back(
        self, pending: Pending, finding: Finding, started: float, reward: float | None = None
    ) -> UpdateReport:
        await self.client.settle_trainer(self.trainer.name, keep=False)
        finding = replace(finding, outcome="rolled_back", step=self.trainer.step)
        return self._end(pending, finding, started, validation=reward)

    def nothing(self) -> UpdateReport:
        """Return the report of an update that had nothing to learn from."""
        began = Began(self.trainer.step, (), (), AdamParams(0.0), 0)
        left_out = self.ledger.untold()
        dropped = ", ".join(f"{count} {reason}" for reason, count in left_out.dropped.items() if count)
        reason = "no group has rewards that vary" + (f"; trajectories were dropped: {dropped}" if dropped else "")
        finding = Finding("skipped", reason, step=self.trainer.step, loss=0.0)
        return update.report(Pending(began, (), left_out), finding, 0.0, None)

    def _end(
        self,
        pending: Pending,
        finding: Finding,
        started: float,
        ready: _Ready | None = None,
        validation: float | None = None,
    ) -> UpdateReport:
        """Write the end down and make it so: all of it or nothing, as nothing here waits."""
        counters = self.ledger.counters
        report = update.report(pending, finding, time.monotonic() - started, validation)
        self.trainer.step = finding.step
        if report.outcome in GOOD:
            self.saver.saved = ""
        if ready is not None:
            began = time.perf_counter()
            ref = self.versions.publish(ready.info)
            swap_ms = (time.perf_counter() - began) * 1e3
            report = replace(report, version=ref.version, ready_ms=ready.ms, swap_ms=swap_ms)
            counters.publishes += 1
            self.judging.validation.present = validation
        elif finding.outcome == "kept":
            self.versions.head = self.judging.validation.present = None
        digest = "" if ready is None else ready.info.digest
        counters.last_update = self._clock()
        self.ledger.end(Ended(self.trainer.step, report.outcome, digest, report.version), report)
        self.history.append(report)
        self._serving.updated(report, pending.trajectories)
        bad = report.outcome in ("rolled_back", "refused", "skipped")
        log.log(logging.WARNING if bad else logging.INFO, f"update {report.outcome}", extra={"fields": asdict(report)})
        return report

    async def _failed(self, pending: Pending, error: TandemError, started: float) -> UpdateReport:
        """Take the trainer back to where it was. Raises `error` when the update is worth another attempt.

        One that the drive does not take waits for it as long as it lasts: what would begin in its place is not taken
        either, and what it was to learn from would be lost.
        """
        await self._take_back()
        if isinstance(error, StorageError):
            raise error
        passing = isinstance(error, EngineError) or not self.is_up
        if passing and pending.attempts < MAX_ATTEMPTS:
            if isinstance(error, EngineError):
                raise error
            raise EngineUnavailable("the engine ended during the update") from error
        return self._end(pending, Finding("skipped", error.message, step=self.trainer.step), started)

    async def _take_back(self) -> None:
        """Drop gradients and a step that is not settled; a trainer that cannot is brought up again."""
        try:
            await self.client.settle_trainer(self.trainer.name, keep=False)
        except TandemError:
            self._is_open = False

    async def _tidy(self) -> None:
        """Do what may wait, and whose failing changes nothing."""
        kept = self.saver.kept(self.ledger.listed)
        self.judging.live.keep(kept)
        self.ledger.counters.means = self.judging.live.means
        try:
            await self.ledger.flush()
        except StorageError as e:  # it is written with what comes next
            log.error("update not written", extra={"fields": {"error": e.message}})
        await self.versions.retire_except(kept)
        self.judging.arms.updated()
        if self.states.is_due:
            await self.saver.try_to_keep()

    # -- versions -------------------------------------------------------------------------------------------------

    async def return_if_worse(self) -> bool:
        """Go back to the accepted version if those since then are shown to be worse; return whether they were."""
        if not (self.judging.compares and self.judging.is_worse):
            return False
        log.warning("versions are worse", extra={"fields": {"reason": self.judging.said_worse}})
        self.ledger.counters.course.note("rolled_back")
        await self._return()
        return True

    async def _return(self) -> None:
        """Go back to the accepted version, from which the comparison begins again."""
        trial, head = self.ledger.counters.trial, self.versions.head
        accepted = trial.accepted
        trial.begin(accepted)
        if accepted is not None and (head is None or head.ref.digest != accepted.digest):
            await self._go(await self._way_to(accepted.checkpoint))

    async def rollback(self, to: str | None) -> AdapterRef:
        """Take trainer and serving back to a version that somebody has chosen, durably. Raises NotFound."""
        way = await self._way_to(to)
        self.ledger.counters.trial.begin(None)  # whoever wants it back does not want it compared with another
        return await self._go(way)

    async def _way_to(self, to: str | None) -> _Goal:
        """Return how the trainer gets to what `to` names, with the optimiser of that time. Raises NotFound.

        A version lies in a checkpoint, or a state and the updates after it lead to it. None names the accepted version,
        or the newest one before this one.
        """
        names = await asyncio.to_thread(_before, self) if to is None else [to]
        for name in names:
            folder, digest = await asyncio.to_thread(self.find, name)
            way = None if folder else await self.states.way(digest)
            if folder or way is not None:
                return _Goal(folder, digest, way)
        raise NotFound(
            f"the optimiser of version {names[-1]} is gone, since no checkpoint and none of the newest states has it: "
            "POST /model/switch-lora serves that version; training can go back to a checkpoint or to a later version",
            param="to",
            code="version_not_found",
        )

    async def _go(self, goal: _Goal) -> AdapterRef:
        self._is_open = False  # until both sides tell the same story again
        if goal.way is not None:
            await self.trainer.follow(goal.way)
        else:
            await self.trainer.open(goal.folder)
        info = await self.client.publish_trainer(self.trainer.name)
        ref = self.versions.publish(info, goal.folder)
        self.judging.validation.present = None
        self.ledger.drop_pending()
        await self.saver.keep()  # from here on it is durable
        self.saver.saved = _twin(self.ledger.listed, goal.digest, self.trainer.step)
        await self.saver.checkpoint(None, guards=True)
        self._is_open = True
        log.warning("rolled back", extra={"fields": {"version": ref.version}})
        return ref

    async def adopt(self, number: int, write: Callable[[str], Awaitable[None]]) -> AdapterRef:
        """Go on from other weights, which are served as version `number` if that is new; the optimiser stays as it is.

        `write` puts the weights into the folder that it gets, where the trainer has been saved. Raises EngineError,
        StorageError.
        """
        folder = await self.states.new()
        await self.client.save_trainer(self.trainer.name, folder)
        await write(folder)
        self._is_open = False  # until both sides tell the same story again
        await self.trainer.open(folder)
        info = await self.client.publish_trainer(self.trainer.name)
        self.versions.count_from(number - 1)
        ref = self.versions.publish(info)
        self.ledger.counters.trial.begin(None)
        self.judging.validation.present = None
        self.ledger.drop_pending()
        await self.saver.keep()  # from here on it is durable
        self._is_open = True
        return ref

    async def switch(self, to: str) -> AdapterRef:
        """Serve a version; the trainer goes on with its own. Raises NotFound."""
        folder, digest = await asyncio.to_thread(self.find, to)
        known = next((v for v in self.versions if v.ref.digest == digest), None)
        info = known.info if known is not None else await self.client.load_adapter(AdapterSource(folder))
        return self.versions.show(info, folder)

    def find(self, to: str) -> tuple[str, str]:
        """Return folder (empty: there is none) and digest of what `to` names. Raises NotFound."""
        return self.versions.find(to, self.trainer.name, self.ledger.checkpoints, self.ledger.listed)


def _before(learner: Learner) -> list[str]:
    """Return what may be gone back to when nobody says to what, best first: the accepted version, else those before
    this one.
    """
    head, accepted = learner.versions.head, learner.judging.accepted
    at = learner.versions.last + 1 if head is None else head.ref.version
    if accepted is not None and accepted.version != at:
        return [str(accepted.version)]
    older = sorted((v.ref.version for v in learner.versions if v.ref.version < at), reverse=True)
    return [str(number) for number in older] or ["0"]


def _twin(listed: Sequence[CheckpointInfo], digest: str, step: int) -> str:
    """Return the newest checkpoint with this content that can become the newest again; empty: none.

    The best one is a copy of another, and one that is made for the guard goes when the guard needs it no more.
    """
    found = [i for i in listed if i.name != BEST and (i.digest, i.step) == (digest, step)]
    return next((i.name for i in sorted(found, key=lambda i: i.guards)), "")


class _Goal(NamedTuple):
    """The place that the trainer goes back to: a checkpoint's folder (empty: none has the content), or a way."""

    folder: str
    digest: str
    way: Way | None


class _Ready(NamedTuple):
    """A version that the engine has, and how long it took to have it."""

    info: AdapterInfo
    ms: float
