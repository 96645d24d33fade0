"""Taking over the folder of an earlier version of this program, once: its journal and history go into the database."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from mlx_tandem import files
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.serving import UpdateReport
from mlx_tandem.training.online.update import Pending
from mlx_tandem.training.store import old_journal
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.old_journal import Added, Compared, Dropped, Forgotten, Opened, Record, Seen
from mlx_tandem.training.store.records import Began, Ended, Kept, State
from mlx_tandem.training.store.rows import MOST_UPDATES
from mlx_tandem.training.trajectories import Trajectory

log = logging.getLogger(__name__)

JOURNAL, HISTORY = "journal", "history.jsonl"
"""Names that earlier versions gave beside the checkpoints."""


class Marks(msgspec.Struct):
    """The statement of an earlier version's checkpoint about the journal that it was made beside."""

    follows: str = ""  # the label of the checkpoint that the journal of that moment begins after
    began: int = 0  # updates in that journal, all of them in the checkpoint
    compared: int = 0  # comparisons in that journal, all of them in the checkpoint's counters
    records: int = 0  # records in that journal, all of them in the checkpoint's counts


async def take_over(ledger: Ledger, manifest: Manifest | None) -> None:
    """Put what the folder's journal and history hold; the newest checkpoint, which is `manifest`, is the first state.

    Raises StorageError when the journal is damaged.
    """
    folder = ledger.checkpoints.folder
    found: list[Record] = []
    if (folder / JOURNAL).is_dir():
        found = await asyncio.to_thread(old_journal.read, folder / JOURNAL)
    if manifest is not None:
        content = (manifest.step, manifest.version, manifest.digest, manifest.files)
        state = State(manifest.name, ledger.counters.updates, *content)
        ledger.put(*ledger.rows.states([state], state.number))
    if found:
        _replay(ledger, manifest, found)
    reports = await asyncio.to_thread(_reports, folder / HISTORY)
    for number, report in enumerate(reports, ledger.counters.updates - len(reports) + 1):
        end = Ended(report.step, report.outcome, version=report.version)
        ledger.put(*ledger.rows.reported(number, end, report))
    if found:
        fields = {
            "folder": str(folder),
            "updates": ledger.counters.updates,
            "trajectories": len(ledger.buffer) + len(ledger.waiting),
        }
        log.warning("taken over into learning.db from an earlier version", extra={"fields": fields})


def clear(folder: Path) -> None:
    """Give the files that were taken over names that say so. Only an old version would still need them."""
    for name in (JOURNAL, HISTORY):
        new = folder / f"{name}.taken-over"
        if (folder / name).exists() and not new.exists():
            with files.storage(folder / name):
                files.DISK.rename(folder / name, new)
                files.sync_folder(folder)


def _replay(ledger: Ledger, manifest: Manifest | None, records: list[Record]) -> None:
    """Let a ledger with a checkpoint's counters do what the records say, as far as the checkpoint does not hold it."""
    opened, marks = records[0], Marks()
    assert isinstance(opened, Opened)
    if manifest is not None:
        marks = msgspec.convert(manifest.counters, Marks, str_keys=True, strict=False)
    if manifest is None:
        belongs, held = not opened.checkpoint, 0
    elif opened.checkpoint == marks.follows:  # the process ended between the checkpoint and its journal
        belongs, held = True, marks.began
    else:  # the oldest journals have the name alone
        belongs, held = opened.checkpoint in (manifest.label, manifest.name), 0
    if not belongs:  # its updates came after a checkpoint that is gone
        held = sum(isinstance(record, Began) for record in records)
    same_file = opened.checkpoint == marks.follows
    counted, compared = (marks.records, marks.compared) if same_file else (0, 0)
    counts = replace(ledger.counters.counts)
    replay = _Replay(ledger, held, compared if belongs else len(records))
    for number, record in enumerate(records, 1):
        replay.take(record)
        if number == counted if counted else isinstance(record, Seen):
            ledger.buffer.counts = replace(counts)
    if counted > len(records):  # the last of them were not written
        ledger.buffer.counts = replace(counts)


class _Replay:
    """The effect of a journal's records on a ledger whose counters have the first `held` updates, and `compared`
    comparisons.
    """

    def __init__(self, ledger: Ledger, held: int, compared: int) -> None:
        self._ledger, self._held, self._compared = ledger, held, compared
        self._known: dict[str, Trajectory] = {}
        self._begun = 0

    def take(self, record: Record) -> None:
        """Do what one record says."""
        ledger = self._ledger
        match record:
            case Added():
                self._known[record.trajectory.id] = record.trajectory
                ledger.take_in(record.trajectory, record.size)
            case Kept():
                ledger.keep_one(record)
            case Forgotten():
                ledger.forget(record.ids)
            case Seen():
                _remember(ledger, record.ids)
            case Dropped():
                ledger.drop_stale(record.ids)
            case Began():
                self._begin(record)
            case Ended():
                if ledger.pending is not None:
                    ledger.end(record)
            case Compared() if self._compared:
                self._compared -= 1
            case Compared():
                ledger.compared(record.difference, record.tolerated)
            case Opened():
                pass

    def _begin(self, began: Began) -> None:
        self._begun += 1
        ids, ledger = began.trajectories, self._ledger
        ledger.buffer.remove(ids)
        ledger.buffer.counts.taken += len(ids)
        if self._begun > self._held:
            ledger.drop_pending()  # it was cut off, and never ended
            ledger.begin(Pending(began, [self._known[id] for id in ids if id in self._known]))
        else:
            _remember(ledger, ids)


def _remember(ledger: Ledger, ids: Sequence[str]) -> None:
    """Take no trajectories with these ids from now on; durable with the next `flush`."""
    held = {t.id: t for t, _ in ledger.buffer.held}
    ledger.buffer.remember(ids)
    ledger.put(*(ledger.rows.gone(id, ledger.buffer.position(id), "seen") for id in ids if id not in held))
    for id in held.keys() & set(ids):
        place = ledger.buffer.group(held[id].group)
        assert place is not None
        ledger.put(ledger.rows.waiting(held[id], ledger.buffer.position(id), *place))


def _reports(file: Path) -> list[UpdateReport]:
    """Return the newest reports in a history, oldest first, without lines that cannot be read."""
    try:
        lines = file.read_bytes().splitlines()[-MOST_UPDATES:]
    except FileNotFoundError:
        return []
    except OSError as e:
        log.warning("the history of earlier updates cannot be read: %s", e.strerror or e)
        return []
    found = []
    for line in lines:
        # A crash cuts lines off, and other versions have other fields. ValueError is that of msgspec, too.
        with contextlib.suppress(ValueError, RecursionError):
            found.append(msgspec.json.decode(line, type=UpdateReport))
    return found
