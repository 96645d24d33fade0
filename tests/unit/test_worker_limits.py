"""The limits of a worker process, seen from inside of one process: frames, time and memory."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from typing import Any

import pytest

from mlx_tandem.isolation import program
from mlx_tandem.isolation.frames import framed
from mlx_tandem.isolation.process import Program, WorkerProcess


def test_the_largest_frame_of_an_answer() -> None:
    async def receive(size: int) -> Any:
        worker = WorkerProcess(Program("none", (), lambda raw: raw, largest=5))
        worker._reader = asyncio.StreamReader()
        worker._reader.feed_data(framed(b"x" * size))
        return await worker._receive()

    assert asyncio.run(receive(5)) == b"xxxxx"
    with pytest.raises(ValueError, match="a frame of 6 bytes"):
        asyncio.run(receive(6))


def test_a_limit_of_time_holds_for_its_block_alone() -> None:
    """Another one would end an idle worker, or one that is at the next item."""
    timer = signal.ITIMER_PROF  # the other one is pytest's
    with program.time_limit(timer, 1000.0):
        assert 900 < signal.getitimer(timer)[0] < 1001
    assert signal.getitimer(timer)[0] == 0
    with pytest.raises(KeyError), program.time_limit(timer, 1000.0):
        raise KeyError
    assert signal.getitimer(timer)[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the memory is watched")
def test_a_limit_of_memory_is_counted_from_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    program.limit_memory(1 << 20)
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[0]) * resource.getpagesize()
    ((kind, (soft, hard)),) = limits
    assert (kind, soft) == (resource.RLIMIT_AS, hard)
    assert abs(soft - now - (1 << 20)) < 64 << 20
