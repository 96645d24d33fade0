"""What a folder of segments gives back is exactly what was put in, or nothing: whatever happens to files and drive."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_tandem.files import StorageError, remove_tree
from mlx_tandem.kv.disk import records
from mlx_tandem.kv.disk.folder import CacheFolder
from mlx_tandem.kv.disk.records import RECORD_HEAD, SEGMENT_HEAD, BlockId
from mlx_tandem.kv.disk.segments import Segments
from tests.faulty import FaultFiles, ForgetfulFiles
from tests.unit.disk_tools import OTHER_BASE, Clock, block, close, filled, others, payload, segments

COUNT = 3


def found_in(folder: Path | CacheFolder, count: int = COUNT, size: int = 200) -> list[int]:
    """Which blocks are given back by a cache that is opened anew. Each is as it was."""
    cache = segments(folder)
    try:
        right = []
        for i in range(count):
            if (data := cache.read(block(i))) is not None:
                assert data == payload(i, size)
                right.append(i)
        return right
    finally:
        cache.close()
        if isinstance(folder, Path):
            cache.folder.close()


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path / "a" / "cache", COUNT)
    assert found_in(tmp_path / "a" / "cache") == [0, 1, 2]


@pytest.mark.promise("B9")
def test_modes_of_folder_and_files(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o755)
    filled(tmp_path / "c", 1)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "c").iterdir()}
    assert set(modes) == {".lock", "key", "manifest.json", "segment-00000001.kv"} and set(modes.values()) == {0o600}


def rewrite(file: Path, data: bytes) -> None:
    if not file.exists() or file.read_bytes() != data:
        file.write_bytes(data)


@pytest.mark.promise("FLT-24")
def test_every_flipped_bit_of_a_record(tmp_path: Path) -> None:
    file = filled(tmp_path, COUNT, 8)
    whole = file.read_bytes()
    size = [RECORD_HEAD + 4 * len(block(i).tokens) + len(payload(i, 8)) for i in range(COUNT)]
    start = SEGMENT_HEAD + size[0]
    with contextlib.closing(CacheFolder(tmp_path)) as folder:
        for bit in range(8 * start, 8 * (start + size[1])):
            rewrite(file, flipped(whole, bit))
            behind_the_head = bit >= 8 * (start + RECORD_HEAD)
            assert found_in(folder, COUNT, 8) == ([0, 2] if behind_the_head else [0]), bit


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_every_flipped_bit_of_a_segments_head(tmp_path: Path) -> None:
    file = filled(tmp_path, 1)
    whole = file.read_bytes()
    with contextlib.closing(CacheFolder(tmp_path)) as folder:
        for bit in range(8 * SEGMENT_HEAD):
            file.write_bytes(flipped(whole, bit))
            cache = segments(folder)
            assert cache.read(block(0)) is None and cache.counts.quarantined == 1 and cache.bytes == 0, bit
            cache.close()


@pytest.mark.promise("FLT-24")
def test_two_damaged_bytes_whose_checksum_was_made_good(tmp_path: Path) -> None:
    """The CRC finds damage; only the tag makes a record usable."""
    file = filled(tmp_path, 1)
    whole = file.read_bytes()
    with contextlib.closing(CacheFolder(tmp_path)) as folder:
        for at in range(8, RECORD_HEAD):
            data = bytearray(whole)
            data[SEGMENT_HEAD + at] ^= 0x41
            data[SEGMENT_HEAD + RECORD_HEAD + 50] ^= at
            head = data[SEGMENT_HEAD : SEGMENT_HEAD + RECORD_HEAD]
            data[SEGMENT_HEAD + 4 : SEGMENT_HEAD + 8] = zlib.crc32(head[8:]).to_bytes(4, "little")
            rewrite(file, bytes(data))
            assert found_in(folder, 1) == [], at


@pytest.mark.promise("B10")
@pytest.mark.parametrize("segment_bytes", [500, 4000])
@pytest.mark.parametrize("other", list(others(block(3))))
def test_a_right_tag_over_foreign_contents_is_a_miss(tmp_path: Path, other: BlockId, segment_bytes: int) -> None:
    """Written under the very key by somebody who has the secret."""
    cache = segments(tmp_path, segment_bytes=segment_bytes)
    assert cache.append(other, payload(3))
    assert cache.read(block(3)) is None and cache.counts.quarantined == 1
    assert block(3).key not in cache, "it would be read again"
    assert cache.append(block(3), payload(3)) and cache.read(block(3)) == payload(3)
    close(cache)
    again = segments(tmp_path)
    assert again.read(block(3)) == payload(3), "the newer one is found"
    close(again)


def test_a_key_that_was_changed_alone(tmp_path: Path) -> None:
    filled(tmp_path, 4)
    cache = segments(tmp_path)
    assert cache.read(BlockId(block(3).namespace, b"k" * 32, block(3).parent, block(3).tokens)) is None
    assert cache.counts.quarantined == 0 and cache.read(block(3)) == payload(3)
    close(cache)


def test_segments_of_another_base_are_not_looked_into(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    cache = segments(tmp_path, base=OTHER_BASE)
    assert len(cache) == 0 and cache.count == 1 and cache.bytes > 0
    close(cache)
    assert found_in(tmp_path) == [0, 1]


@pytest.mark.promise("FLT-23")
def test_every_length_of_the_last_record(tmp_path: Path) -> None:
    file = filled(tmp_path, COUNT, 8)
    whole = file.read_bytes()
    last = RECORD_HEAD + 4 * len(block(2).tokens) + len(payload(2, 8))
    with contextlib.closing(CacheFolder(tmp_path)) as folder:
        for size in range(len(whole) - last, len(whole)):
            file.write_bytes(whole[:size])
            assert found_in(folder, COUNT, 8) == [0, 1], size
            assert file.stat().st_size == len(whole) - last, "the torn end is cut off"
        for size in range(SEGMENT_HEAD):
            file.write_bytes(whole[:size])
            assert found_in(folder) == [] and not file.exists()


def test_a_torn_end_is_written_over(tmp_path: Path) -> None:
    file = filled(tmp_path, 2)
    with file.open("r+b") as f:
        f.truncate(file.stat().st_size - 1)
    cache = segments(tmp_path, segment_bytes=1 << 20)
    assert cache.counts.quarantined == 0, "after a kill it is normal"
    assert cache.append(block(2), payload(2)) and cache.count == 1
    assert cache.bytes == file.stat().st_size
    close(cache)
    assert found_in(tmp_path) == [0, 2]


def test_a_torn_end_of_an_older_segment_is_damage(tmp_path: Path) -> None:
    file = filled(tmp_path, 2)
    cache = segments(tmp_path, segment_bytes=500)
    cache.append(block(2), payload(2))
    close(cache)
    os.truncate(file, file.stat().st_size - 1)
    again = segments(tmp_path)
    assert again.counts.quarantined == 1
    assert again.bytes == sum(p.stat().st_size for p in tmp_path.glob("segment-*"))
    close(again)
    assert found_in(tmp_path) == [0, 2]


def test_a_block_that_was_written_again_outlives_the_segment_of_the_first_time(tmp_path: Path) -> None:
    cache = segments(tmp_path, segment_bytes=900)
    for i in (0, 1, 2):
        cache.append(block(i), payload(i))
    assert cache.count == 2
    cache.quarantine(block(0))
    cache.append(block(0), payload(0))
    assert cache.free() and cache.count == 1
    assert cache.counts.evicted == 1, "the other one is found still"
    assert [i for i in range(3) if cache.read(block(i)) == payload(i)] == [0, 2]
    close(cache)


def test_nothing_is_appended_behind_what_could_not_be_synced(tmp_path: Path) -> None:
    """A second sync would succeed although the first did not write everything."""
    ops = FaultFiles()
    cache = segments(tmp_path, ops=ops)
    cache.append(block(0), payload(0))
    ops.fail_at = ops.calls + 1
    with pytest.raises(OSError):
        cache.sync()
    calls = ops.calls
    cache.sync()
    assert ops.calls == calls, "there is nothing to sync any more"
    cache.append(block(1), payload(1))
    assert cache.count == 2
    close(cache)


@pytest.mark.promise("FLT-21")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_every_operation_fails_once(tmp_path: Path, error: int) -> None:
    """Until a run in which none does. A cache that cannot be opened says so; all else costs blocks only."""
    path = tmp_path / "cache"
    for fail_at in range(1, 1000):
        ops = FaultFiles(fail_at, error)
        filled(path, 1, 8)
        opened = False
        with contextlib.suppress(StorageError):
            cache = segments(path, ops=ops, segment_bytes=320, durable=fail_at % 2 == 0)
            opened = True
            for i in range(1, 4):
                with contextlib.suppress(OSError):
                    cache.append(block(i), payload(i, 8))
                    cache.sync()
                with contextlib.suppress(OSError):
                    assert cache.read(block(i)) in (None, payload(i, 8)), i
            with contextlib.suppress(OSError):
                cache.free()
            close(cache)
        right = found_in(path, 4, 8)
        remove_tree(path)
        if not ops.failed:
            assert right == [1, 2, 3]
            return
        assert len({1, 2, 3} - {*right}) <= (1 if opened else 3)
    raise AssertionError("it never ends")


@pytest.mark.promise("FLT-29")
def test_the_budget_is_kept_by_removing_the_oldest_whole(tmp_path: Path) -> None:
    cache = segments(tmp_path, limit=10_000, segment_bytes=2000)
    for i in range(100):
        assert cache.append(block(i), payload(i))
        on_disk = sum(p.stat().st_size for p in tmp_path.glob("segment-*"))
        assert on_disk == cache.bytes <= 10_000 + 2000
    assert 3 * cache.bytes < cache.counts.written_bytes
    there = [i for i in range(100) if block(i).key in cache]
    assert there == list(range(there[0], 100)) and len(there) == len(cache) == 100 - cache.counts.evicted
    close(cache)


def test_another_bases_blocks_go_first_when_they_are_older(tmp_path: Path) -> None:
    filled(tmp_path, 10)
    cache = segments(tmp_path, base=OTHER_BASE, limit=4000, segment_bytes=1000)
    for i in range(10):
        assert cache.append(block(i), payload(i))
    close(cache)
    assert found_in(tmp_path, 10) == []


def test_a_block_that_is_larger_than_a_segment(tmp_path: Path) -> None:
    cache = segments(tmp_path, segment_bytes=500)
    assert not cache.append(block(0), payload(0, 500)) and len(cache) == 0 and cache.bytes == 0
    close(cache)


def test_time_to_live(tmp_path: Path) -> None:
    clock = Clock()
    cache = segments(tmp_path, ttl=800, now=clock)
    cache.append(block(0), payload(0))
    clock.now += 99
    cache.append(block(1), payload(1))
    clock.now += 1
    cache.append(block(2), payload(2))
    assert cache.count == 2, "a segment takes records for an eighth of the time"
    clock.now += 700
    assert cache.read(block(0)) is None and cache.read(block(2)) == payload(2)
    cache.expire()
    assert cache.count == 1 and block(1).key not in cache and cache.read(block(2)) == payload(2)
    close(cache)
    clock.now += 100
    later = segments(tmp_path, ttl=800, now=clock)
    assert later.count == 0 and list(tmp_path.glob("segment-*")) == []
    close(later)


@pytest.mark.promise("FLT-13")
def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    clock = Clock()
    cache = segments(tmp_path, ttl=800, now=clock)
    cache.append(block(0), payload(0))
    clock.now -= 86_400
    cache.expire()
    assert cache.append(block(1), payload(1)) and cache.read(block(0)) == payload(0)
    close(cache)


def test_a_segment_that_vanishes(tmp_path: Path) -> None:
    cache = segments(tmp_path, segment_bytes=500)
    for i in range(3):
        cache.append(block(i), payload(i))
    (tmp_path / "segment-00000002.kv").unlink()
    assert cache.read(block(1)) is None and block(1).key not in cache
    assert cache.read(block(0)) == payload(0) and cache.read(block(2)) == payload(2)
    close(cache)


def test_what_was_synced_survives_a_loss_of_power(tmp_path: Path) -> None:
    for durable in (True, False):
        ops = ForgetfulFiles()
        path = tmp_path / str(durable)
        cache = segments(path, ops=ops, segment_bytes=700, durable=durable)
        for i in range(5):
            cache.append(block(i), payload(i))
            assert cache.read(block(i)) == payload(i)
        cache.sync()
        cache.append(block(5), payload(5))
        close(cache)
        ops.lose_power()
        assert found_in(path, 6) == ([0, 1, 2, 3, 4] if durable else [])


@pytest.mark.parametrize("contents", ["notes.txt", "manifest.json", "segment-00000001.kv", "key/x"])
def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path: Path, contents: str) -> None:
    (tmp_path / contents).parent.mkdir(exist_ok=True)
    (tmp_path / contents).write_text("{}")
    tmp_path.chmod(0o755)
    if "key" in contents:
        (tmp_path / "other").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError) as e:
        CacheFolder(tmp_path)
    assert e.value.code == "foreign_folder" and str(tmp_path) in e.value.message
    assert sorted(tmp_path.rglob("*")) == before and stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"kind":"mlx-tandem KW cache","format":1}', None])
def test_a_damaged_manifest_costs_what_the_cache_held_and_no_more(tmp_path: Path, damage: bytes | None) -> None:
    filled(tmp_path, 3)
    manifest = tmp_path / "manifest.json"
    whole = manifest.read_bytes()
    if damage is None:
        manifest.unlink()
    else:
        manifest.write_bytes(damage)
    assert found_in(tmp_path, 3) == []
    assert manifest.read_bytes() == whole
    filled(tmp_path, 3)
    assert found_in(tmp_path, 3) == [0, 1, 2]
    manifest.write_bytes(b"{")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StorageError, match="no KV cache"):
        CacheFolder(tmp_path)


@pytest.mark.promise("B9")
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write there may put records of their own there, under the key that they can read."""
    CacheFolder(tmp_path).close()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StorageError, match="another user") as e:
        CacheFolder(tmp_path)
    assert e.value.code == "foreign_folder"


