"""What a journal and a checkpoint come to: the buffer, the counters, and which updates have to be computed again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct, field

from mlx_tandem.engine.client import EngineClient
from mlx_tandem.training.online import update
from mlx_tandem.training.online.baselines import Baselines
from mlx_tandem.training.online.guard import Course
from mlx_tandem.training.online.live_rewards import Mean
from mlx_tandem.training.online.trial import Trial
from mlx_tandem.training.online.update import Pending
from mlx_tandem.training.open_trajectories import OpenTrajectories
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import Added, Began, Dropped, Ended, Forgotten, Kept, Opened, Record, Seen
from mlx_tandem.training.trajectories import Buffer, Counts

GOOD = ("published", "kept")
"""Outcomes of updates whose step stands."""


class Counters(Struct):
    """The loop's own state, as a checkpoint keeps it."""

    follows: str = ""  # the label of the checkpoint that the journal of that moment begins after
    began: int = 0  # updates in that journal, all of them in the checkpoint
    compared: int = 0  # comparisons in that journal, all of them in `trial`
    records: int = 0  # records in that journal, all of them in `counts`
    updates: int = 0
    publishes: int = 0
    checkpoint_saves: int = 0
    last_version: int = 0  # the highest number ever given
    last_update: float | None = None  # seconds since the epoch
    since_checkpoint: int = 0  # updates
    course: Course = field(default_factory=Course)
    counts: Counts = field(default_factory=Counts)
    trial: Trial = field(default_factory=Trial)
    means: dict[int, Mean] = {}
    baselines: Baselines = {}

    def note(self, end: Ended) -> None:
        """Count an update that has come to its end."""
        self.course.note(end.outcome)
        self.updates += 1
        self.since_checkpoint += 1
        self.trial.updates += 1
        self.last_version = max(self.last_version, end.version)


def to_manifest(counters: Counters) -> dict[str, Any]:
    """Return counters as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(counters, str_keys=True)
    return plain


def counters(manifest: Manifest | None) -> Counters:
    """Return a copy of what the checkpoint says; without one, what holds at the very beginning."""
    return Counters() if manifest is None else msgspec.convert(manifest.counters, Counters, str_keys=True, strict=False)


def held_already(records: Sequence[Record], manifest: Manifest | None) -> int | None:
    """Return how many of the journal's updates are in the checkpoint.

    None: the journal began after a checkpoint that is gone, so that its updates cannot be computed on what is there.
    """
    opened = records[0]
    assert isinstance(opened, Opened)
    if manifest is None:
        return None if opened.checkpoint else 0
    if opened.checkpoint == (saved := counters(manifest)).follows:
        return saved.began  # the process ended between the checkpoint and its journal
    # Journals of earlier versions of this program have the name alone.
    return 0 if opened.checkpoint in (manifest.label, manifest.name) else None


class Rebuilt(Struct):
    """What the records of a journal come to."""

    buffer: Buffer
    waiting: OpenTrajectories
    pending: Pending | None  # the update that has begun and not ended
    begun: int  # updates in the journal


def rebuild(
    records: Sequence[Record],
    buffer: Buffer,
    waiting: OpenTrajectories,
    held: int | None,
    counts: Counts,
    counted: int = 0,
) -> Rebuilt:
    """Return the buffer and the trajectories without a reward, both empty so far, as they were after the last record.

    `counts`: at the checkpoint, which was made after the first `counted` records; 0: it came before the journal.
    """
    last: Began | None = None
    begun = 0
    for number, record in enumerate(records, 1):
        match record:
            case Added():
                buffer.add(record.trajectory, record.size)
                waiting.close(record.trajectory.id)
            case Kept():
                waiting.put(record.id, record.begun, record.exchange, record.at)
            case Forgotten():
                forget(record.ids, buffer, waiting)
                buffer.counts.dropped_no_reward += len(record.ids)
            case Seen() | Dropped():
                forget(record.ids if isinstance(record, Dropped) else (), buffer, waiting)
                buffer.remove(record.ids if isinstance(record, Dropped) else ())
                buffer.remember(record.ids)
                buffer.counts.dropped_stale += len(record.ids) if isinstance(record, Dropped) else 0
            case Began():
                begun, last = begun + 1, record
                buffer.remove(record.trajectories)
                buffer.remember(record.trajectories)
                buffer.counts.taken += len(record.trajectories)
            case Ended():
                last = None
        if number == counted if counted else isinstance(record, Seen):
            buffer.counts = msgspec.structs.replace(counts)
    if counted > len(records):  # the last of them were not written
        buffer.counts = msgspec.structs.replace(counts)
    if held is None or begun <= held or last is None:
        return Rebuilt(buffer, waiting, None, begun)
    wanted = set(last.trajectories)
    known = {r.trajectory.id: r.trajectory for r in records if isinstance(r, Added) and r.trajectory.id in wanted}
    return Rebuilt(buffer, waiting, Pending(last, [known[i] for i in last.trajectories if i in known]), begun)


def forget(ids: Iterable[str], buffer: Buffer, waiting: OpenTrajectories) -> list[str]:
    """Take out trajectories that will have no reward, and return the groups that wait for them no longer."""
    groups = [group for id in ids if (group := waiting.forget(id)) is not None]
    for group in groups:
        buffer.shrink(group)
    return groups


def ended(records: Sequence[Record], held: int) -> Iterator[tuple[Began, Ended]]:
    """Yield the updates after the first `held` that have come to their end."""
    began: Began | None = None
    begun = 0
    for record in records:
        if isinstance(record, Began):
            began, begun = record, begun + 1
        elif isinstance(record, Ended) and began is not None:
            if begun > held:
                yield began, record
            began = None


def updates_to(records: Sequence[Record], held: int, digest: str) -> int:
    """Return how many updates after the first `held` lead to the version of this content; 0: none do."""
    count = 0
    for number, (_, end) in enumerate(ended(records, held), 1):
        if end.digest == digest:
            count = number
    return count


async def replay(
    client: EngineClient,
    trainer: str,
    records: Sequence[Record],
    held: int,
    done: Callable[[Ended, int | None], Awaitable[None]],
    most: int | None = None,
) -> None:
    """Compute the updates after the first `held` again, or the first `most` of these; the trainer is then as it was.
    `done` is called when it is as it was at the end of each, with the optimiser's step when that has moved.
    """
    for began, end in islice(ended(records, held), most):
        step = await update.again(client, trainer, began) if end.outcome in GOOD else None
        await done(end, step)
