"""What the journal is made of: the kinds of records, and how they lie in a file.

A record is MAGIC, the length of its body, how many bytes before it the write began that it was part of (4 bytes each,
little-endian), a BLAKE2b checksum of 16 bytes that is salted with the file's number and the record's offset, and its
body, a tagged msgpack value.
"""

from __future__ import annotations

import hashlib
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import msgspec
from msgspec import Struct

from mlx_tandem.engine.learning import AdamParams, Batch
from mlx_tandem.files import StorageError
from mlx_tandem.training.open_trajectories import Beginning, Exchange, OpenTrajectories
from mlx_tandem.training.trajectories import Trajectory

FORMAT = 1
MAGIC = b"\xa7Tj1"

_HEAD = struct.Struct("<4sII16s")


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """The first record of a file: what follows came after this checkpoint."""

    format: int
    checkpoint: str  # the label of its manifest; empty: it came after the very beginning
    step: int
    carried: int  # so many Added and Kept, then one Seen, came with it and are there or the file is damaged


class Added(Struct, frozen=True, array_like=True, tag="added"):
    """`Buffer.add(trajectory, size)` was called."""

    trajectory: Trajectory
    size: int = 0


class Seen(Struct, frozen=True, array_like=True, tag="seen"):
    """Ids of all trajectories that came before this file began, oldest first."""

    ids: tuple[str, ...]


class Dropped(Struct, frozen=True, array_like=True, tag="dropped"):
    """These are too old and are not learned from; those of them that were in the buffer have left it."""

    ids: tuple[str, ...]


class Began(Struct, frozen=True, array_like=True, tag="began"):
    """An update: `batches`, one pass each, then one step of the optimiser with `adam`, and all of it `steps` times.
    Everything that the result depends on is here. The trajectories it is made of have left the buffer.
    """

    step: int  # the optimiser's, once the first of its steps is done
    trajectories: tuple[str, ...]
    batches: tuple[Batch, ...]
    adam: AdamParams
    micro_batch_tokens: int
    publish: bool = True  # what is learned, should it stand
    rewards: dict[str, tuple[float, ...]] = {}  # of groups across prompts, by name: later baselines have them
    steps: int = 1


class Ended(Struct, frozen=True, array_like=True, tag="ended"):
    """What became of the update that began last. `digest` and `version` of what was published; empty and 0: nothing."""

    step: int  # the optimiser's, now
    outcome: str  # as in UpdateReport
    digest: str = ""
    version: int = 0


class Compared(Struct, frozen=True, array_like=True, tag="compared"):
    """How much better a prompt was answered than by the accepted version, and by how much it may be worse."""

    difference: float
    tolerated: float = 0.0


class Kept(Struct, frozen=True, array_like=True, tag="kept"):
    """An answer of a trajectory whose reward is still missing. `begun` is that of a new trajectory."""

    id: str
    at: float  # seconds since the epoch
    exchange: Exchange
    begun: Beginning | None = None


class Forgotten(Struct, frozen=True, array_like=True, tag="forgotten"):
    """These trajectories will have no reward."""

    ids: tuple[str, ...]


Record = Opened | Added | Seen | Dropped | Began | Ended | Compared | Kept | Forgotten

encode = msgspec.msgpack.Encoder().encode
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class Records(Sequence[Record]):
    """What one file held when it was read. Each record is decoded when it is asked for: all may be more than fits."""

    def __init__(self, path: Path, fd: int, places: list[tuple[int, int]]) -> None:
        self._path, self._fd, self._places = path, fd, places
        weakref.finalize(self, os.close, fd)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self._decode(*place) for place in self._places[index]]
        return self._decode(*self._places[index])

    def _decode(self, offset: int, size: int) -> Record:
        try:
            return _DECODER.decode(os.pread(self._fd, size, offset))
        except msgspec.MsgspecError as e:
            raise _damaged(self._path, offset, f"a record that this version cannot read ({e})") from e


