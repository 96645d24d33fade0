"""The statements that change the rows of one adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from mlx_tandem.training.open_trajectories import Beginning, Exchange
from mlx_tandem.training.store.database import Statement
from mlx_tandem.training.store.records import GOOD, Began, Ended, State, seal
from mlx_tandem.training.store.schema import TrajectoryState
from mlx_tandem.training.trajectories import Trajectory

T = TypeVar("T")

MOST_UPDATES = 1000
"""Most updates that are kept, with their reports."""

MOST_PAST = 1000
"""Most trajectories that are kept with their content after they were learned from or dropped."""


class Rows:
    """Statements about one adapter. Each may be repeated. Executing them is the writer's business."""

    def __init__(self, adapter: str) -> None:
        self.adapter = adapter

    def run(self, counters: Struct, now: float) -> Statement:
        """Save the loop's counters. `now` counts when there was no run of this adapter."""
        sql = "INSERT INTO runs VALUES (?, ?, ?) ON CONFLICT (adapter) DO UPDATE SET counters = excluded.counters"
        return sql, (self.adapter, now, seal(counters))

    def waiting(self, t: Trajectory, position: int, size: int, place: int) -> Statement:
        """Save a trajectory that waits for an update."""
        sql = "INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, 'waiting', ?, ?, ?, ?, NULL, ?)"
        return sql, (self.adapter, t.id, position, place, t.group, size, t.reward, seal(t))

    def group(self, name: str, size: int, place: int) -> Statement:
        """Note of a group that waits what has changed."""
        sql = "UPDATE trajectories SET size = ?, place = ? WHERE adapter = ? AND grp = ? AND state = 'waiting'"
        return sql, (size, place, self.adapter, name)

    def learned(self, id: str, position: int, number: int, t: Trajectory | None) -> Statement:
        """Note that a trajectory was given to an update. One that did not wait is saved with what is known of it."""
        sql = (
            "INSERT INTO trajectories VALUES (?, ?, ?, 'learned', 0, ?, 0, ?, ?, ?) ON CONFLICT (adapter, id) "
            "DO UPDATE SET state = 'learned', position = excluded.position, update_number = excluded.update_number, "
            "body = coalesce(excluded.body, body)"
        )
        known = ("", None, number, None) if t is None else (t.group, t.reward, number, seal(t))
        return sql, (self.adapter, id, position, *known)

    def gone(self, id: str, position: int, state: TrajectoryState) -> Statement:
        """Note that a trajectory was dropped."""
        sql = (
            "INSERT INTO trajectories (adapter, id, position, state) VALUES (?, ?, ?, ?) ON CONFLICT (adapter, id) "
            "DO UPDATE SET state = excluded.state, position = excluded.position"
        )
        return sql, (self.adapter, id, position, state)

    def prune(self, updates: int) -> Statement:
        """Keep only the ids of what was dropped or learned from in the first `updates`, but for the newest of it."""
        past = "adapter = ? AND state <> 'waiting' AND body IS NOT NULL"
        sql = (
            f"UPDATE trajectories SET body = NULL WHERE {past} AND coalesce(update_number, 0) <= ? AND position <= "
            f"(SELECT position FROM trajectories WHERE {past} ORDER BY position DESC LIMIT 1 OFFSET ?)"
        )
        return sql, (self.adapter, updates, self.adapter, MOST_PAST)

    def forget(self, id: str) -> Statement:
        """Forget the id of a trajectory that does not wait."""
        return "DELETE FROM trajectories WHERE adapter = ? AND id = ? AND state <> 'waiting'", (self.adapter, id)

    def answer(
        self, id: str, place: int, at: float, begun: Beginning, number: int, exchange: Exchange
    ) -> list[Statement]:
        """Save answer `number` of a trajectory whose reward is still missing."""
        return [
            (
                "INSERT OR REPLACE INTO open_trajectories VALUES (?, ?, ?, ?, ?)",
                (self.adapter, id, place, at, seal(begun)),
            ),
            ("INSERT OR REPLACE INTO exchanges VALUES (?, ?, ?, ?)", (self.adapter, id, number, seal(exchange))),
        ]

    def beginning(self, id: str, begun: Beginning) -> Statement:
        """Note that what all answers of a trajectory have in common has changed."""
        sql = "UPDATE open_trajectories SET begun = ? WHERE adapter = ? AND id = ?"
        return sql, (seal(begun), self.adapter, id)

    def closed(self, id: str) -> list[Statement]:
        """Remove a trajectory that has its reward, or will have none."""
        return [
            (f"DELETE FROM {table} WHERE adapter = ? AND id = ?", (self.adapter, id))
            for table in ("open_trajectories", "exchanges")
        ]

    def began(self, number: int, began: Began) -> Statement:
        """Save an update that will be done, whatever happens."""
        sql = "INSERT OR REPLACE INTO updates (adapter, number, began) VALUES (?, ?, ?)"
        return sql, (self.adapter, number, seal(began))

    def unbegun(self, number: int) -> Statement:
        """Remove an update that will not be done."""
        return "DELETE FROM updates WHERE adapter = ? AND number = ?", (self.adapter, number)

    def ended(self, number: int, end: Ended, report: Struct | None) -> list[Statement]:
        """Save how an update has ended, and remove those that are too old to be kept."""
        keep = "began" if end.outcome in GOOD else "NULL"
        return [
            (
                "INSERT OR IGNORE INTO updates (adapter, number) VALUES (?, ?)",
                (self.adapter, number),
            ),
            (
                f"UPDATE updates SET outcome = ?, step = ?, version = ?, digest = ?, began = {keep}, report = ? "
                "WHERE adapter = ? AND number = ?",
                (end.outcome, end.step, end.version, end.digest, _json(report), self.adapter, number),
            ),
            (
                "DELETE FROM updates WHERE adapter = ? AND number <= ? AND began IS NULL",
                (self.adapter, number - MOST_UPDATES),
            ),
        ]

    def reported(self, number: int, end: Ended, report: Struct) -> list[Statement]:
        """Save the report of an update, of which nothing else may be known but how it has ended."""
        return [
            (
                "INSERT OR IGNORE INTO updates (adapter, number, outcome, step, version) VALUES (?, ?, ?, ?, ?)",
                (self.adapter, number, end.outcome, end.step, end.version),
            ),
            ("UPDATE updates SET report = ? WHERE adapter = ? AND number = ?", (_json(report), self.adapter, number)),
        ]

    def states(self, states: Sequence[State], first: int) -> list[Statement]:
        """Save which states there are, oldest first. The data of updates up to `first` is not needed any more."""
        saved: list[Statement] = [("DELETE FROM states WHERE adapter = ?", (self.adapter,))]
        sql = "INSERT INTO states (adapter, folder, number, step, version, digest, files) VALUES (?, ?, ?, ?, ?, ?, ?)"
        for s in states:
            row = (self.adapter, s.folder, s.number, s.step, s.version, s.digest, msgspec.json.encode(s.files))
            saved.append((sql, row))
        sql = "UPDATE updates SET began = NULL WHERE adapter = ? AND number <= ? AND outcome IS NOT NULL"
        return [*saved, (sql, (self.adapter, first))]


def _json(report: Struct | None) -> bytes | None:
    return None if report is None else msgspec.json.encode(report)
