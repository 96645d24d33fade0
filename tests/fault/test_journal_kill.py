"""The writer of a journal is killed again and again; whatever it had been told was durable is there afterwards."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

from mlx_tandem.training.store.journal import Journal
from mlx_tandem.training.store.records import Added, Opened, Seen
from mlx_tandem.training.trajectories import Buffer, Trajectory

KILLS = 36
WRITER = f"import asyncio; from {__name__} import write_on; asyncio.run(write_on())"


def restored(records: list[object]) -> tuple[Buffer, int]:
    """A buffer that keeps everything, and the step of the checkpoint that the journal follows."""
    buffer, step = Buffer(1 << 20), 0
    for record in records:
        match record:
            case Opened():
                step = record.step
            case Added():
                assert buffer.add(record.trajectory, record.size), "twice"
            case Seen():
                buffer.remember(record.ids)
            case _:
                raise AssertionError(record)
    return buffer, step


async def write_on() -> None:
    """Goes on with the journal in argv[1]: appends, flushes, now and then rotates, and says what is durable."""
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    journal, found = Journal.open(folder)
    buffer, step = restored(list(found))
    next_id = len(buffer.seen)
    while True:
        for _ in range(rng.randint(1, 5)):
            t = Trajectory(
                str(next_id), str(next_id), (1,) * rng.randint(1, 2000), (2,), (-1.0,), (-1.0,), (1,), 1.0, 0.5
            )
            assert buffer.add(t)
            journal.append(Added(t))
            next_id += 1
        if rng.random() < 0.2:
            buffer.remove([t.id for t, _ in buffer.held[:-3]])
            step += 1
            await journal.rotate(f"checkpoint-{step}", step, buffer.held, buffer.seen)
        else:
            await journal.flush()
        print(next_id, step, flush=True)


async def opened(folder: Path) -> tuple[Buffer, int]:
    journal, found = Journal.open(folder)
    await journal.close()
    return restored(list(found))


def test_kill_9_while_appending_and_rotating(tmp_path: Path):
    rng = random.Random(0)
    rotations = 0
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
            said = whole_lines[-1]
        acknowledged, step_acknowledged = map(int, said.split())
        buffer, step = asyncio.run(opened(tmp_path))
        ids = [int(i) for i in buffer.seen]
        assert ids == list(range(len(ids))), "in order, none missing"
        assert len(ids) >= acknowledged and step >= step_acknowledged
        rotations += step
    assert rotations > 0 and [p.suffix for p in tmp_path.iterdir()].count(".log") == 1
