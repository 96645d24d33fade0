"""Readers of the database of a server that learns, whether the server runs or not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from mlx_tandem.training.store.database import Database
from mlx_tandem.training.store.records import unseal
from mlx_tandem.training.trajectories import Trajectory


def trajectories(folder: Path) -> dict[str, Trajectory]:
    """Those that wait, were learned from or dropped, by id."""
    with closing(Database.read_only(folder)) as database:
        rows = database.rows("SELECT body FROM trajectories WHERE body IS NOT NULL")
        return {t.id: t for t in (unseal(body, Trajectory) for (body,) in rows)}


def states(folder: Path) -> dict[str, str]:
    """What has become of each trajectory that ever came, by id."""
    with closing(Database.read_only(folder)) as database:
        return dict(database.rows("SELECT id, state FROM trajectories"))


def sizes(folder: Path) -> dict[str, int]:
    """The size of the group of each trajectory that ever came, by id; 0 when it is not known."""
    with closing(Database.read_only(folder)) as database:
        return dict(database.rows("SELECT id, size FROM trajectories"))