def head(
    checkpoint: str,
    step: int,
    carried: Iterable[tuple[Trajectory, int]],
    seen: Sequence[str],
    waiting: OpenTrajectories | None = None,
) -> list[bytes]:
    """Return the first records of a file that begins after a checkpoint: what was carried over and what was seen."""
    added = [encode(Added(t, size)) for t, size in carried]
    for id, at, begun, exchanges in waiting.held if waiting is not None else ():
        added += [encode(Kept(id, at, each, None if i else begun)) for i, each in enumerate(exchanges)]
    opened = Opened(FORMAT, checkpoint, step, len(added))
    return [encode(opened), *added, encode(Seen(tuple(seen)))]


def frame(bodies: list[bytes], number: int, start: int) -> bytes:
    """Return the bytes of one write, to lie at `start`."""
    data = bytearray()
    for body in bodies:
        checksum = _checksum(body, len(data), number, start + len(data))
        data += _HEAD.pack(MAGIC, len(body), len(data), checksum) + body
    return bytes(data)


def _checksum(body: bytes, back: int, number: int, offset: int) -> bytes:
    h = hashlib.blake2b(struct.pack("<I", back), digest_size=16, salt=struct.pack("<QQ", number, offset))
    h.update(body)
    return h.digest()


def _whole(fd: int, number: int, offset: int, end: int) -> tuple[int, int] | None:
    """Return the size of the body of the record at `offset` and where its write began; None unless it is as it was
    written.
    """
    head = os.pread(fd, _HEAD.size, offset)
    if len(head) < _HEAD.size:
        return None
    magic, length, back, checksum = _HEAD.unpack(head)
    if magic != MAGIC or length > end - offset - _HEAD.size:
        return None
    body = os.pread(fd, length, offset + _HEAD.size)
    return (length, offset - back) if _checksum(body, back, number, offset) == checksum else None


def read(path: Path, fd: int, number: int) -> tuple[Records, int]:
    """Return the records of a file and where they end. Raises StorageError."""
    end = os.fstat(fd).st_size
    places: list[tuple[int, int]] = []
    offset = 0
    while (found := _whole(fd, number, offset, end)) is not None:
        places.append((offset + _HEAD.size, found[0]))
        offset += _HEAD.size + found[0]
    if not places:
        raise _damaged(path, 0, "its first record")
    records = Records(path, os.dup(fd), places)
    _check_head(path, records, offset)
    if offset < end and _later_write(fd, number, offset, end):
        raise _damaged(path, offset, "a record with others after it")
    return records, offset


def _check_head(path: Path, records: Records, end: int) -> None:
    try:
        opened = records[0]
    except StorageError:
        opened = None  # of another format, perhaps
    if not isinstance(opened, Opened) or opened.format != FORMAT:
        raise StorageError(
            f"{path} was written by another version of mlx-tandem; this one reads format {FORMAT}. Start that version, "
            f"or move the file away to begin with the newest checkpoint and no trajectories",
            code="unknown_format",
        )
    if len(records) < opened.carried + 2:
        raise _damaged(path, end, "one of its first records")


def _later_write(fd: int, number: int, bad: int, end: int) -> bool:
    """Return whether a write that began after the offset `bad` has left a whole record: only then `bad` was
    acknowledged.
    """
    rest = os.pread(fd, end - bad, bad)
    at = rest.find(MAGIC, 1)
    while at >= 0:
        found = _whole(fd, number, bad + at, end)
        if found is not None and found[1] > bad:
            return True
        at = rest.find(MAGIC, at + 1)
    return False


def _damaged(path: Path, offset: int, what: str) -> StorageError:
    return StorageError(
        f"{path} is damaged at byte {offset}: {what} is not as it was written. Restore the file from a copy, or move "
        f"it away to begin with the newest checkpoint and no trajectories",
        code="journal_damaged",
    )
