"""Works on a cache's folder without a server: lists what is in it, checks it, and empties it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.files import DISK, FileOps, read_all
from mlx_tandem.kv.disk import records
from mlx_tandem.kv.disk.folder import CacheFolder
from mlx_tandem.kv.disk.records import SEGMENT_HEAD


class SegmentInfo(Struct, frozen=True):
    """The contents of a segment."""

    number: int
    base: str  # first characters of the digest of its model and settings; empty: its head is damaged
    created: int  # seconds since 1970
    bytes: int
    records: int
    damaged: int  # records whose tag is wrong, plus 1 if its end is incomplete


def inspect(path: Path, verify: bool, ops: FileOps = DISK) -> list[SegmentInfo]:
    """Return the segments in the folder, oldest first; with `verify`, read every byte and check every tag.

    Nothing is changed. Raise StorageError if there is no cache or a server uses it.
    """
    with files.storage(path), contextlib.closing(CacheFolder(path, ops, create=False)) as folder:
        return [_inspect(folder, number, verify, ops) for number in sorted(folder.segments())]


def clear(path: Path, ops: FileOps = DISK) -> int:
    """Remove a cache of any format from the folder; return how many bytes its segments had.

    Raise StorageError as `inspect` does.
    """
    with (
        files.storage(path),
        contextlib.closing(CacheFolder(path, ops, create=False, any_format=True)) as folder,
    ):
        size = sum(p.stat().st_size for p in folder.segments().values())
        folder.clear(ops)
        return size


def _inspect(folder: CacheFolder, number: int, verify: bool, ops: FileOps) -> SegmentInfo:
    fd = ops.open(folder.segment(number), os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        data = bytearray(SEGMENT_HEAD)
        read_all(fd, data, 0, ops)
        head = records.decode_segment(data, number, folder.secret)
        if head is None:
            return SegmentInfo(number, "", 0, size, 0, 1)
        found = damaged = 0
        end = SEGMENT_HEAD
        for _, offset, length in records.walk(fd, size, ops):
            found += 1
            end = offset + length
            if verify:
                record = memoryview(bytearray(length))
                whole = read_all(fd, record, offset, ops) == length
                damaged += not whole or records.decode(record, folder.secret) is None
        return SegmentInfo(number, head.base.hex()[:12], head.created, size, found, damaged + (end < size))
    finally:
        ops.close(fd)
