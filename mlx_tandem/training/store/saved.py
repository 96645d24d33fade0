"""The queries that bring the rows of one adapter back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from mlx_tandem.training.open_trajectories import Beginning, Exchange, OpenTrajectories
from mlx_tandem.training.store.database import Database, damaged
from mlx_tandem.training.store.records import GOOD, Began, Broken, Ended, State, unseal
from mlx_tandem.training.trajectories import Trajectory

T = TypeVar("T")


class Waiting(NamedTuple):
    """A trajectory that waits for an update."""

    trajectory: Trajectory
    size: int  # of its group, as it has to be added
    place: int  # of its group


class UpdateRow(NamedTuple):
    """An update that has ended, without its data."""

    number: int
    end: Ended
    is_kept: bool  # its data is still there, so that it can be computed again

    @property
    def stands(self) -> bool:
        """Whether its step was not taken back."""
        return self.end.outcome in GOOD


class Saved:
    """Queries of what a database has of one adapter. Every call may wait for the drive and raise StorageError."""

    def __init__(self, database: Database, adapter: str) -> None:
        self.database, self.adapter = database, adapter

    def run(self, kind: type[T]) -> T | None:
        """Return the loop's counters; None: there was no run of this adapter."""
        found = self.database.rows("SELECT counters FROM runs WHERE adapter = ?", self.adapter)
        return unsealed(self.database, found[0][0], kind, f"the run of {self.adapter}") if found else None

    def waiting(self) -> Iterator[Waiting]:
        """Yield the trajectories that wait for an update, in an order in which they make the same buffer again."""
        sql = (
            "SELECT id, size, place, body FROM trajectories WHERE adapter = ? AND state = 'waiting' "
            "ORDER BY place, position"
        )
        for id, size, place, body in self.database.rows(sql, self.adapter):
            yield Waiting(unsealed(self.database, body, Trajectory, f"the trajectory {id}"), size, place)

    def seen(self, most: int) -> list[tuple[str, int]]:
        """Return the `most` newest ids that are not taken again, oldest first, each with its position."""
        sql = "SELECT id, position FROM trajectories WHERE adapter = ? ORDER BY position DESC LIMIT ?"
        return [(id, position) for id, position in reversed(self.database.rows(sql, self.adapter, most))]

    def learned(self, ids: Sequence[str]) -> list[Trajectory]:
        """Return those of these trajectories that are known."""
        sql = "SELECT body FROM trajectories WHERE adapter = ? AND id = ? AND body IS NOT NULL"
        found = [(id, row) for id in ids for row in self.database.rows(sql, self.adapter, id)]
        return [unsealed(self.database, row[0], Trajectory, f"the trajectory {id}") for id, row in found]

    def open(self, into: OpenTrajectories) -> int:
        """Put the trajectories without a reward where they were; return the highest place."""
        last = 0
        sql = "SELECT id, place, touched, begun FROM open_trajectories WHERE adapter = ? ORDER BY place"
        for id, place, touched, begun in self.database.rows(sql, self.adapter):
            what = f"the open trajectory {id}"
            common: Beginning | None = unsealed(self.database, begun, Beginning, what)
            said = self.database.rows(
                "SELECT body FROM exchanges WHERE adapter = ? AND id = ? ORDER BY number", self.adapter, id
            )
            for (body,) in said:
                into.put(id, common, unsealed(self.database, body, Exchange, what), touched)
                common = None
            last = place
        return last

    def pending(self) -> Began | None:
        """Return the update that has begun and not ended."""
        sql = "SELECT began FROM updates WHERE adapter = ? AND outcome IS NULL"
        found = self.database.rows(sql, self.adapter)
        return unsealed(self.database, found[0][0], Began, "the update that began last") if found else None

    def updates(self) -> list[UpdateRow]:
        """Return the updates that have ended, in order."""
        sql = (
            "SELECT number, step, outcome, digest, version, began IS NOT NULL FROM updates "
            "WHERE adapter = ? AND outcome IS NOT NULL ORDER BY number"
        )
        return [UpdateRow(n, Ended(*end), bool(kept)) for n, *end, kept in self.database.rows(sql, self.adapter)]

    def began(self, number: int) -> Began:
        """Return the data of an update. Raises StorageError."""
        sql = "SELECT began FROM updates WHERE adapter = ? AND number = ? AND began IS NOT NULL"
        found = self.database.rows(sql, self.adapter, number)
        if not found:
            raise damaged(self.database.path, f"the data of update {number} is missing")
        return unsealed(self.database, found[0][0], Began, f"update {number}")

    def states(self) -> list[State]:
        """Return the states of the trainer, oldest first."""
        sql = "SELECT folder, number, step, version, digest, files FROM states WHERE adapter = ? ORDER BY id"
        return [
            State(folder, number, step, version, digest, msgspec.json.decode(files, type=dict[str, str]))
            for folder, number, step, version, digest, files in self.database.rows(sql, self.adapter)
        ]

    def reports(self) -> list[tuple[int, bytes]]:
        """Return the numbers and the reports (JSON) of the last updates, oldest first."""
        sql = "SELECT number, report FROM updates WHERE adapter = ? AND report IS NOT NULL ORDER BY number"
        return [(number, report) for number, report in self.database.rows(sql, self.adapter)]


def unsealed(database: Database, data: bytes, kind: type[T], what: str) -> T:
    """Return the value of sealed bytes. Raises StorageError, naming `what` they are."""
    try:
        return unseal(data, kind)
    except Broken as e:
        raise damaged(database.path, f"{what}: {e}") from e
