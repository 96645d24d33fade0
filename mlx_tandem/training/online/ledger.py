"""The durable half of the loop: journal, buffer, checkpoints and counters, which always tell the same story."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from mlx_tandem.config import Config, RLTrainingConfig
from mlx_tandem.training.online import advantages, baselines, recovery
from mlx_tandem.training.online.folder import Folder
from mlx_tandem.training.online.recovery import Counters
from mlx_tandem.training.online.update import Pending
from mlx_tandem.training.open_trajectories import OpenTrajectories
from mlx_tandem.training.store.checkpoints import CheckpointInfo, Checkpoints
from mlx_tandem.training.store.journal import Journal
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import (
    Added,
    Began,
    Compared,
    Dropped,
    Ended,
    Forgotten,
    Kept,
    Opened,
    Record,
)
from mlx_tandem.training.trajectories import Buffer, Counts, DropReason, Trajectory, staleness

log = logging.getLogger(__name__)


class Accepted(NamedTuple):
    """What can be learned of trajectories that somebody brought, and the positions of the others, by reason."""

    groups: list[list[Trajectory]]
    dropped: dict[DropReason, list[int]]


class Ledger:
    """Belongs to one event loop. `open` comes before everything else, and again for each new engine."""

    def __init__(self, config: Config) -> None:
        self._config = config
        checkpointing, training = config.checkpointing, config.rl_training
        self.checkpoints = Checkpoints(Path(checkpointing.checkpoint_dir), checkpointing.keep_n_checkpoints)
        self.listed: Sequence[CheckpointInfo] = ()
        """Newest first."""
        self.buffer = Buffer(training.trajectory_buffer_size)
        self.waiting = _nothing_waits(self._config.rl_training)
        """Trajectories whose reward is still missing."""
        self.counters = Counters()
        self.pending: Pending | None = None
        """The update that has begun and not ended."""
        self._journal: Journal | None = None
        self.folder = Folder()
        """The watch that notices when the journal is no longer there."""
        self._saving: asyncio.Task[CheckpointInfo] | None = None
        self._late: list[tuple[Trajectory, int] | str] | None = None  # what comes in while the journal is read
        self._told = Counts()  # what reports of updates have told

    @property
    def is_open(self) -> bool:
        """Whether the journal is open."""
        return self._journal is not None

    @property
    def is_large(self) -> bool:
        """Whether the journal should begin again, which a checkpoint lets it do."""
        return self._journal is not None and self._journal.is_large

    @property
    def is_behind(self) -> bool:
        """Whether the drive has taken nothing for so long that nothing more should be collected."""
        return self._journal is not None and self._journal.is_behind

    async def open(self) -> tuple[Manifest | None, Sequence[Record], int | None]:
        """Bring buffer, counters and `pending` to where checkpoint and journal say.

        Returns the newest checkpoint, the journal's records, and how many of their updates are in the checkpoint
        already (None: they belong to another one). Raises StorageError, above all when another process has the folder.
        """
        first = self._journal is None
        if self._journal is None:
            await asyncio.to_thread(self.checkpoints.lock)
        manifest = await asyncio.to_thread(self.checkpoints.newest)
        before = self.pending
        self._late = []
        try:
            if self._journal is None:
                folder, held = self.checkpoints.folder / "journal", self.checkpoints.held
                journal, records = await asyncio.to_thread(Journal.open, folder, held=held)
                self._journal = self.folder.journal = journal
                _log_cut(journal)
            else:
                records = await self._journal.replay()
            self._rebuild(manifest, records, keep_counts=not first)
        finally:
            self._late = None
        if (
            before is not None
            and self.pending is not None
            and self.pending.began.trajectories == before.began.trajectories
        ):
            self.pending = before  # which knows how often it was tried, and more
        self.listed = await asyncio.to_thread(self.checkpoints.list)
        return manifest, records, recovery.held_already(records, manifest)

    async def read(self) -> tuple[Manifest | None, Sequence[Record], int | None]:
        """Return what `open` does and change nothing. Raises StorageError."""
        manifest = await asyncio.to_thread(self.checkpoints.newest)
        records = await _opened(self).replay()
        return manifest, records, recovery.held_already(records, manifest)

    def _rebuild(self, manifest: Manifest | None, records: Sequence[Record], keep_counts: bool) -> None:
        opened = records[0]
        assert isinstance(opened, Opened)
        held = recovery.held_already(records, manifest)
        counters = recovery.counters(manifest)
        empty = Buffer(self.buffer.capacity), _nothing_waits(self._config.rl_training)
        counted = counters.records if counters.follows == opened.checkpoint else 0
        rebuilt = recovery.rebuild(records, *empty, held, counters.counts, counted)
        counts = self.buffer.counts
        for late in self._late or ():
            if isinstance(late, str):
                rebuilt.buffer.shrink(late)
            else:
                rebuilt.buffer.add(*late)
        self.waiting = self.waiting if keep_counts else rebuilt.waiting
        self.buffer, self.pending = rebuilt.buffer, rebuilt.pending
        saved = counters.compared if counters.follows == opened.checkpoint else 0
        counters.compared = sum(isinstance(record, Compared) for record in records)
        counters.follows, counters.began = opened.checkpoint, rebuilt.begun
        counters.course.begin(self._config.rl_training.learning_rate)
        if held is not None:
            _follow(self._config.rl_training, counters, records, held, saved)
        if keep_counts:
            self.buffer.counts = counts
            self.counters.follows, self.counters.began = counters.follows, counters.began
            self.counters.compared = counters.compared
        else:
            self.counters = counters
            self._told = msgspec.structs.replace(self.buffer.counts)

    async def add(self, trajectories: Sequence[tuple[Trajectory, int]]) -> None:
        """Take those trajectories that are new, each with the size of its group (0: nobody knows); they are on the
        drive when this returns.
        """
        if self.is_behind:
            await self.flush()
        journal, overflow = _opened(self), self.buffer.counts.dropped_overflow
        for t, size in trajectories:
            if self.buffer.add(t, size):
                self.waiting.close(t.id)
                journal.append(Added(t, size))
                if self._late is not None:
                    self._late.append((t, size))
        _log_dropped("overflow", self.buffer.counts.dropped_overflow - overflow)
        await journal.flush()

    def is_stale(self, versions: Sequence[int], version: int) -> bool:
        """Return whether a completion by these versions is too old to be learned from, when `version` is trained.

        The base's and checkpoints' are judged by their logprobs instead, when they are learned from.
        """
        return staleness(versions, version, _exempt(self.listed)) > self._config.rl_training.max_staleness

    def drop_stale(self, trajectories: Sequence[Trajectory]) -> None:
        """Count these, which were too old when they came, and take none of them; durable with the next `flush`."""
        ids = tuple(t.id for t in trajectories)
        if ids:
            _forget(self, ids)
            _opened(self).append(Dropped(ids))
            self.buffer.remember(ids)
            self.buffer.counts.dropped_stale += len(ids)
            _log_dropped("stale", len(ids))

    async def keep(self, answers: Sequence[Kept]) -> None:
        """Keep answers whose reward comes later; they are on the drive when this returns. Those that there is no room
        for any longer go.
        """
        if self.is_behind:
            await self.flush()
        journal = _opened(self)
        for each in answers:
            if self.waiting.put(each.id, each.begun, each.exchange, each.at):
                journal.append(each)
        self.forget(self.waiting.superfluous(max((each.at for each in answers), default=0.0)))
        await journal.flush()

    def forget(self, ids: Sequence[str]) -> None:
        """Count these, which will have no reward, and keep them no longer; durable with the next `flush`."""
        if ids:
            _forget(self, ids)
            _opened(self).append(Forgotten(tuple(ids)))
            self.buffer.counts.dropped_no_reward += len(ids)
            _log_dropped("no_reward", len(ids))

    def take(self, count: int, version: int) -> list[list[Trajectory]]:
        """Return groups to learn from, about `count` completions; fewer when there are no more."""
        taken = self.buffer.take(count, version, self._config.rl_training.max_staleness, _exempt(self.listed))
        if taken.stale:
            _opened(self).append(Dropped(taken.stale))
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
        found = self.buffer.counts.since(self._told)
        self._told = msgspec.structs.replace(self.buffer.counts)
        return found

    def begin(self, pending: Pending, *, write: bool = True) -> None:
        """Note that this update will be done; with `write`, whatever happens, which is durable with the next `flush`.

        One that was begun before is only written, unless it is already.
        """
        if pending is not self.pending:
            self.buffer.remember(pending.began.trajectories)
            pending.written = False
            self.pending = pending
        if write and not pending.written:
            _opened(self).append(pending.began)
            baselines.note(self.counters.baselines, pending.began.rewards)
            self.counters.began += 1
            pending.written = True

    def end(self, end: Ended) -> None:
        """Note that the pending update has come to its end."""
        if self.pending is not None:
            self.begin(self.pending)
        _opened(self).append(end)
        _note(self._config.rl_training, self.counters, end)
        self.pending = None

    def compared(self, difference: float, tolerated: float) -> None:
        """Note how much better than by the accepted version a prompt was answered, and by how much it may be worse;
        durable with the next `flush`.
        """
        _opened(self).append(Compared(difference, tolerated))
        self.counters.compared += 1
        self.counters.trial.compare(difference, tolerated, self._config.rl_training.guard_false_accept)

    async def flush(self) -> None:
        """Bring the journal to the drive. Raises StorageError."""
        await _opened(self).flush()

    async def save(
        self, manifest: Manifest, write: Callable[[str], Awaitable[None]] | None, *, guards: bool = False
    ) -> CheckpointInfo:
        """Make a checkpoint of now. Raises StorageError; there is a checkpoint then or not, and the journal goes on.

        One that is made for the guard does not delay the next one of the others.

        `write` fills its folder. Without it there is a checkpoint of this name whose content is that of now, which
        becomes the newest. The journal begins again after the checkpoint, and an update that is pending is forgotten. A
        caller that is cancelled when its files are written does not stop it: see `settled`.
        """
        temporary = None
        if write is not None:
            temporary = await asyncio.to_thread(self.checkpoints.new, manifest.name)
            await write(str(temporary))
        saved = msgspec.structs.replace(
            self.counters,
            counts=self.buffer.counts,
            records=_opened(self).count,
            since_checkpoint=self.counters.since_checkpoint if guards else 0,
            checkpoint_saves=self.counters.checkpoint_saves + 1,
        )
        manifest = msgspec.structs.replace(
            manifest,
            counters=recovery.to_manifest(saved),
            config=msgspec.to_builtins(self._config.rl_training),
        )
        self._saving = asyncio.create_task(self._commit(temporary, manifest, guards))
        return await asyncio.shield(self._saving)

    async def judge(self, name: str, reward: float) -> None:
        """Note what a checkpoint is worth. Raises StorageError."""
        await asyncio.to_thread(self.checkpoints.judge, name, reward)
        self.listed = await asyncio.to_thread(self.checkpoints.list)

    async def remove(self, infos: Sequence[CheckpointInfo]) -> None:
        """Remove these checkpoints. Raises StorageError."""
        try:
            for info in infos:
                await asyncio.to_thread(self.checkpoints.delete, info.name)
        finally:
            self.listed = await asyncio.to_thread(self.checkpoints.list)

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
        self.pending = None
        await _opened(self).rotate(info.label, manifest.step, self.buffer.held, self.buffer.seen, self.waiting)
        self.counters.follows, self.counters.began, self.counters.compared = info.label, 0, 0
        return info

    async def close(self) -> None:
        """Close journal and checkpoints. Raises StorageError when the journal is not on the drive."""
        try:
            if self._journal is not None:
                await self._journal.close()
        finally:
            self.checkpoints.close()


def _exempt(listed: Sequence[CheckpointInfo]) -> frozenset[int]:
    """Return the versions that are asked for by name, however old: the base and checkpoints."""
    return frozenset((0, *(info.version for info in listed)))


def _follow(
    training: RLTrainingConfig, counters: Counters, records: Sequence[Record], held: int, compared: int
) -> None:
    """Bring counters from a checkpoint to where the journal ends. The checkpoint has `held` updates and `compared`
    comparisons of the journal.
    """
    begun = seen = 0
    for record in records:
        if isinstance(record, Began):
            begun += 1
            if begun > held:
                baselines.note(counters.baselines, record.rewards)
        elif isinstance(record, Ended) and begun > held:
            _note(training, counters, record)
        elif isinstance(record, Compared):
            seen += 1
            if seen > compared:
                counters.trial.compare(record.difference, record.tolerated, training.guard_false_accept)


def _note(training: RLTrainingConfig, counters: Counters, end: Ended) -> None:
    """Count an update that has ended; what is shown to be worse is compared afresh."""
    counters.note(end)
    trial = counters.trial
    if end.outcome == "rolled_back" and trial.is_worse(training.guard_false_rollback):
        trial.begin(trial.accepted)


def _nothing_waits(training: RLTrainingConfig) -> OpenTrajectories:
    return OpenTrajectories(training.open_trajectories, training.open_trajectory_s)


async def set_aside(ledger: Ledger) -> None:
    """Keep the journal of a checkpoint that is gone, though the next checkpoint begins another one."""
    journal = _opened(ledger)
    kept = await asyncio.to_thread(journal.set_aside)
    log.warning("journal set aside", extra={"fields": {"file": str(kept), "records": journal.count}})


def _log_cut(journal: Journal) -> None:
    """Say that the end of the journal was cut off, which nobody was told to be written."""
    if journal.cut:
        fields = {"file": str(journal.path), "cut_bytes": journal.cut, "kept_records": journal.count}
        log.warning("journal cut", extra={"fields": fields})


def _log_dropped(reason: DropReason, count: int) -> None:
    """Say where it happens that so many trajectories are not learned from."""
    if count:
        log.warning("trajectories dropped", extra={"fields": {"reason": reason, "count": count}})


def _forget(ledger: Ledger, ids: Sequence[str]) -> None:
    groups = recovery.forget(ids, ledger.buffer, ledger.waiting)
    if ledger._late is not None:
        ledger._late += groups


def _opened(ledger: Ledger) -> Journal:
    if ledger._journal is None:
        raise RuntimeError("the journal is not open")
    return ledger._journal
