"""Reads the journal of versions of mlx-tandem before `learning.db`, whose content goes into the database once.

It is the newest file `journal-NNNNNN.log`. A record is MAGIC, the length of its body, how many bytes before it the
write began that it was part of (4 bytes each, little-endian), a BLAKE2b checksum of 16 bytes that is salted with the
file's number and the record's offset, and its body, a tagged msgpack value.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.files import StorageError
from mlx_tandem.training.store.records import Began, Ended, Kept
from mlx_tandem.training.trajectories import Trajectory

FORMAT = 1
MAGIC = b"\xa7Tj1"

_NAME = re.compile(r"journal-(\d{6,})\.log")
_HEAD = struct.Struct("<4sII16s")


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """The first record of a file: what follows came after this checkpoint."""

    format: int
    checkpoint: str  # the label of its manifest; empty: it came after the very beginning
    step: int
    carried: int  # so many Added and Kept, then one Seen, came with it


class Added(Struct, frozen=True, array_like=True, tag="added"):
    """A trajectory came, of a group of `size`."""

    trajectory: Trajectory
    size: int = 0


class Seen(Struct, frozen=True, array_like=True, tag="seen"):
    """Ids of all trajectories that came before this file began, oldest first."""

    ids: tuple[str, ...]


class Dropped(Struct, frozen=True, array_like=True, tag="dropped"):
    """These were too old to be learned from."""

    ids: tuple[str, ...]


class Compared(Struct, frozen=True, array_like=True, tag="compared"):
    """The lead of a prompt's answers over those of the accepted version, with how far they may be behind."""

    difference: float
    tolerated: float = 0.0


class Forgotten(Struct, frozen=True, array_like=True, tag="forgotten"):
    """These trajectories will have no reward."""

    ids: tuple[str, ...]


Record = Opened | Added | Seen | Dropped | Began | Ended | Compared | Kept | Forgotten

_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def read(folder: Path) -> list[Record]:
    """Return all records of the journal in `folder` that are whole; none: there is no journal.

    What is not whole of the last write was never acknowledged. Raises StorageError for other damage.
    """
    with files.storage(folder):
        numbers = [int(m[1]) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        if not numbers:
            return []
        path = folder / f"journal-{max(numbers):06}.log"
        data = path.read_bytes()
    found: list[Record] = []
    offset = 0
    while (whole := _whole(data, max(numbers), offset)) is not None:
        body, _ = whole
        try:
            found.append(_DECODER.decode(body))
        except msgspec.MsgspecError as e:
            raise _damaged(path, offset) from e
        offset += _HEAD.size + len(body)
    opened = found[0] if found else None
    if not isinstance(opened, Opened) or opened.format != FORMAT or len(found) < opened.carried + 2:
        raise _damaged(path, offset)
    if any(begun > offset for begun in _later_writes(data, max(numbers), offset)):
        raise _damaged(path, offset)
    return found


def _whole(data: bytes, number: int, offset: int) -> tuple[bytes, int] | None:
    """Return the body of the record at `offset`, and where its write began; None unless it is as it was written."""
    head = data[offset : offset + _HEAD.size]
    if len(head) < _HEAD.size:
        return None
    magic, length, back, checksum = _HEAD.unpack(head)
    body = data[offset + _HEAD.size : offset + _HEAD.size + length]
    if magic != MAGIC or len(body) < length:
        return None
    h = hashlib.blake2b(struct.pack("<I", back), digest_size=16, salt=struct.pack("<QQ", number, offset))
    h.update(body)
    return (body, offset - back) if h.digest() == checksum else None


def _later_writes(data: bytes, number: int, bad: int) -> Iterator[int]:
    """Yield where the writes of whole records behind the offset `bad` began: only what is before one of them was
    acknowledged.
    """
    at = data.find(MAGIC, bad + 1)
    while at >= 0:
        found = _whole(data, number, at)
        if found is not None:
            yield found[1]
        at = data.find(MAGIC, at + 1)


def _damaged(path: Path, offset: int) -> StorageError:
    return StorageError(
        f"{path}, the journal of an earlier version of mlx-tandem, is damaged at byte {offset} or of another format "
        "and cannot be taken over. Restore the file from a copy, or move it away to begin with the newest checkpoint "
        "and no trajectories",
        code="store_damaged",
    )
