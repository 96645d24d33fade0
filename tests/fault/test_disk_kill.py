"""The process that fills a disk cache is killed again and again; whatever is found afterwards is exactly right.

TANDEM_DISK_KILLS=300 has it killed so many times.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.disk_tools import block, cache, payload

KILLS = int(os.environ.get("TANDEM_DISK_KILLS", "10"))
WRITER = f"from {__name__} import write_on; write_on()"
SETTINGS = {"max_size_gb": 4e-3, "segment_bytes": 300_000, "ttl_days": 0}
BLOCKS = 400
SIZE = 5000


def write_on() -> None:
    """Puts and reads blocks in the folder argv[1] for ever, and says when the disk answers wrongly or not at all."""
    rng = random.Random(int(sys.argv[2]))
    durability = rng.choice(["persistent", "best_effort"])
    disk = cache(Path(sys.argv[1]), **SETTINGS, durability=durability)  # type: ignore[arg-type]
    print("open", flush=True)
    while True:
        for _ in range(rng.randint(1, 30)):
            i = rng.randrange(BLOCKS)
            disk.put(block(i), payload(i, SIZE * (1 + i % 3)))
        first = rng.randrange(BLOCKS)
        ticket = disk.read([block(i) for i in range(first, first + 4)])
        disk.settle(60)
        (done,) = disk.poll()
        right = done.ticket == ticket and check(first, [bytes(p) for p in done.payloads])
        print("right" if right and not disk.stats().off else f"wrong {first} {disk.stats()}", flush=True)


def check(first: int, found: list[bytes]) -> bool:
    return all(data == payload(i, SIZE * (1 + i % 3)) for i, data in enumerate(found, first))


@pytest.mark.promise("FLT-20")
def test_kill_9_while_writing_and_reading(tmp_path: Path) -> None:
    rng = random.Random(0)
    kept = 0
    for seed in range(KILLS):
        words = [sys.executable, "-c", WRITER, str(tmp_path), str(seed)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(rng.randint(1, 12)):
                assert child.stdout.readline().strip() in ("open", "right"), f"after kill {seed}"
            for _ in range(rng.randint(0, 20_000)):  # into the middle of whatever comes next
                pass
            child.kill()
            assert all(line.strip() in ("right", "") for line in child.stdout if line.endswith("\n"))
        disk = cache(tmp_path, **SETTINGS)  # type: ignore[arg-type]
        assert disk.settle(60), "the lock of a process that was killed is free"
        for i in range(BLOCKS):
            ticket = disk.read([block(i)])
            assert disk.settle(60)
            (done,) = disk.poll()
            assert done.ticket == ticket and check(i, [bytes(p) for p in done.payloads])
        stats = disk.stats()
        assert stats.quarantined == 0, "a kill tears the end of the newest segment only"
        assert stats.bytes == sum(p.stat().st_size for p in tmp_path.glob("segment-*")) <= 4_300_000
        kept = stats.hits
        disk.close()
    assert kept > 0
