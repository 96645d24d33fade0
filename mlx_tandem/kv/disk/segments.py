"""The segments of a cache's folder and the index of one base's blocks in them.

One thread uses them at a time, and calls wait for the drive. A segment takes records until it is full or an eighth
of the time to live has passed, and is removed as a whole: the oldest first when space is needed, and each when the
time to live has passed since it was begun. So no older block is used, and each block lives at least seven eighths of
that time. Other threads may ask whether a key is in the index.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from mlx_tandem.files import DISK, FileOps, read_all, sync_folder, write_all
from mlx_tandem.kv.disk import records
from mlx_tandem.kv.disk.folder import CacheFolder
from mlx_tandem.kv.disk.records import SEGMENT_HEAD, BlockId, Payload, SegmentHead

_SLICE = 1000
"""Records that one step of the scan looks at."""

_SMALL = 1 << 16
"""Largest record that is written in one piece."""


class Counts(Struct):
    """Counts since start; their meaning is that of DiskStats."""

    written: int = 0
    written_bytes: int = 0
    evicted: int = 0
    quarantined: int = 0
    errors: int = 0


@dataclass
class Segment:
    """A segment of the folder."""

    head: SegmentHead
    path: Path
    size: int
    keys: list[bytes] = field(default_factory=list)  # keys of its records; empty if it has another base


class Segments:
    """Segments with at most `limit` bytes (0: any number) and one segment more, each of at most `segment_bytes`.

    Every call raises OSError if the drive fails and leaves a usable state: what was stored before is kept or
    forgotten, never wrong.
    """

    def __init__(
        self,
        folder: CacheFolder,
        base: bytes,
        *,
        limit: int,
        segment_bytes: int,
        ttl: float,  # seconds; 0: blocks never expire
        durable: bool,  # whether `sync` brings writes to the drive, and new segments bring their names there
        now: Callable[[], float],
        ops: FileOps = DISK,
    ) -> None:
        self.folder = folder
        self.bytes = 0
        self.counts = Counts()
        self.ready = False  # whether the scan has come so far that records may be appended
        self._base, self._limit, self._segment_bytes, self._ttl = base, limit, segment_bytes, ttl
        self._durable, self._now, self._ops = durable, now, ops
        self._index: dict[bytes, int] = {}  # a place is one number, since there may be a million of them
        self._segments: dict[int, Segment] = {}  # oldest first
        self._next = 1
        self._active: tuple[Segment, int] | None = None  # the segment that is appended to, and its descriptor
        self._read: tuple[int, int] | None = None  # number and descriptor of the segment that was read last
        self._unsynced = False

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def count(self) -> int:
        """The number of segments."""
        return len(self._segments)

    # -- The scan -------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[None]:
        """Index what is in the folder, newest segment first, in many short steps; other calls may come between any
        two.

        Only heads of records are read; tags are checked when a block is read. Incomplete ends are cut off.
        """
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
        """Count an OSError inside the block and go on without the segment that it is about."""
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
        if head is None:  # the process was killed as it began, or the head is damaged or tagged with a lost key
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
                    if number not in self._segments:  # it was removed meanwhile
                        return
            if whole < segment.size:
                self.counts.quarantined += self.ready  # an incomplete end of the newest segment is normal after a kill
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

    # -- Blocks ---------------------------------------------------------------------------------------------------

    def append(self, block: BlockId, payload: Payload) -> bool:
        """Append a block; return False if it is too large for a segment."""
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
            with contextlib.suppress(OSError):  # a rest is overwritten, or cut off by the next scan
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
        """Return the payload that was appended with an equal id, with every byte checked; None if it is not there."""
        record = self.fetch(block)
        payload = None if record is None else self.checked(block, record)
        if record is not None and payload is None:
            self.quarantine(block)
        return payload

    def fetch(self, block: BlockId) -> memoryview | None:
        """Return the unchecked record of a block, for `checked`; None if it is not there."""
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
        """Return the payload of a record if all of it is as it was appended with an equal id. Any thread may call
        this.
        """
        found = records.decode(record, self.folder.secret)
        if found is None or found[0] != block:  # the tag may be right but belong to another block
            return None
        return found[1].toreadonly()

    def quarantine(self, block: BlockId) -> None:
        """Forget a block whose record must not be used."""
        if self._index.pop(block.key, None) is not None:
            self.counts.quarantined += 1

    def sync(self) -> None:
        """Bring what was appended to the drive's medium, if that is configured."""
        if self._active is not None and self._unsynced and self._durable:
            self._unsynced = False  # a second sync would succeed although the first did not write everything
            try:
                self._ops.sync(self._active[1])
            except OSError:
                self._seal()
                raise

    # -- Removal --------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Remove segments whose time to live has passed."""
        if self._ttl:
            for segment in list(self._segments.values()):
                if self._age(segment) >= self._ttl:
                    self._remove(segment)

    def free(self) -> bool:
        """Remove the oldest segment but the active one, of whatever base; return False if there is no other."""
        for segment in self._segments.values():
            if self._active is None or segment is not self._active[0]:
                self._remove(segment)
                return True
        return False

    def close(self) -> None:
        """Close all files. A second call does nothing."""
        self._seal()
        self._close_read()

    def _remove(self, segment: Segment) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(segment.path)
        self.counts.evicted += len(self._forget(segment))

    def _forget(self, segment: Segment) -> set[bytes]:
        """Drop a segment from the index; return the keys that are no longer found."""
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

    # -- Files ----------------------------------------------------------------------------------------------------

    def _writable(self, size: int) -> tuple[Segment, int]:
        """Return the segment for a record of `size` bytes, and its descriptor."""
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
            if self._durable:
                sync_folder(self.folder.path, self._ops)  # `sync` brings the contents to the drive, not the name
        except BaseException:
            with contextlib.suppress(OSError):
                self._ops.close(fd)
            with contextlib.suppress(OSError):  # if this fails, the next scan removes it
                self._ops.unlink(path)
            raise
        segment = self._segments[number] = Segment(head, path, SEGMENT_HEAD)
        self.bytes += SEGMENT_HEAD
        self._active = segment, fd
        return self._active

    def _seal(self) -> None:
        """Close the active segment; nothing more is appended to it."""
        if self._active is not None:
            (_, fd), self._active = self._active, None
            self._unsynced = False
            self._ops.close(fd)

    def _opened(self, segment: Segment) -> int | None:
        """Return a descriptor for reading a segment; None if its file is gone, and then forget its blocks."""
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
        """Return the segment's age in seconds; 0 if the clock was set back to before it was begun."""
        return max(0.0, self._now() - segment.head.created)


def _place(number: int, offset: int, size: int) -> int:
    return number << 64 | offset << 32 | size
