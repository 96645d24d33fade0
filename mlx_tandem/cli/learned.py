"""Readers of the folder of a server that learns, which may be running, for `tandem learn list`, `show` and `export`."""

from __future__ import annotations

import json
from collections.abc import Generator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mlx_tandem.files import StorageError

if TYPE_CHECKING:
    from mlx_tandem.training.store.database import Database
    from mlx_tandem.training.trajectories import Trajectory

Line = dict[str, Any]

LISTED = ("adapter", "updates", "version", "mean_reward", "waiting", "open", "past", "under_way", "last_update")
"""Fields of a run, as `list` shows them."""

SHOWN = ("update", "outcome", "version", "trajectories", "feedback", "mean_reward", "loss", "kl", "seconds", "reason")
"""Fields of an update, as `show` shows them."""


def runs(database: Database) -> list[Line]:
    """Return a line for each adapter that has learned, in the order of their names."""
    names = [name for (name,) in database.rows("SELECT adapter FROM runs ORDER BY adapter")]
    return [_run(database, name) for name in names]


def _run(database: Database, adapter: str) -> Line:
    from mlx_tandem.training.online.counters import Counters
    from mlx_tandem.training.store.saved import Saved

    saved = Saved(database, adapter)
    counters = saved.run(Counters) or Counters()
    held = dict(
        database.rows(
            "SELECT state = 'waiting', count(*) FROM trajectories WHERE adapter = ? AND body IS NOT NULL GROUP BY 1",
            adapter,
        )
    )
    [(still_open,)] = database.rows("SELECT count(*) FROM open_trajectories WHERE adapter = ?", adapter)
    reports = saved.reports()
    last = counters.last_update
    return {
        "adapter": adapter,
        "updates": counters.updates,
        "version": counters.last_version,
        "mean_reward": json.loads(reports[-1][1])["mean_reward"] if reports else None,
        "waiting": held.get(1, 0),
        "open": still_open,
        "past": held.get(0, 0),
        "under_way": saved.pending() is not None,
        "last_update": None if last is None else datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds"),
        "rollbacks": counters.course.rollbacks,
        "trajectories_collected": counters.counts.collected,
    }


def updates(database: Database, adapter: str | None, last: int) -> list[Line]:
    """Return the reports of the last updates of a run, oldest first, each with its number. Raises StorageError."""
    from mlx_tandem.training.store.saved import Saved

    found = Saved(database, chosen(database, adapter)).reports()
    return [{"update": number} | json.loads(report) for number, report in found[-last:]]


def trajectories(database: Database, adapter: str | None) -> Generator[Line, None, None]:
    """Yield the trajectories of a run whose content is kept, in the order in which they came. Raises StorageError."""
    from mlx_tandem.training.store.saved import unsealed
    from mlx_tandem.training.trajectories import Trajectory

    sql = (
        "SELECT id, state, update_number, body FROM trajectories WHERE adapter = ? AND body IS NOT NULL "
        "ORDER BY position"
    )
    for id, state, number, body in database.each(sql, chosen(database, adapter)):
        yield _line(unsealed(database, body, Trajectory, f"the trajectory {id}"), state, number)


def _line(t: Trajectory, state: str, number: int | None) -> Line:
    """Return a trajectory under the names that `/v1/training/update` takes, and what has become of it."""
    return {
        "id": t.id,
        "group": t.group,
        "state": state,
        "update": number,
        "reward": t.reward,
        "turn_rewards": t.turn_rewards,
        "prompt_token_ids": t.prompt,
        "token_ids": t.tokens,
        "mask": t.mask or None,
        "logprobs": t.model_logprobs or None,
        "sampled_logprobs": t.logprobs or None,
        "versions": t.versions or None,
        "temperature": t.temperature,
        "finish_reason": t.finish_reason,
        "created": t.created,
        "metadata": t.metadata,
    }


def feedback(database: Database) -> Generator[Line, None, None]:
    """Yield the feedback on completions, in the order in which it came. Raises StorageError."""
    from mlx_tandem.training.feedback.opinions import ALL
    from mlx_tandem.training.feedback.store import COLUMNS, read

    for row in database.each(f"SELECT {COLUMNS} FROM feedback ORDER BY number"):
        stored = read(database, *row)
        f = stored.feedback
        yield {
            "number": stored.number,
            "completion_id": f.completion,
            "choice": None if f.choice == ALL else f.choice,
            "source": f.source,
            "created": f.created,
            "adapter": f.adapter or None,
            "version": f.version,
            "learned": stored.learned,
            "score": f.score,
            "preferred": None if f.preferred == ALL else f.preferred,
            "prompt_token_ids": f.prompt,
            "answers": f.answers,
            "corrected": f.corrected or None,
            "comment": f.comment or None,
            "metadata": f.metadata,
        }


def chosen(database: Database, adapter: str | None) -> str:
    """Return the adapter that is named, or the only one. Raises StorageError, naming those that there are."""
    names = [name for (name,) in database.rows("SELECT adapter FROM runs ORDER BY adapter")]
    if adapter is None and len(names) == 1:
        return str(names[0])
    if adapter is None or adapter not in names:
        known = ", ".join(names) or "none"
        asked = "name one of the adapters" if adapter is None else f"there is no run of {adapter[:100]!r}"
        raise StorageError(f"{asked}; {database.path} has: {known}")
    return adapter
