"""What is done to the one trainer: brought back, updated, judged, published, saved, rolled back. One thing at a time.

An update is written down before it is computed and its end afterwards. What fails in between because the engine ended
is computed again on the next one; what the engine refuses, or fails at too often, is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import asdict, replace

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import AdamParams
from mlx_tandem.errors import EngineError, EngineUnavailable, ModelError, TandemError
from mlx_tandem.files import StorageError
from mlx_tandem.training.online import advantages, update
from mlx_tandem.training.online.guard import Rewards
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.policy import Behind, PolicyTrainer
from mlx_tandem.training.online.prompts import Judge, Scorer
from mlx_tandem.training.online.recovery import GOOD
from mlx_tandem.training.online.serving import Serving, UpdateReport
from mlx_tandem.training.online.update import Finding, Pending
from mlx_tandem.training.online.versions import Versions
from mlx_tandem.training.store.checkpoints import BEST, CheckpointInfo
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import Began, Ended
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource

log = logging.getLogger(__name__)

HISTORY = 1000
MAX_ATTEMPTS = 3
"""An update that has failed so often with its engine is not tried again."""


class Learner:
    """Used by one task at a time; `OnlineLearner` sees to that."""

    def __init__(
        self, config: Config, client: EngineClient, serving: Serving, rewards: Scorer, clock: Callable[[], float]
    ) -> None:
        self.ledger = Ledger(config)
        self.versions = Versions(client, serving)
        self.trainer = PolicyTrainer(config, client, self.versions)
        self.history: deque[UpdateReport] = deque(maxlen=HISTORY)
        self.watch = Rewards(config.rl_training.update_frequency, config.rl_training.guard_reward_drop)
        self._config, self._training = config, config.rl_training
        self._client, self._serving, self._clock = client, serving, clock
        self._judge = Judge(serving, rewards)
        self._was_up = False
        self._epoch = -1  # client.restarts of the engine that the trainer lives in
        self._is_open = False
        self._behind: Behind | None = None
        self._saved = ""  # the checkpoint that has exactly the trainer's state; empty: none has

    @property
    def is_up(self) -> bool:
        """Whether the trainer is where the ledger says, in the engine that runs now."""
        return self._is_open and self._epoch == self._client.restarts

    @property
    def astray(self) -> bool:
        """Whether the trainer still has to be recovered although its engine runs."""
        return not self._is_open and self._epoch == self._client.restarts

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

        Both are exactly where the last ones were, unless updates since the checkpoint have to be computed again for
        that, which `catch_up` does.
        """
        self._is_open, self._behind, self._epoch = False, None, self._client.restarts
        self._saved = ""
        manifest, records, held = await self.ledger.open()
        if not self._was_up:
            await asyncio.to_thread(self._judge.read, self._training, self._client.info)
            self.watch.means.update(self.ledger.counters.means)
            self._was_up = True
        folder = "" if manifest is None else str(self.ledger.checkpoints.path(manifest.name))
        highest = max(self.ledger.counters.last_version, 0 if manifest is None else manifest.version)
        todo = records if self.trains and held is not None else ()
        self._behind = await self.trainer.begin(manifest, folder, todo, held or 0, highest)
        if not self.trainer.left:
            await self.catch_up()
        if held is None:
            log.warning(
                "journal of another checkpoint", extra={"fields": {"checkpoint": getattr(manifest, "name", "")}}
            )
            if self.trains:
                await self.checkpoint(None)  # from here on both tell the same story again

    async def catch_up(self) -> None:
        """Take the trainer, which is not up, to exactly where the last one was, and serve its version."""
        if self._behind is None:  # it has failed at this before
            await self.bring_up()
        behind, self._behind = self._behind, None
        if behind is not None:
            await self.trainer.catch_up(behind)
            self._is_open = True

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
            batches=advantages.batches(groups, config),
            adam=update.adam(config, self.trainer.step + 1, self.ledger.counters.course.rate_scale),
            micro_batch_tokens=self._client.check_ready().micro_batch_tokens,
            publish=publish,
        )
        self.ledger.begin(Pending(began, trajectories, self.ledger.untold()))
        return await self.finish()

    async def finish(self) -> UpdateReport:
        """Do the pending update."""
        pending = self.ledger.pending
        assert pending is not None
        pending.attempts += 1
        started = time.monotonic()
        try:
            await self.ledger.flush()
            await self._judge.know_best(self.ledger.counters.course, self.ref)
            head = self.versions.head
            version = 0 if head is None else head.ref.version
            finding = await update.attempt(self._client, pending, version, self._training)
            report = await self._conclude(pending, finding, started)
        except TandemError as e:
            report = await self._failed(pending, e, started)
        await self._tidy()
        return report

    async def _conclude(self, pending: Pending, finding: Finding, started: float) -> UpdateReport:
        if finding.outcome is not None:
            return self._end(pending, finding, started)
        if not pending.began.publish:
            await self._client.settle_trainer(self.trainer.name, keep=True)
            return self._end(pending, replace(finding, outcome="kept"), started)
        asked = time.perf_counter()
        try:
            info = await self._client.publish_trainer(self.trainer.name)
        except ModelError as e:
            return await self._roll_back(pending, replace(finding, reason=e.message), started)
        ready = _Ready(info, (time.perf_counter() - asked) * 1e3)
        reward = None
        if self._judge.prompts:
            new = info.digest not in self.versions.digests
            candidate = self.versions.reserve(info).ref
            reward = await self._judge.reward(candidate)
            if not self.ledger.counters.course.passes(reward, self._training.guard_reward_drop):
                reason = "no rewards" if reward is None else f"mean reward {reward:.3g} on the validation prompts"
                report = await self._roll_back(pending, replace(finding, reason=reason), started, reward)
                if new:
                    await self.versions.retire(candidate)
                return report
        await self._client.settle_trainer(self.trainer.name, keep=True)
        return self._end(pending, replace(finding, outcome="published"), started, ready, reward)

    async def _roll_back(
        self, pending: Pending, finding: Finding, started: float, reward: float | None = None
    ) -> UpdateReport:
        await self._client.settle_trainer(self.trainer.name, keep=False)
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
            self._saved = ""
        if ready is not None:
            began = time.perf_counter()
            ref = self.versions.publish(ready.info)
            swap_ms = (time.perf_counter() - began) * 1e3
            report = replace(report, version=ref.version, ready_ms=ready.ms, swap_ms=swap_ms)
            counters.publishes += 1
            self._judge.present = validation
        elif finding.outcome == "kept":
            self.versions.head = self._judge.present = None
        digest = "" if ready is None else ready.info.digest
        self.ledger.end(Ended(self.trainer.step, report.outcome, digest, report.version))
        counters.last_update = self._clock()
        self.history.append(report)
        bad = report.outcome in ("rolled_back", "refused", "skipped")
        log.log(logging.WARNING if bad else logging.INFO, f"update {report.outcome}", extra={"fields": asdict(report)})
        return report

    async def _failed(self, pending: Pending, error: TandemError, started: float) -> UpdateReport:
        """Take the trainer back to where it was. Raises `error` when the update is worth another attempt."""
        await self._take_back()
        passing = isinstance(error, EngineError | StorageError) or not self.is_up
        if passing and pending.attempts < MAX_ATTEMPTS:
            if isinstance(error, EngineError | StorageError):
                raise error
            raise EngineUnavailable("the engine ended during the update") from error
        return self._end(pending, Finding("skipped", error.message, step=self.trainer.step), started)

    async def _take_back(self) -> None:
        """Drop gradients and a step that is not settled; a trainer that cannot is brought up again."""
        try:
            await self._client.settle_trainer(self.trainer.name, keep=False)
        except TandemError:
            self._is_open = False

    async def _tidy(self) -> None:
        """Do what may wait, and whose failing changes nothing."""
        try:
            await self.ledger.flush()
        except StorageError as e:  # it is written again with the next record
            log.error("journal not written", extra={"fields": {"error": e.message}})
        kept = self._kept(self.ledger.listed)
        await self.versions.retire_except(kept)
        self.watch.keep(kept)

    # -- versions -------------------------------------------------------------------------------------------------

    async def checkpoint(self, name: str | None) -> str:
        """Save the trainer as it is and return the name. Raises Conflict, StorageError, EngineError.

        Without a name, a checkpoint that has the very same state becomes the newest again, and nothing is saved twice.
        """
        ledger, versions, head = self.ledger, self.versions, self.versions.head
        info = await self._client.publish_trainer(self.trainer.name) if head is None else head.info
        number = 0 if head is None else head.ref.version
        same = name is None and any(i.name == self._saved for i in ledger.listed)
        chosen = self._saved if same else name
        if chosen is None:
            chosen = await asyncio.to_thread(ledger.checkpoints.free_name, self.trainer.step)
        reward = self._judge.present if self._judge.prompts else self._worth(number)
        manifest = Manifest(
            name=chosen,
            step=self.trainer.step,
            version=number,
            digest=info.digest,
            reward=reward,
            pinned=name is not None,
        )
        ledger.counters.means = self.watch.means
        if same:
            await ledger.save(manifest, None)
        else:
            await ledger.save(manifest, lambda folder: self._client.save_trainer(self.trainer.name, folder))
        versions.saved(info, str(ledger.checkpoints.folder / chosen), chosen)
        self._saved = chosen
        await self._prune()
        return chosen

    async def judge_checkpoints(self) -> bool:
        """Note what checkpoints are worth whose versions had too few answers when they were saved and have enough now;
        return whether there was one.
        """
        if self._judge.prompts:  # they are judged before they are published
            return False
        judged = False
        try:
            for info in self.ledger.listed:
                reward = self._worth(info.version)
                if info.reward is None and info.name != BEST and reward is not None:
                    await self.ledger.judge(info.name, reward)
                    judged = True
        except StorageError as e:  # the next answers are another occasion
            log.warning("checkpoint not judged", extra={"fields": {"error": e.message}})
        if judged:
            self._serving.relist()
        return judged

    def _worth(self, version: int) -> float | None:
        """Return the mean reward of a version's live answers; None: there are fewer than half an update's. Of the
        answers that an update is made of, only some are by the newest version.
        """
        mean = self.watch.means.get(version)
        enough = max(self._training.update_frequency // 2, 2)
        return mean.mean if mean is not None and mean.count >= enough else None

    async def _prune(self) -> None:
        """Remove the checkpoints that are not to be kept, and the versions that only they kept; versions of theirs that
        are kept for another reason stay in the engine's memory. What cannot be removed now goes with the next ones.
        """
        ledger, folder = self.ledger, self.ledger.checkpoints.folder
        going = ledger.checkpoints.surplus(ledger.listed)
        if not going:
            return
        left = {info.digest: str(folder / info.name) for info in ledger.listed if info not in going}
        kept = self._kept([info for info in ledger.listed if info not in going])
        try:
            for info in going:
                path = str(folder / info.name)
                if info.digest not in left and self.versions.in_folder(path, kept):
                    await self._client.load_adapter(AdapterSource(path), pin=True)
            await ledger.remove(going)
        except TandemError as e:
            log.warning("checkpoints not removed", extra={"fields": {"error": e.message}})
        there = {info.name for info in ledger.listed}
        for info in going:
            if info.name not in there:
                self.versions.removed(str(folder / info.name), left)
        await self.versions.retire_except(self._kept(ledger.listed))
        self._serving.relist()

    def _kept(self, checkpoints: Sequence[CheckpointInfo]) -> set[int]:
        """Return the numbers of the versions that go on existing when there are these checkpoints."""
        return self.versions.kept(checkpoints, (self.watch.best,) if self.watch.best else ())

    async def rollback(self, to: str | None, *, manual: bool) -> AdapterRef:
        """Take trainer and serving back to a version, durably. Raises NotFound."""
        folder, digest = await asyncio.to_thread(self._target, to)
        course = self.ledger.counters.course
        self._is_open = False  # until both sides tell the same story again
        await self.trainer.open(folder, digest)
        self._saved = _twin(self.ledger.listed, Path(folder).name, digest, self.trainer.step) if folder else ""
        info = await self._client.publish_trainer(self.trainer.name)
        ref = self.versions.publish(info, folder)
        if manual:  # whoever wants it back does not want it compared with what came after it
            course.best = self._judge.present = None
            self.watch.keep([ref.version])
        else:
            course.note("rolled_back")
        await self.checkpoint(None)
        self._is_open = True
        log.warning("rolled back", extra={"fields": {"version": ref.version, "manual": manual}})
        return ref

    async def switch(self, to: str) -> AdapterRef:
        """Serve a version; the trainer goes on with its own. Raises NotFound."""
        folder, digest = await asyncio.to_thread(self._target, to)
        known = next((v for v in self.versions if v.ref.digest == digest), None)
        info = known.info if known is not None else await self._client.load_adapter(AdapterSource(folder))
        return self.versions.show(info, folder)

    def _target(self, to: str | None) -> tuple[str, str]:
        """Return folder (empty: there is none) and digest of what `to` names.

        None names the version before this one, or the one that rewards have shown to be the best.
        """
        head, best = self.versions.head, self.watch.best
        if to is None:
            at = self.versions.last + 1 if head is None else head.ref.version
            older = [v.ref.version for v in self.versions if v.ref.version < at]
            to = str(best if best not in (0, at) else max(older, default=0))
        return self.versions.find(to, self.trainer.name, self.ledger.checkpoints, self.ledger.listed)


def _twin(listed: Sequence[CheckpointInfo], name: str, digest: str, step: int) -> str:
    """Return the checkpoint with the state of the checkpoint `name` that can become the newest again; empty: none.

    The best one is a copy of another.
    """
    if name != BEST:
        return name
    return next((i.name for i in listed if i.name != BEST and (i.digest, i.step) == (digest, step)), "")


class _Ready(NamedTuple):
    """A version that the engine has, and how long it took to have it."""

    info: AdapterInfo
    ms: float
