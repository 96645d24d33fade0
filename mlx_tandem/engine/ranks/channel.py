"""Frames between ranks: length, number, seal, and one message in msgpack.

The seal of a frame is a keyed digest of its message and of the seal before it. So a receiver notices a frame that was
lost, repeated, changed, or sent by somebody without the key, and ends the group.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")

MAX_FRAME = 256 << 20
"""Most bytes of a message."""

SEAL_BYTES = 16

_HEADER = struct.Struct(f"<IQ{SEAL_BYTES}s")

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""Return a message in msgpack."""


class ChannelError(Exception):
    """Raised when the peer is gone, or has sent what it should not."""


class _Chain:
    """The seals of one direction."""

    def __init__(self, key: bytes):
        self._key = key
        self._last = bytes(SEAL_BYTES)
        self.number = 0

    def seal(self, body: bytes) -> bytes:
        """Return the seal of the next message."""
        digest = hashlib.blake2b(self._last, digest_size=SEAL_BYTES, key=self._key)
        digest.update(body)
        self._last = digest.digest()
        self.number += 1
        return self._last


class RankChannel(Generic[M]):
    """One end of the connection between two ranks. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, key: bytes, expected: Any):
        """Take over a connected stream socket. `expected`: the type of the messages that are received."""
        sock.setblocking(True)
        self._socket = sock
        self._lock = threading.Lock()
        self._sent, self._received = _Chain(key), _Chain(key)
        self._decode: Callable[[bytes], M] = msgspec.msgpack.Decoder(expected).decode

    def send(self, message: Any) -> None:
        """Send a message. Raises ChannelError."""
        self.send_encoded(encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Send a message that was encoded. Raises ChannelError."""
        if len(body) > MAX_FRAME:
            raise ChannelError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}")
        try:
            with self._lock:
                seal = self._sent.seal(body)
                self._socket.sendall(_HEADER.pack(len(body), self._sent.number, seal) + body)
        except OSError as e:
            raise ChannelError(f"it cannot be reached ({e})") from e

    def receive(self, most: int = MAX_FRAME) -> M:
        """Wait for the next message, of at most `most` bytes, and return it. Raises ChannelError."""
        length, number, seal = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > most:
            raise ChannelError(f"it sent a message of {length} bytes, over the limit of {most}")
        body = self._exactly(length)
        if seal != self._received.seal(body) or number != self._received.number:
            raise ChannelError("a message between ranks was lost or changed, or came from somebody without the key")
        try:
            return self._decode(body)
        except (msgspec.DecodeError, ValueError) as e:
            raise ChannelError(f"it sent no message of this version ({e})") from e

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            try:
                size = self._socket.recv_into(view[got:])
            except OSError as e:
                raise ChannelError(f"its connection broke ({e})") from e
            if not size:
                raise ChannelError("it has ended the connection")
            got += size
        return bytes(data)

    def wait_at_most(self, seconds: float | None) -> None:
        """Raise ChannelError from now on where nothing comes, or nothing is taken, for so long; None: never."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """End the connection. A thread that waits in `receive` gets ChannelError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
