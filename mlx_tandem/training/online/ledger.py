"""The durable half of the loop: buffer, updates, counters, states and checkpoints, in memory and on the drive alike."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from mlx_tandem.config import Config
from mlx_tandem.training.online import advantages, baselines, counters
from mlx_tandem.training.online.counters import Counters
from mlx_tandem.training.online.folder import Folder
from mlx_tandem.training.online.serving import UpdateReport
from mlx_tandem.training.online.threads import to_the_end
from mlx_tandem.training.online.update import Pending
from mlx_tandem.training.open_trajectories import OpenTrajectories
from mlx_tandem.training.store.checkpoints import CheckpointInfo, Checkpoints
from mlx_tandem.training.store.database import Database, Statement, Writer
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import GOOD, Ended, Kept
from mlx_tandem.training.store.rows import Rows
from mlx_tandem.training.store.saved import Saved
from mlx_tandem.training.store.schema import TrajectoryState
from mlx_tandem.training.store.shared import SharedDatabase
from mlx_tandem.training.trajectories import Buffer, Counts, DropReason, Trajectory, staleness

log = logging.getLogger(__name__)


class Accepted(NamedTuple):
    """What can be learned of trajectories that somebody brought, and the positions of the others, by reason."""

    groups: list[list[Trajectory]]
    dropped: dict[DropReason, list[int]]


class Ledger:
    """Belongs to one event loop. `open` comes before everything else.

    Every change is made in memory and put to the writer at once; `flush` brings it to the drive. What another process
    reads from the drive is what this one had in memory at a flush.
    """

    def __init__(self, config: Config, shared: SharedDatabase | None = None) -> None:
        """Begin with nothing. `shared` is the database; None: one that lies beside the checkpoints."""
        self._config = config
        checkpointing, training = config.checkpointing, config.rl_training
        folder = Path(checkpointing.checkpoint_dir)
        self.checkpoints = Checkpoints(folder, checkpointing.keep_n_checkpoints)
        self.shared = SharedDatabase(folder) if shared is None else shared
        self.listed: Sequence[CheckpointInfo] = ()
        """Newest first."""
        self.rows = Rows(training.adapter)
        self.buffer = Buffer(training.trajectory_buffer_size)
        self.waiting = OpenTrajectories(training.open_trajectories, training.open_trajectory_s)
        """Trajectories whose reward is still missing."""
        self.counters = Counters()
        self.pending: Pending | None = None
        """The update that has begun and not ended."""
        self.unsaved = 0
        """Updates whose step stands and that no state of the trainer holds."""
        self.folder = Folder(self.checkpoints)
        """The watch that notices when the database or the checkpoints are no longer there."""
        self._database: Database | None = None
        self._writer: Writer | None = None
        self._saving: asyncio.Task[CheckpointInfo] | None = None
        self._is_open = False
        self._place = 0  # the highest of an open trajectory
        self.told = Counts()
        """What reports of updates have told: counts as of the last update, or of the start if that was later."""

    @property
    def is_open(self) -> bool:
        """Whether the database is open and read."""
        return self._is_open

    @property
    def is_behind(self) -> bool:
        """Whether the drive has taken nothing for so long that nothing more should be collected."""
        return self._writer is not None and self._writer.is_behind

    @property
    def saved(self) -> Saved:
        """The rows of this ledger's adapter in the open database."""
        if self._database is None:
            raise RuntimeError("the database is not open")
        return Saved(self._database, self.rows.adapter)

    async def open(self, take_over: Callable[[Manifest | None], Awaitable[None]]) -> list[UpdateReport]:
        """Bring buffer, counters and `pending` to where the database says; return the reports of the last updates.

        A new database begins with the newest checkpoint, for which `take_over` is called; what that puts is written in
        one transaction. Raises StorageError, above all when another process has the folder.
        """
        training = self._config.rl_training
        self.buffer, self.pending = Buffer(training.trajectory_buffer_size), None  # an attempt may have failed before
        self.waiting = OpenTrajectories(training.open_trajectories, training.open_trajectory_s)
        self._database = await asyncio.to_thread(self.shared.open)
        try:
            same = self.checkpoints.folder == self.shared.folder
            await asyncio.to_thread(self.checkpoints.lock, self.shared.lock if same else None)
            self._writer = Writer(self._database, lambda: _summary(self))
            found = await asyncio.to_thread(self.saved.run, Counters)
            manifest = await asyncio.to_thread(self.checkpoints.newest) if found is None else None
            self.counters = counters.of_manifest(manifest) if found is None else found
            self.counters.course.begin(self._config.rl_training.learning_rate)
            await asyncio.to_thread(_read, self)
            if found is None:
                await take_over(manifest)
                await self.flush()
            self.told = msgspec.structs.replace(self.buffer.counts)
            self.listed = await asyncio.to_thread(self.checkpoints.list)
            reports = await asyncio.to_thread(_reports, self)
        except BaseException:
            _release(self)
            raise
        self.folder.database = self._database
        self._is_open = True
        return reports

    # -- what comes in and what becomes of it ---------------------------------------------------------------------

    async def add(self, trajectories: Sequence[tuple[Trajectory, int]], stale: Sequence[str] = ()) -> None:
        """Take those trajectories that are new, each with the size of its group (0: nobody knows), and count those ids
        that were too old when they came; all is on the drive when this returns.
        """
        await _opened(self).room()
        self.drop_stale(stale)
        overflow = self.buffer.counts.dropped_overflow
        for t, size in trajectories:
            self.take_in(t, size)
        _log_dropped("overflow", self.buffer.counts.dropped_overflow - overflow)
        await self.flush()

    def take_in(self, trajectory: Trajectory, size: int) -> None:
        """Take a trajectory if it is new; durable with the next `flush`."""
        if not self.buffer.add(trajectory, size):
            return
        place = self.buffer.group(trajectory.group) or (size, 0)
        self.put(self.rows.waiting(trajectory, self.buffer.position(trajectory.id), *place))
        if self.waiting.close(trajectory.id):
            self.put(*self.rows.closed(trajectory.id))

    def is_stale(self, versions: Sequence[int], version: int) -> bool:
        """Return whether a completion by these versions is too old to be learned from, when `version` is trained.

        The base's and checkpoints' are judged by their logprobs instead, when they are learned from.
        """
        return staleness(versions, version, _exempt(self.listed)) > self._config.rl_training.max_staleness

    def drop_stale(self, ids: Sequence[str]) -> None:
        """Count these, which were too old when they came, and take none of them; durable with the next `flush`."""
        if ids:
            _close(self, ids)
            self.buffer.remove(ids)
            self.buffer.remember(ids)
            _dropped(self, ids, "stale")
            self.buffer.counts.dropped_stale += len(ids)
            _log_dropped("stale", len(ids))

    async def keep(self, answers: Sequence[Kept]) -> None:
        """Keep answers whose reward comes later; they are on the drive when this returns. Those that there is no room
        for any longer go.
        """
        await _opened(self).room()
        for each in answers:
            self.keep_one(each)
        self.forget(self.waiting.superfluous(max((each.at for each in answers), default=0.0)))
        await self.flush()

    def keep_one(self, answer: Kept) -> None:
        """Keep an answer; durable with the next `flush`."""
        if self.waiting.put(answer.id, answer.begun, answer.exchange, answer.at):
            self._place += 1
            found = self.waiting.get(answer.id)
            assert found is not None
            number = len(found.pieces) - 1
            self.put(*self.rows.answer(answer.id, self._place, answer.at, found.begun, number, answer.exchange))

    def forget(self, ids: Sequence[str]) -> None:
        """Count these, which will have no reward, and keep them no longer; durable with the next `flush`."""
        if ids:
            _close(self, ids)
            self.buffer.counts.dropped_no_reward += len(ids)
            self.put()
            _log_dropped("no_reward", len(ids))

    def take(self, count: int, version: int) -> list[list[Trajectory]]:
        """Return groups to learn from, about `count` completions; fewer when there are no more.

        On the drive they wait until `begin` says what they were given to.
        """
        taken = self.buffer.take(count, version, self._config.rl_training.max_staleness, _exempt(self.listed))
        if taken.stale:
            _dropped(self, taken.stale, "stale")
            _log_dropped("stale", len(taken.stale))
        return [list(group) for group in taken.groups]

    def accept(self, trajectories: Sequence[Trajectory], version: int) -> Accepted:
        """Sort trajectories that somebody brings for an update of their own, when `version` is trained. Those that
        cannot be learned from now may be brought again, and so may all others until `begin`.
        """
        dropped: dict[DropReason, list[int]] = {}
        fresh: dict[str, int] = {}
        for i, t in enumerate(trajectories):
            if t.id in fresh or self.buffer.knows(t.id):
                dropped.setdefault("duplicate", []).append(i)
            elif self.is_stale(t.versions, version):
                dropped.setdefault("stale", []).append(i)
            else:
                fresh[t.id] = i
        groups = advantages.by_group([trajectories[i] for i in fresh.values()])
        same = [group for group in groups if not advantages.varies(group)]
        if same:
            dropped["equal_rewards"] = sorted(fresh[t.id] for group in same for t in group)
        counts = self.buffer.counts
        counts.collected += len(fresh)
        counts.dropped_duplicate += len(dropped.get("duplicate", ()))
        counts.dropped_stale += len(dropped.get("stale", ()))
        counts.skipped_groups += len(same)
        _log_dropped("stale", len(dropped.get("stale", ())))
        return Accepted([group for group in groups if advantages.varies(group)], dropped)

    def untold(self) -> Counts:
        """Return what was counted since the last call: each report of an update tells a part of it."""
        found = self.buffer.counts.since(self.told)
        self.told = msgspec.structs.replace(self.buffer.counts)
        return found

    # -- updates --------------------------------------------------------------------------------------------------

    def begin(self, pending: Pending, *, write: bool = True) -> None:
        """Note that this update will be done; with `write`, whatever happens, which is durable with the next `flush`.

        One that was begun before is only written, unless it is already.
        """
        if pending is not self.pending:
            self.buffer.remember(pending.began.trajectories)
            pending.written = False
            self.pending = pending
        if write and not pending.written:
            began, number = pending.began, self.counters.updates + 1
            known = {t.id: t for t in pending.trajectories}
            learned = (
                self.rows.learned(id, self.buffer.position(id), number, known.get(id)) for id in began.trajectories
            )
            self.put(self.rows.began(number, began), *learned)
            baselines.note(self.counters.baselines, began.rewards)
            pending.written = True

    def end(self, end: Ended, report: UpdateReport | None = None) -> None:
        """Note that the pending update has come to its end; durable with the next `flush`."""
        if self.pending is not None:
            self.begin(self.pending)
        training = self._config.rl_training
        # Feedback has a rate of its own, and what that moves says nothing of the rate for rewards.
        is_measured = report is not None and (report.kl > 0 or (report.grad_norm > 0 and end.outcome in GOOD))
        if report is not None and is_measured and not report.feedback:
            self.counters.course.moved(
                report.kl, report.learning_rate, training.target_kl, report.mismatch_k3, report.agreement
            )
        self.counters.note(end, training.guard_false_rollback)
        self.unsaved += end.outcome in GOOD
        number = self.counters.updates
        self.put(*self.rows.ended(number, end, report), self.rows.prune(number))
        self.pending = None

    def drop_pending(self) -> None:
        """Forget the update that has begun; what it was to learn from is not learned from. Durable with the next
        `flush`.
        """
        if self.pending is not None:
            self.begin(self.pending)
            self.put(self.rows.unbegun(self.counters.updates + 1))
            self.pending = None

    def compared(self, difference: float, tolerated: float) -> None:
        """Note how much better than by the accepted version a prompt was answered, and by how much it may be worse;
        durable with the next `flush`.
        """
        self.counters.trial.compare(difference, tolerated, self._config.rl_training.guard_false_accept)
        self.put()

    # -- the drive ------------------------------------------------------------------------------------------------

    async def flush(self, *more: Statement) -> None:
        """Bring everything until now to the drive, these statements in the same transaction. Raises StorageError."""
        if more:
            self.put(*more)
        await _opened(self).flush()

    async def save(
        self, manifest: Manifest, write: Callable[[str], Awaitable[None]] | None, *, guards: bool = False
    ) -> CheckpointInfo:
        """Make a checkpoint of now. Raises StorageError; there is a checkpoint then or not.

        One that is made for the guard does not delay the next one of the others.

        `write` fills its folder. Without it there is a checkpoint of this name whose content is that of now, which
        becomes the newest. A caller that is cancelled when its files are written does not stop it: see `settled`.
        """
        temporary = None
        if write is not None:
            temporary = await to_the_end(self.checkpoints.new, manifest.name)
            await write(str(temporary))
        saved = msgspec.structs.replace(
            self.counters,
            counts=self.buffer.counts,
            since_checkpoint=self.counters.since_checkpoint if guards else 0,
            checkpoint_saves=self.counters.checkpoint_saves + 1,
        )
        manifest = msgspec.structs.replace(
            manifest,
            counters=counters.to_manifest(saved),
            config=msgspec.to_builtins(self._config.rl_training),
        )
        self._saving = asyncio.create_task(self._commit(temporary, manifest, guards))
        return await asyncio.shield(self._saving)

    async def settled(self) -> None:
        """Wait until no checkpoint is half way to its name: another may be begun then."""
        if self._saving is not None:
            await asyncio.wait({self._saving})

    async def _commit(self, temporary: Path | None, manifest: Manifest, guards: bool) -> CheckpointInfo:
        if temporary is None:
            info = await asyncio.to_thread(self.checkpoints.renew, manifest)
        else:
            info = await asyncio.to_thread(self.checkpoints.commit, temporary, manifest)
        self.listed = await asyncio.to_thread(self.checkpoints.list)
        self.counters.checkpoint_saves += 1
        self.counters.since_checkpoint = self.counters.since_checkpoint if guards else 0
        self.put()
        await self.flush()
        return info

    async def close(self) -> None:
        """Close database and checkpoints. Raises StorageError when something is not on the drive."""
        try:
            if self._writer is not None:
                await self._writer.close()
        finally:
            await asyncio.to_thread(_release, self)

    def put(self, *statements: Statement) -> None:
        """Put statements, and those about what has changed in the buffer."""
        _opened(self).put(*statements)
        changes = self.buffer.changed()
        more: list[Statement] = []
        for name in changes.groups:
            now = self.buffer.group(name)
            more += [] if now is None else [self.rows.group(name, *now)]
        for id, reason in changes.gone.items():
            more.append(self.rows.gone(id, self.buffer.position(id), reason))
            changes.forgotten.update({} if self.buffer.position(id) else {id: None})
        more += [self.rows.forget(id) for id in changes.forgotten]
        more += [self.rows.prune(self.counters.updates)] if changes.gone else []
        if more:
            _opened(self).put(*more)