@pytest.mark.promise("FLT-34")
def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format":1', '"format":2'))
    with pytest.raises(StorageError, match="format 2"):
        CacheFolder(tmp_path)


@pytest.mark.promise("FLT-26")
def test_a_second_opener_is_refused_with_the_number_of_the_first(tmp_path: Path) -> None:
    first = CacheFolder(tmp_path)
    with pytest.raises(StorageError, match=f"process {os.getpid()}") as e:
        CacheFolder(tmp_path)
    assert e.value.code == "folder_in_use"
    first.close()
    CacheFolder(tmp_path).close()


def test_a_folder_whose_making_was_interrupted(tmp_path: Path) -> None:
    for fail_at in range(1, 100):
        ops = FaultFiles(fail_at, errno.EIO)
        path = tmp_path / str(fail_at)
        try:
            CacheFolder(path, ops).close()
        except StorageError:
            filled(path, 1)
            assert found_in(path, 1) == [0]
        if not ops.failed:
            return
    raise AssertionError("it never ends")


@pytest.mark.promise("B10")
@pytest.mark.parametrize("secret", [None, b"", b"x" * 32, b"x" * 33])
def test_a_lost_secret_empties_the_cache(tmp_path: Path, secret: bytes | None) -> None:
    file = filled(tmp_path, 1)
    (tmp_path / "key").unlink()
    if secret is not None:
        (tmp_path / "key").write_bytes(secret)
    assert found_in(tmp_path, 1) == [] and not file.exists()
    filled(tmp_path, 1)
    assert found_in(tmp_path, 1) == [0]


