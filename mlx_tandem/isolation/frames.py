"""The frames between a worker process and the process that started it."""

from __future__ import annotations

import socket
from typing import BinaryIO

import msgspec
from msgspec import Struct

HEADER = 8
"""Bytes of a frame's length, big-endian, which precedes the frame."""

OUT_OF_MEMORY = 86
"""Exit status of a worker that has used up its memory."""


class Busy(Struct, frozen=True, array_like=True, tag=True):
    """Message that the worker may be silent for `seconds` from now on. It is the first frame of a worker that is
    ready.
    """

    seconds: float


encode = msgspec.msgpack.encode
decode_batch = msgspec.msgpack.Decoder(list[bytes]).decode


def framed(frame: bytes) -> bytes:
    """Return `frame` preceded by its length."""
    return len(frame).to_bytes(HEADER, "big") + frame


def send(sock: socket.socket, frame: bytes) -> None:
    """Send one frame. Raise OSError if the other side is gone."""
    sock.sendall(framed(frame))


def receive(stream: BinaryIO) -> bytes:
    """Return the next frame. Raise EOFError if the other side is gone."""
    return _exactly(stream, int.from_bytes(_exactly(stream, HEADER), "big"))


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
