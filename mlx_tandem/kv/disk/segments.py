"""The segments of a cache's folder and the index of one base's blocks in them. One thread at a time; calls wait for
the drive.

A segment takes records until it is full or an eighth of the time to live has passed, and goes whole: the oldest first
when space is needed, each when that time has passed since it was begun. So no block is used that is older, and each
lives at least seven eighths of it. Whether a key is in the index may be asked from other threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from mlx_tandem.files import DISK, FileOps, read_all, write_all
from mlx_tandem.kv.disk import records
from mlx_tandem.kv.disk.folder import CacheFolder
from mlx_tandem.kv.disk.records import SEGMENT_HEAD, BlockId, Payload, SegmentHead

_SLICE = 1000  # records that one step of the scan looks at
_SMALL = 1 << 16  # up to here a record is written in one piece


class Counts(Struct):
    """Since the start; see DiskStats."""

    written: int = 0
    written_bytes: int = 0
    evicted: int = 0
    quarantined: int = 0
    errors: int = 0


@dataclass
class Segment:
    head: SegmentHead
    path: Path
    size: int
    keys: list[bytes] = field(default_factory=list)  # of the records in it; empty for another base's


class Segments:
    """At most `limit` bytes (0: any number) and one segment more, each segment at most `segment_bytes`.

    Every call raises OSError when the drive fails, and leaves a state that goes on working: what was promised before
    is kept or forgotten, never wrong.
    """

    def __init__(
        self,
        folder: CacheFolder,
        base: bytes,
        *,
        limit: int,
        segment_bytes: int,
        ttl: float,  # seconds; 0: for ever
        durable: bool,  # whether `sync` does anything
        now: Callable[[], float],
        ops: FileOps = DISK,
    ) -> None:
        self.folder = folder
        self.bytes = 0
        self.counts = Counts()
        self.ready = False  # whether records may be appended: the scan has come far enough
        self._base, self._limit, self._segment_bytes, self._ttl = base, limit, segment_bytes, ttl
        self._durable, self._now, self._ops = durable, now, ops
        self._index: dict[bytes, int] = {}  # a place is one number: a million of them is what this is made for
        self._segments: dict[int, Segment] = {}  # oldest first
        self._next = 1
        self._active: tuple[Segment, int] | None = None  # that records are appended to, and its descriptor
        self._read: tuple[int, int] | None = None  # number and descriptor of the segment that was read last
        self._unsynced = False

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def count(self) -> int:
        return len(self._segments)

    # -- the scan -------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[None]:
        """Finds what is there, newest first, in many short steps. Other calls may come between any two.

        Heads of records only are read: tags are checked when a block is. What is not whole is cut off."""
        found: dict[int, Path] = {}
        with self._counted():
            found = self.folder.segments()
        self._next = max(found, default=0) + 1
        for number, path in sorted(found.items()):
            with self._counted():
                self._register(number, path)
            yield
        with self._counted():
            self.expire()
        for segment in [s for s in reversed(self._segments.values()) if s.head.base == self._base]:
            if segment.head.number in self._segments:
                with self._counted():
                    yield from self._scan_segment(segment)
                self.ready = True
                yield
        self.ready = True

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A segment that the drive does not give is left out."""
        try:
            yield
        except OSError:
            self.counts.errors += 1

    def _register(self, number: int, path: Path) -> None:
        data = bytearray(SEGMENT_HEAD)
        fd = self._ops.open(path, os.O_RDONLY)
        try:
            whole = read_all(fd, data, 0, self._ops) == SEGMENT_HEAD
            size = os.fstat(fd).st_size
        finally:
            self._ops.close(fd)
        head = records.decode_segment(data, number, self.folder.secret) if whole else None
        if head is None:  # begun by a process that was killed, damaged, or written with a secret that is lost
            self._ops.unlink(path)
            self.counts.quarantined += whole
            return
        self._segments[number] = Segment(head, path, size)
        self.bytes += size

    def _scan_segment(self, segment: Segment) -> Iterator[None]:
        places: dict[bytes, int] = {}
        whole, number = SEGMENT_HEAD, segment.head.number
        fd = self._ops.open(segment.path, os.O_RDWR)
        try:
            for i, (key, offset, size) in enumerate(records.walk(fd, segment.size, self._ops), 1):
                places[key] = _place(number, offset, size)
                whole = offset + size
                if i % _SLICE == 0:
                    yield
                    if number not in self._segments:  # it had to go meanwhile
                        return
            if whole < segment.size:
                self.counts.quarantined += self.ready  # the end of the newest one is what a kill leaves
                self._ops.truncate(fd, whole)
                self.bytes -= segment.size - whole
                segment.size = whole
            segment.keys = list(places)
            for key, place in places.items():
                self._index.setdefault(key, place)
            if not self.ready:
                self._active, fd = (segment, fd), -1
        finally:
            if fd >= 0:
                self._ops.close(fd)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def append(self, block: BlockId, payload: Payload) -> bool:
        """Whether it is there now; False when it is too large for a segment."""
        head = records.encode(block, payload, self.folder.secret)
        size = len(head) + len(payload)
        if SEGMENT_HEAD + size > self._segment_bytes:
            return False
        while self._limit and self.bytes + size > self._limit and self.free():
            pass
        segment, fd = self._writable(size)
        try:
            os.lseek(fd, segment.size, os.SEEK_SET)
            if size <= _SMALL:
                write_all(fd, head + bytes(payload), self._ops)
            else:
                write_all(fd, head, self._ops)
                write_all(fd, memoryview(payload), self._ops)
        except OSError:
            with contextlib.suppress(OSError):  # what stays there is overwritten, or cut off by the next scan
                self._ops.truncate(fd, segment.size)
            raise
        self._index[block.key] = _place(segment.head.number, segment.size, size)
        segment.keys.append(block.key)
        segment.size += size
        self.bytes += size
        self._unsynced = True
        self.counts.written += 1
        self.counts.written_bytes += size
        return True

    def read(self, block: BlockId) -> memoryview | None:
        """The payload that was appended with an equal id, every byte checked; None: not there, or not any more."""
        record = self.fetch(block)
        payload = None if record is None else self.checked(block, record)
        if record is not None and payload is None:
            self.quarantine(block)
        return payload

    def fetch(self, block: BlockId) -> memoryview | None:
        """The record of a block as it lies there, for `checked`; None: not there, or not any more."""
        place = self._index.get(block.key)
        if place is None:
            return None
        number, offset, size = place >> 64, place >> 32 & 0xFFFFFFFF, place & 0xFFFFFFFF
        segment = self._segments[number]
        fd = self._opened(segment)
        if fd is None or (self._ttl and self._age(segment) >= self._ttl):
            return None
        record = memoryview(bytearray(size))
        try:
            whole = read_all(fd, record, offset, self._ops) == size
        except OSError as e:
            if e.errno == errno.EIO:
                self.quarantine(block)
            raise
        if not whole:
            self.quarantine(block)
            return None
        return record

    def checked(self, block: BlockId, record: memoryview) -> memoryview | None:
        """The payload of a record, if all of it is as it was appended with an equal id. On any thread."""
        found = records.decode(record, self.folder.secret)
        if found is None or found[0] != block:  # a tag may be right and the block another's
            return None
        return found[1].toreadonly()

    def quarantine(self, block: BlockId) -> None:
        """Its record is not to be used."""
        if self._index.pop(block.key, None) is not None:
            self.counts.quarantined += 1

    def sync(self) -> None:
        """What was appended, to the drive's medium, where that was asked for."""
        if self._active is not None and self._unsynced and self._durable:
            self._unsynced = False  # a second sync would succeed without having written what the first could not
            try:
                self._ops.sync(self._active[1])
            except OSError:
                self._seal()
                raise

    # -- what goes ------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Segments whose time has passed go."""
        if self._ttl:
            for segment in list(self._segments.values()):
                if self._age(segment) >= self._ttl:
                    self._remove(segment)

    def free(self) -> bool:
        """The oldest segment but the one that is written goes, whosesoever it is. False: there is no other."""
        for segment in self._segments.values():
            if self._active is None or segment is not self._active[0]:
                self._remove(segment)
                return True
        return False

    def close(self) -> None:
        """Twice is once."""
        self._seal()
        self._close_read()

    def _remove(self, segment: Segment) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(segment.path)
        self.counts.evicted += len(self._forget(segment))

    def _forget(self, segment: Segment) -> set[bytes]:
        """The keys that are not found any more."""
        number = segment.head.number
        if self._active is not None and segment is self._active[0]:
            self._seal()
        if self._read is not None and self._read[0] == number:
            self._close_read()
        del self._segments[number]
        self.bytes -= segment.size
        gone = {key for key in segment.keys if self._index.get(key, 0) >> 64 == number}
        for key in gone:
            del self._index[key]
        return gone

    # -- files ----------------------------------------------------------------------------------------------------

    def _writable(self, size: int) -> tuple[Segment, int]:
        """The segment for a record of `size` bytes."""
        if self._active is not None:
            segment, _ = self._active
            if segment.size + size <= self._segment_bytes and not (self._ttl and self._age(segment) >= self._ttl / 8):
                return self._active
            self.sync()
            self._seal()
        number, self._next = self._next, self._next + 1
        head = SegmentHead(number, int(self._now()), self._base)
        path = self.folder.segment(number)
        fd = self._ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            write_all(fd, records.encode_segment(head, self.folder.secret), self._ops)
        except BaseException:
            with contextlib.suppress(OSError):
                self._ops.close(fd)
            with contextlib.suppress(OSError):  # else the next scan removes it
                self._ops.unlink(path)
            raise
        segment = self._segments[number] = Segment(head, path, SEGMENT_HEAD)
        self.bytes += SEGMENT_HEAD
        self._active = segment, fd
        return self._active

    def _seal(self) -> None:
        """Nothing more is appended to it."""
        if self._active is not None:
            (_, fd), self._active = self._active, None
            self._unsynced = False
            self._ops.close(fd)

    def _opened(self, segment: Segment) -> int | None:
        """A descriptor for reading; None when the file is gone, and with it all that was in it."""
        if self._read is not None and self._read[0] == segment.head.number:
            return self._read[1]
        self._close_read()
        try:
            self._read = segment.head.number, self._ops.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:
            self._forget(segment)
            return None
        return self._read[1]

    def _close_read(self) -> None:
        if self._read is not None:
            (_, fd), self._read = self._read, None
            self._ops.close(fd)

    def _age(self, segment: Segment) -> float:
        """In seconds; 0 when it was begun in the future of a clock that was set back."""
        return max(0.0, self._now() - segment.head.created)


def _place(number: int, offset: int, size: int) -> int:
    return number << 64 | offset << 32 | size