@pytest.mark.promise("FLT-28")
def test_the_newest_is_found_first_and_writing_need_not_wait_for_the_rest(tmp_path: Path) -> None:
    cache = segments(tmp_path, segment_bytes=500)
    for i in range(5):
        cache.append(block(i), payload(i))
    close(cache)
    again = Segments(CacheFolder(tmp_path), cache._base, limit=0, segment_bytes=500, ttl=0, durable=False, now=Clock())
    scan = again.scan()
    while not again.ready:
        next(scan)
    assert block(4).key in again and len(again) < 5
    again.append(block(0), payload(0))
    for _ in scan:
        pass
    assert len(again) == 5 and all(again.read(block(i)) == payload(i) for i in range(5))
    close(again)


def test_many_small_and_a_few_large_records(tmp_path: Path) -> None:
    sizes = [0, 10, 300_000, 20_000, 5, 16_384, 262_144, *[50] * 3000, 70_000]
    cache = segments(tmp_path, segment_bytes=1 << 22)
    for i, size in enumerate(sizes):
        assert cache.append(block(i), payload(i, size))
    close(cache)
    again = segments(tmp_path)
    assert all(again.read(block(i)) == payload(i, size) for i, size in enumerate(sizes))
    close(again)


def test_ids_have_whole_digests() -> None:
    for wrong in ({"namespace": b"n"}, {"key": b""}, {"parent": b"p"}):
        with pytest.raises(ValueError):
            BlockId(**{"namespace": b"n" * 32, "key": b"k" * 32, "parent": b"", "tokens": ()} | wrong)  # type: ignore[arg-type]