def _release(ledger: Ledger) -> None:
    """Give up the folders. A second call does nothing."""
    ledger.checkpoints.close()
    if ledger._database is not None:
        ledger._database = None
        ledger.shared.close()


def _read(ledger: Ledger) -> None:
    saved = ledger.saved
    ledger.buffer.restore(saved.waiting(), saved.seen(ledger.buffer.most_ids), ledger.counters.counts)
    ledger._place = saved.open(ledger.waiting)
    began = saved.pending()
    if began is not None:
        ledger.pending = Pending(began, saved.learned(began.trajectories))


def _reports(ledger: Ledger) -> list[UpdateReport]:
    found = []
    for number, report in ledger.saved.reports():
        try:
            found.append(msgspec.json.decode(report, type=UpdateReport))
        except msgspec.MsgspecError as e:  # other versions have other fields
            log.warning("report not read", extra={"fields": {"update": number, "error": str(e)}})
    return found


def _dropped(ledger: Ledger, ids: Sequence[str], state: TrajectoryState) -> None:
    ledger.put(*(ledger.rows.gone(id, ledger.buffer.position(id), state) for id in ids))


def _close(ledger: Ledger, ids: Sequence[str]) -> None:
    """Take out trajectories that will have no reward; their groups wait for them no longer."""
    groups = []
    for id in ids:
        group = ledger.waiting.forget(id)
        ledger.put(*ledger.rows.closed(id))
        if group is not None:
            groups.append(group)
            ledger.put(*(ledger.rows.beginning(*other) for other in ledger.waiting.of_group(group)))
    for group in groups:
        ledger.buffer.shrink(group)


def _opened(ledger: Ledger) -> Writer:
    if ledger._writer is None:
        raise RuntimeError("the database is not open")
    return ledger._writer


def _summary(ledger: Ledger) -> Statement:
    return ledger.rows.run(msgspec.structs.replace(ledger.counters, counts=ledger.buffer.counts), time.time())


def _exempt(listed: Sequence[CheckpointInfo]) -> frozenset[int]:
    """Return the versions that are asked for by name, however old: the base and checkpoints."""
    return frozenset((0, *(info.version for info in listed)))


def _log_dropped(reason: DropReason, count: int) -> None:
    """Say where it happens that so many trajectories are not learned from."""
    if count:
        log.warning("trajectories dropped", extra={"fields": {"reason": reason, "count": count}})
