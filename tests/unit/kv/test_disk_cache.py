"""The cache on the drive under its owner: nothing waits, nothing raises, and trouble costs blocks only."""

from __future__ import annotations

import errno
import itertools
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.files import Disk, StorageError
from mlx_tandem.kv.disk import cache as module
from mlx_tandem.kv.disk.cache import MAX_PAUSE, DiskCache
from tests.faulty import FaultFiles, ForgetfulFiles
from tests.unit.disk_tools import BASE, Clock, block, cache, others, payload, read


class Gate(Disk):
    """A drive whose writes or reads wait while `shut` is set, and that notes in which order they came."""

    def __init__(self) -> None:
        self.passes = threading.Event()
        self.passes.set()
        self.waiting = threading.Event()
        self.order: list[str] = []

    def _pass(self, what: str) -> None:
        self.waiting.set()
        assert self.passes.wait(60)
        self.order.append(what)

    def read(self, fd: int, into: bytearray | memoryview, offset: int) -> int:
        self._pass("read")
        return super().read(fd, into, offset)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._pass("write")
        return super().write(fd, data)

    def shut(self) -> None:
        self.waiting.clear()
        self.passes.clear()


class Sick(Disk):
    """A drive that raises `error` where `sick` names an operation."""

    def __init__(self, error: int | None = None, sick: str = "") -> None:
        self.error, self.sick = error, sick

    def _check(self, name: str) -> None:
        if name in self.sick:
            raise OSError(self.error, "sick") if self.error else RuntimeError("a mistake in the code")

    def read(self, fd: int, into: bytearray | memoryview, offset: int) -> int:
        self._check("read")
        return super().read(fd, into, offset)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._check("write")
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._check("sync")
        super().sync(fd)


def until(done: Callable[[], object]) -> None:
    """Without a limit of its own: that is the test's."""
    tick = threading.Event()
    while not done():
        tick.wait(0.005)


def put(disk: DiskCache, *numbers: int) -> None:
    for i in numbers:
        assert disk.put(block(i), payload(i))


def test_put_read_and_again_after_a_restart(tmp_path: Path) -> None:
    for start in range(2):
        disk = cache(tmp_path, segment_bytes=1000)
        assert disk.settle(), "what is there is known"
        put(disk, *range(10))
        assert disk.settle()
        assert disk.longest([block(i).key for i in range(12)]) == 10
        assert disk.longest([block(11).key, block(1).key]) == 0 and disk.longest([]) == 0
        assert read(disk, [block(i) for i in range(12)]) == [payload(i) for i in range(10)]
        assert read(disk, []) == []
        stats = disk.stats()
        assert (stats.records, stats.hits, stats.misses, stats.written) == (10, 10, 1, 0 if start else 10)
        assert stats.reload_bytes == sum(len(payload(i)) for i in range(10)) and stats.reload_seconds > 0
        assert stats.bytes == sum(p.stat().st_size for p in tmp_path.glob("segment-*")) and stats.segments > 1
        assert not stats.off and not stats.read_only and not stats.scanning and stats.errors == stats.dropped == 0
        disk.close()
        disk.close()
        assert disk.longest([block(0).key]) == 0 and not disk.put(block(20), b"") and read(disk, [block(0)]) == []