def test_a_record_is_decoded_from_its_own_bytes_only() -> None:
    record = records.encode(block(4), payload(4), b"s" * 32) + payload(4)
    assert records.decode(memoryview(record), b"s" * 32) == (block(4), payload(4))
    assert records.decode(memoryview(record + b"x"), b"s" * 32) is None
    assert records.decode(memoryview(record[:-1]), b"s" * 32) is None
    assert records.decode(memoryview(record), b"t" * 32) is None
    assert records.decode(memoryview(b""), b"s" * 32) is None


class Machine(RuleBasedStateMachine):
    """Everything that may happen to a folder, in any order."""

    LIMIT, SEGMENT, TTL = 6000, 1500, 1000

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "cache"
        self.ops, self.clock = FaultFiles(), Clock()
        self.open()

    def open(self) -> None:
        self.cache = segments(
            self.path, ops=self.ops, limit=self.LIMIT, segment_bytes=self.SEGMENT, ttl=self.TTL, now=self.clock
        )

    @contextlib.contextmanager
    def may_fail(self) -> Iterator[None]:
        """Only when an operation was told to."""
        before = self.ops.failed
        try:
            yield
        except OSError:
            assert self.ops.failed or before

    @rule(i=st.integers(0, 30))
    def append(self, i: int) -> None:
        with self.may_fail():
            if block(i).key not in self.cache:
                assert self.cache.append(block(i), payload(i))
                assert self.ops.failed or self.cache.read(block(i)) == payload(i)

    @rule(i=st.integers(0, 30))
    def read(self, i: int) -> None:
        with self.may_fail():
            assert self.cache.read(block(i)) in (None, payload(i))

    @rule(i=st.integers(0, 30), which=st.integers(0, 4))
    def read_with_another_id(self, i: int, which: int) -> None:
        with self.may_fail():
            assert self.cache.read(list(others(block(i)))[which]) is None

    @rule(n=st.integers(1, 8), error=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EACCES]), repeat=st.integers(1, 3))
    def fail(self, n: int, error: int, repeat: int) -> None:
        self.ops.fail_at, self.ops.error, self.ops.repeat = self.ops.calls + n, error, repeat

    @rule(seconds=st.sampled_from([1, 130, 400, -5000]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        with self.may_fail():
            self.cache.expire()

    @rule()
    def sync(self) -> None:
        with self.may_fail():
            self.cache.sync()

    @rule()
    def free(self) -> None:
        with self.may_fail():
            self.cache.free()

    @rule()
    def restart(self) -> None:
        close(self.cache)
        with contextlib.suppress(StorageError):
            self.open()
            return
        self.ops.fail_at = 0
        self.open()

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        files = sorted(self.path.glob("segment-*"))
        if files:
            file = data.draw(st.sampled_from(files))
            at = data.draw(st.integers(0, max(0, file.stat().st_size - 1)))
            with file.open("r+b") as f:
                if data.draw(st.booleans()):
                    f.truncate(at)
                else:
                    f.seek(at)
                    f.write(data.draw(st.binary(min_size=1, max_size=4)))

    @invariant()
    def budget(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.bytes <= self.LIMIT + self.SEGMENT

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            close(self.cache)
            self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)
