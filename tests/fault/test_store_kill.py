"""The writer of a database is killed again and again; whatever it had been told was durable is there afterwards."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_tandem.training.store.database import Database, Statement, Writer
from mlx_tandem.training.store.rows import Rows
from mlx_tandem.training.store.saved import Saved
from mlx_tandem.training.trajectories import Counts, Trajectory

KILLS = 24
ROWS = Rows("policy")
WRITER = f"import asyncio; from {__name__} import write_on; asyncio.run(write_on())"


def found(database: Database) -> list[int]:
    return [int(waiting.trajectory.id) for waiting in Saved(database, "policy").waiting()]


def trajectory(number: int, length: int) -> Trajectory:
    return Trajectory(str(number), str(number), (1,) * length, (2,), (-1.0,), (-1.0,), (1,), 1.0, 0.5)


async def write_on() -> None:
    """Goes on with the database in argv[1]: adds trajectories, drops the oldest of them, and says what is durable."""
    rng = random.Random(int(sys.argv[2]))
    database = Database.open(Path(sys.argv[1]))
    held = found(database)
    counts = Saved(database, "policy").run(Counts) or Counts()
    writer = Writer(database, lambda: ROWS.run(counts, 0.0))
    while True:
        for _ in range(rng.randint(1, 5)):
            counts.collected += 1
            held.append(counts.collected)
            writer.put(ROWS.waiting(trajectory(counts.collected, rng.randint(1, 2000)), counts.collected, 0, held[-1]))
        if rng.random() < 0.2:
            gone: list[Statement] = [ROWS.gone(str(number), number, "stale") for number in held[:-3]]
            held, counts.dropped_stale = held[-3:], counts.dropped_stale + len(gone)
            writer.put(*gone)
        await writer.flush()
        print(counts.collected, counts.dropped_stale, flush=True)


@pytest.mark.promise("FLT-32")
def test_kill_9_while_writing(tmp_path: Path) -> None:
    rng = random.Random(0)
    for seed in range(KILLS):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(seed)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        with child:
            for _ in range(rng.randint(1, 12)):
                said = child.stdout.readline()
                assert said, f"the writer ended by itself after kill {seed}"
            for _ in range(rng.randint(0, 20_000)):  # into the middle of whatever comes next
                pass
            child.kill()
            whole_lines = [line for line in (said, *child.stdout.readlines()) if line.endswith("\n")]
        collected, dropped = map(int, whole_lines[-1].split())
        database = Database.open(tmp_path)
        counts = Saved(database, "policy").run(Counts)
        assert counts is not None and counts.collected >= collected and counts.dropped_stale >= dropped
        assert found(database) == list(range(counts.dropped_stale + 1, counts.collected + 1)), "one story, none missing"
        database.close()
    assert counts.dropped_stale > 0