@pytest.mark.parametrize("large", [1, module.LARGE], ids=["checked beside the reading", "checked after it"])
def test_a_read_ends_at_the_first_block_that_is_not_right(
    tmp_path: Path, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE", large)
    disk = cache(tmp_path, segment_bytes=1 << 20)
    put(disk, 0, 1, 2)
    assert disk.settle()
    with next(tmp_path.glob("segment-*")).open("r+b") as f:
        f.seek(-(len(payload(2)) + 140 + len(payload(1)) // 2), 2)
        f.write(b"\0\0\0\0")
    assert read(disk, [block(0), block(1), block(2)]) == [payload(0)]
    assert disk.longest([block(i).key for i in range(3)]) == 1 and disk.stats().quarantined == 1
    put(disk, 1)
    assert disk.settle() and read(disk, [block(0), block(1), block(2)]) == [payload(0), payload(1), payload(2)]
    disk.close()


def test_what_waits_to_be_written_can_be_read(tmp_path: Path) -> None:
    gate = Gate()
    disk = cache(tmp_path, gate)
    assert disk.settle()
    gate.shut()
    put(disk, 0, 1)
    assert gate.waiting.wait(60) and disk.longest([block(0).key, block(1).key]) == 2
    foreign = {disk.read([other]) for other in others(block(1))}
    ticket = disk.read([block(0), block(1)])
    gate.passes.set()
    found: dict[int, list[bytes]] = {}
    until(lambda: found.update({r.ticket: [bytes(p) for p in r.payloads] for r in disk.poll()}) or len(found) == 6)
    assert found == {ticket: [payload(0), payload(1)], **{other: [] for other in foreign}}, "only under its whole id"
    disk.close()


def test_a_full_queue_drops_and_counts_and_the_caller_never_waits(tmp_path: Path) -> None:
    gate = Gate()
    disk = cache(tmp_path, gate, writer_queue_size=3)
    assert disk.settle()
    gate.shut()
    assert [disk.put(block(i), payload(i)) for i in range(6)] == [True] * 3 + [False] * 3
    assert disk.put(block(0), payload(0)), "it is on its way already"
    assert disk.stats().dropped == 3 and disk.stats().queued == 3
    gate.passes.set()
    assert disk.settle() and disk.stats().written == 3
    disk.close()


def test_the_queue_is_limited_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUE_BYTES", 500)
    gate = Gate()
    disk = cache(tmp_path, gate)
    assert disk.settle()
    gate.shut()
    assert disk.room(200) == 2 and disk.room(50) == 10
    assert [disk.put(block(i), payload(i)) for i in range(4)] == [True, True, False, False]
    assert disk.room(200) == 0 and disk.room(50) == 1, "the first one is being written"
    gate.passes.set()
    assert disk.settle() and disk.room(200) == 2 and disk.put(block(3), payload(3))
    disk.close()


def test_what_waits_is_lost_and_counted_when_the_cache_goes_off(tmp_path: Path) -> None:
    gate = Gate()
    disk = cache(tmp_path / "c", gate)
    assert disk.settle()
    gate.shut()
    put(disk, 0, 1, 2)
    assert gate.waiting.wait(60)
    shutil.rmtree(tmp_path / "c")
    disk._check_folder()
    stats = disk.stats()
    assert stats.off and (stats.queued, stats.dropped) == (0, 3)
    gate.passes.set()
    disk.close()


@pytest.mark.parametrize("durability", ["persistent", "best_effort"])
def test_what_was_written_before_the_close_survives_a_loss_of_power_where_that_is_asked_for(
    tmp_path: Path, durability: str
) -> None:
    ops = ForgetfulFiles()
    disk = cache(tmp_path, ops, durability=durability, flush_interval_s=3600.0)
    put(disk, *range(4))
    disk.close()
    ops.lose_power()
    again = cache(tmp_path)
    assert again.settle() and again.stats().records == (4 if durability == "persistent" else 0)
    again.close()


def test_the_time_to_live_is_in_days(tmp_path: Path) -> None:
    clock = Clock()
    config = module.DiskCacheConfig(dir=str(tmp_path), ttl_days=2, flush_interval_s=0.001)
    disk = DiskCache(config, BASE, now=clock)
    put(disk, 0)
    assert disk.settle()
    clock.now += 2 * 86_400 - 1
    assert read(disk, [block(0)]) == [payload(0)]
    clock.now += 1
    assert read(disk, [block(0)]) == []
    disk.close()


def test_reads_come_before_writes(tmp_path: Path) -> None:
    gate = Gate()
    disk = cache(tmp_path, gate, segment_bytes=1 << 20)
    put(disk, 0, 1)
    assert disk.settle()
    gate.shut()
    put(disk, *range(2, 8))
    assert gate.waiting.wait(60)
    gate.order.clear()
    disk.read([block(0), block(1)])
    gate.passes.set()
    assert disk.settle()
    assert gate.order == ["write", "read", "read", *["write"] * 5], "only the one that was under way came first"
    disk.close()


def test_without_asynchronous_writes_a_block_is_written_when_put_returns(tmp_path: Path) -> None:
    disk = cache(tmp_path, async_writes=False)
    for i in range(5):
        assert disk.put(block(i), payload(i)) and disk.stats().written == i + 1
    disk.close()


@pytest.mark.promise("FLT-08")
def test_a_drive_that_hangs_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRIVE_SECONDS", 0.0)
    gate = Gate()
    for asynchronous in (True, False):
        disk = cache(tmp_path, gate, async_writes=asynchronous)
        assert disk.settle(60)
        disk.put(block(0), payload(0))
        assert disk.settle(60)
        gate.shut()
        ticket = disk.read([block(0)])
        assert gate.waiting.wait(60)
        until(lambda disk=disk, ticket=ticket: [(r.ticket, r.payloads) for r in disk.poll()] == [(ticket, [])])
        disk.put(block(9), payload(9))
        gate.passes.set()
        assert disk.settle(60) and disk.poll() == [], "what came too late is nobody's"
        disk.close(60)


def test_a_ticket_that_is_forgotten(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    put(disk, 0)
    assert disk.settle()
    done = disk.read([block(0)])
    assert disk.settle()
    disk.forget(done)
    disk.forget(done)
    assert disk.poll() == []
    disk.close()


def test_finished_is_called_when_there_is_something(tmp_path: Path) -> None:
    called = threading.Event()
    disk = DiskCache(module.DiskCacheConfig(dir=str(tmp_path)), b"b" * 32, called.set)
    disk.read([block(0)])
    assert called.wait(60) and len(disk.poll()) == 1
    called.clear()
    disk.close()
    assert called.is_set(), "when the disk goes off, too"


@pytest.mark.promise("FLT-22")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_drive_that_takes_nothing(tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture) -> None:
    drive = Sick(code)
    disk = cache(tmp_path, drive, segment_bytes=700, flush_interval_s=0.001)
    put(disk, *range(6))
    assert disk.settle()
    before = disk.stats()
    drive.sick = "write"
    for i in range(6, 12):
        disk.put(block(i), payload(i))
    until(lambda: disk.stats().errors >= 4)
    stats = disk.stats()
    assert stats.read_only and stats.dropped >= 4 and not stats.off
    full = code in (errno.ENOSPC, errno.EDQUOT)
    assert (stats.bytes < before.bytes) == full, "its own space is freed where that helps"
    if not full:
        assert read(disk, [block(0)]) == [payload(0)]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    drive.sick = ""
    until(lambda: not disk.stats().queued)
    put(disk, 20)
    until(lambda: disk.longest([block(20).key]) and not disk.stats().queued)
    assert not disk.stats().read_only
    disk.close()


def test_persistent_writes_are_tried_again(tmp_path: Path) -> None:
    for durability, written in (("persistent", True), ("best_effort", False)):
        drive = Sick(errno.EIO)
        often = {"flush_interval_s": 0.001, "persistent_max_retries": 1000}  # this thread may be slow
        disk = cache(tmp_path / durability, drive, durability=durability, **often)
        assert disk.settle()
        drive.sick = "write"
        put(disk, 0)
        until(lambda disk=disk: disk.stats().errors)
        drive.sick = ""
        until(lambda disk=disk: not disk.stats().queued)
        assert bool(disk.stats().written) == written
        disk.close()


def test_persistent_writes_are_given_up_after_so_many_trials(tmp_path: Path) -> None:
    drive = Sick(errno.EIO)
    disk = cache(tmp_path, drive, durability="persistent", persistent_max_retries=2, flush_interval_s=0.001)
    assert disk.settle()
    drive.sick = "write"
    put(disk, 0)
    until(lambda: disk.stats().dropped)
    assert disk.stats().errors == 3
    disk.close()


def test_every_block_has_as_many_trials_as_the_first(tmp_path: Path) -> None:
    drive = Sick(errno.EIO)
    disk = cache(tmp_path, drive, durability="persistent", persistent_max_retries=2, flush_interval_s=0.001)
    assert disk.settle()
    drive.sick = "write"
    put(disk, 0, 1, 2)
    until(lambda: disk.stats().dropped == 3)
    assert disk.stats().errors == 9
    disk.close()


@pytest.mark.promise("FLT-22")
def test_a_drive_that_fails_again_and_again_is_tried_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has worked for a while."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter))
    drive = Sick(errno.EIO)
    disk = cache(tmp_path, drive, async_writes=False, flush_interval_s=4.0)
    assert disk.settle()
    numbers = itertools.count()

    def works() -> bool:
        number, errors = next(numbers), disk.stats().errors
        took = disk.put(block(number), payload(number))
        assert disk.stats().errors == errors + (drive.sick != "")
        return took

    def pauses(seconds: float) -> None:
        drive.sick = "write"
        assert disk.room(200) > 0 and not works() and disk.stats().read_only
        now[0] += seconds - 0.5
        errors = disk.stats().errors
        assert disk.room(200) == 0 and not disk.put(block(999), payload(999))
        assert disk.stats().errors == errors, "it was tried"
        now[0] += 0.5
        drive.sick = ""

    for seconds in (4, 8, 16, 32, MAX_PAUSE, MAX_PAUSE):
        pauses(seconds)
    assert works() and not disk.stats().read_only
    pauses(MAX_PAUSE)
    now[0] += MAX_PAUSE
    assert works()
    pauses(MAX_PAUSE)
    now[0] += MAX_PAUSE + 0.5
    assert works()
    pauses(4)
    assert works(), "after four seconds, and no later"
    disk.close()


def test_a_failed_sync_is_no_end(tmp_path: Path) -> None:
    drive = Sick(errno.EIO)
    disk = cache(tmp_path, drive, durability="persistent", flush_interval_s=0.001)
    assert disk.settle()
    drive.sick = "sync"
    put(disk, 0)
    until(lambda: disk.stats().errors)
    drive.sick = ""
    assert read(disk, [block(0)]) == [payload(0)]
    put(disk, 1)
    until(lambda: disk.stats().written == 2)
    disk.close()


def test_a_drive_that_cannot_be_read(tmp_path: Path) -> None:
    drive = Sick(errno.EIO)
    disk = cache(tmp_path, drive, segment_bytes=1 << 20)
    put(disk, 0, 1)
    assert disk.settle()
    drive.sick = "read"
    assert read(disk, [block(0)]) == [] and disk.stats().quarantined == 1
    drive.sick = ""
    assert read(disk, [block(1)]) == [payload(1)] and not disk.stats().read_only
    disk.close()


@pytest.mark.promise("FLT-27")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_gone_turns_the_tier_off(
    tmp_path: Path, replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = cache(tmp_path / "c")
    put(disk, 0)
    assert disk.settle()
    shutil.rmtree(tmp_path / "c")
    if replaced:  # by another server
        other = cache(tmp_path / "c")
        put(other, 5)
        assert other.settle()
    until(lambda: disk.stats().off)
    assert not disk.put(block(1), payload(1)) and disk.longest([block(0).key]) == 0 and read(disk, [block(0)]) == []
    assert disk.stats().dropped == 1 and len(caplog.records) == 1
    disk.close()
    if replaced:
        assert read(other, [block(5)]) == [payload(5)] and not other.stats().off
        other.close()
    else:
        assert not (tmp_path / "c").exists()


@pytest.mark.promise("FLT-08")
def test_a_thread_that_dies_turns_the_tier_off(tmp_path: Path) -> None:
    drive = Sick()
    disk = cache(tmp_path, drive)
    put(disk, 0)
    assert disk.settle()
    drive.sick = "read"
    ticket = disk.read([block(0)])
    until(lambda: disk.stats().off)
    assert "a mistake in the code" in disk.stats().off
    assert [(r.ticket, r.payloads) for r in disk.poll()] == [(ticket, [])]
    assert not disk.put(block(1), payload(1))
    disk.close()
    cache(tmp_path).close()


def test_the_folder_is_free_after_close_and_taken_before(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    with pytest.raises(StorageError, match="in use by process"):
        cache(tmp_path)
    disk.close()
    cache(tmp_path).close()


def test_close_writes_what_waits(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    put(disk, *range(8))
    disk.close()
    disk = cache(tmp_path)
    assert disk.settle() and disk.stats().records == 8
    disk.close()


def test_a_limit_given_in_gigabytes(tmp_path: Path) -> None:
    """A gigabyte is a thousand megabytes, and one segment more than the limit is there at most."""
    disk = cache(tmp_path, max_size_gb=8e-5)
    most = 0
    for i in range(300):
        assert disk.put(block(i), payload(i)) and disk.settle()
        most = max(most, disk.stats().bytes)
    assert 72_000 < most <= 80_400
    assert disk.stats().evicted > 30
    disk.close()


def test_a_base_is_a_digest(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        DiskCache(module.DiskCacheConfig(dir=str(tmp_path)), b"short")


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 15)),
        st.tuples(st.just("read"), st.integers(0, 15)),
        st.tuples(st.just("fail"), st.integers(1, 12)),
        st.tuples(st.just("forget"), st.just(0)),
        st.tuples(st.just("settle"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.promise("PRP-3")
@settings(max_examples=30)
@given(ACTIONS, st.sampled_from([errno.ENOSPC, errno.EIO]), st.booleans(), st.sampled_from([1, module.LARGE]))
def test_every_ticket_is_answered_once_and_rightly(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], code: int, asynchronous: bool, large: int
) -> None:
    """With real threads, and operations that fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", large)
        _act(tmp_path_factory.mktemp("cache"), actions, code, asynchronous)


def _act(path: Path, actions: list[tuple[str, int]], code: int, asynchronous: bool) -> None:
    ops = FaultFiles(0, code)
    settled: dict[str, Any] = {"async_writes": asynchronous, "flush_interval_s": 0.001}
    disk = cache(path, ops, segment_bytes=900, **settled)
    asked: dict[int, int] = {}

    def answers() -> None:
        for done in disk.poll():
            first = asked.pop(done.ticket)
            assert [bytes(p) for p in done.payloads] == [payload(first + j) for j in range(len(done.payloads))]

    for action, i in actions:
        if action == "put":
            disk.put(block(i), payload(i))
        elif action == "read":
            asked[disk.read([block(j) for j in range(i, i + 4)])] = i
        elif action == "fail":
            ops.fail_at = ops.calls + i
        elif action == "forget" and asked:
            ticket, _ = asked.popitem()
            disk.forget(ticket)
        elif action == "restart":
            disk.close()
            answers()
            assert not asked
            ops.fail_at = 0
            disk = cache(path, ops, segment_bytes=900, **settled)
        else:
            disk.settle()
            answers()
    assert disk.settle()
    answers()
    assert not asked and not disk.stats().off
    disk.close()
