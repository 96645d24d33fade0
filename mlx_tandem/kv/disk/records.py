"""The format of a segment: a head of 64 bytes, then one record per block.

A record is a head of 128 bytes, the token ids (4 bytes each) and the payload; numbers are little-endian. The head
has a CRC-32 of itself, by which the next record is found without reading the payload, and a BLAKE2b tag over
everything else, keyed with the folder's secret. Only the tag makes a record usable.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from collections.abc import Iterator

from msgspec import Struct

from mlx_tandem.files import DISK, FileOps, read_all

FORMAT = 1
"""Version of the format."""

DIGEST = 32
"""Bytes of a namespace's digest and of a key."""


_SEGMENT_MAGIC = b"\xa7Ts" + bytes([FORMAT])
_RECORD_MAGIC = b"\xa7Tr" + bytes([FORMAT])

_SEGMENT = struct.Struct("<4sIQ32s16s")  # magic, number, seconds since 1970, base, tag
_HEAD = struct.Struct("<4sI32s32s32sII16s")  # magic, CRC-32, namespace, key, parent, tokens, payload bytes, tag
_SPAN = struct.Struct("<4sI32x32s32xII16x")  # the fields of a record's head that a scan needs
_NAMED = struct.Struct("<32s32s32sII")  # the fields of a record's head that identify the record
SEGMENT_HEAD = _SEGMENT.size
RECORD_HEAD = _HEAD.size

_WINDOW = 256 << 10
_SMALL = 16 << 10

Payload = bytes | bytearray | memoryview
"""The bytes of a block."""


class BlockId(Struct, frozen=True):
    """The identity of a block's keys and values. Blocks with equal ids have equal bytes."""

    namespace: bytes  # digests of 32 bytes
    key: bytes
    parent: bytes  # empty for the first block of a chain
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.namespace) != DIGEST or len(self.key) != DIGEST or len(self.parent) not in (0, DIGEST):
            raise ValueError(f"digests have {DIGEST} bytes")


class SegmentHead(Struct, frozen=True):
    """The head of a segment."""

    number: int
    created: int  # seconds since 1970
    base: bytes  # digest of the model and of everything else that its blocks have in common


def encode_segment(head: SegmentHead, secret: bytes) -> bytes:
    """Return the head of a segment as bytes."""
    data = _SEGMENT.pack(_SEGMENT_MAGIC, head.number, head.created, head.base, b"")
    return data[:-16] + _tag(secret, data[:-16])


def decode_segment(data: Payload, number: int, secret: bytes) -> SegmentHead | None:
    """Return the head of segment `number`; None if these are not the bytes that were written for it."""
    if len(data) != SEGMENT_HEAD or not hmac.compare_digest(_tag(secret, data[:-16]), bytes(data[-16:])):
        return None
    magic, found, created, base, _ = _SEGMENT.unpack(data)
    return SegmentHead(number, created, base) if (magic, found) == (_SEGMENT_MAGIC, number) else None


def encode(block: BlockId, payload: Payload, secret: bytes) -> bytes:
    """Return the bytes of a record before its payload."""
    named = _NAMED.pack(block.namespace, block.key, block.parent, len(block.tokens), len(payload))
    tokens = struct.pack(f"<{len(block.tokens)}I", *block.tokens)
    rest = named + _tag(secret, _RECORD_MAGIC, named, tokens, payload)
    return _RECORD_MAGIC + struct.pack("<I", zlib.crc32(rest)) + rest + tokens


def decode(record: memoryview, secret: bytes) -> tuple[BlockId, memoryview] | None:
    """Return what a record of exactly these bytes holds; None if it is not what was written with `secret`."""
    if span(record[:RECORD_HEAD]) is None:
        return None
    _, _, namespace, key, parent, count, size, tag = _HEAD.unpack_from(record)
    start = RECORD_HEAD + 4 * count
    if len(record) != start + size:
        return None
    named, tokens, payload = record[8 : 8 + _NAMED.size], record[RECORD_HEAD:start], record[start:]
    if not hmac.compare_digest(_tag(secret, _RECORD_MAGIC, named, tokens, payload), tag):
        return None
    parent = parent if any(parent) else b""
    return BlockId(namespace, key, parent, struct.unpack(f"<{count}I", tokens)), payload


def span(head: Payload) -> tuple[bytes, int] | None:
    """Return the key and size of the record that begins with `head`; None if the head is damaged.

    The CRC finds damage but not forgery: see `decode`.
    """
    if len(head) != RECORD_HEAD:
        return None
    magic, crc, key, count, size = _SPAN.unpack(head)
    if magic != _RECORD_MAGIC or crc != zlib.crc32(head[8:]):
        return None
    return key, RECORD_HEAD + 4 * count + size


def walk(fd: int, end: int, ops: FileOps = DISK) -> Iterator[tuple[bytes, int, int]]:
    """Yield the key, offset and size of each record of a segment of `end` bytes, up to the first incomplete one."""
    window = memoryview(bytearray(_WINDOW))
    begin = filled = size = 0
    offset = SEGMENT_HEAD
    while offset < end:
        at = offset - begin
        if at + RECORD_HEAD > filled:  # many small records are read at once; of large ones only the heads
            begin, at = offset, 0
            filled = read_all(fd, window[: _WINDOW if size < _SMALL else RECORD_HEAD], offset, ops)
        found = span(window[at : min(at + RECORD_HEAD, filled)])
        if found is None or offset + found[1] > end:
            return
        key, size = found
        yield key, offset, size
        offset += size


def _tag(secret: bytes, *parts: Payload) -> bytes:
    h = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        h.update(part)
    return h.digest()
