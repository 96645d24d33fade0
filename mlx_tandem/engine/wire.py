"""Frames on a stream socket: a 4-byte little-endian length, then one msgpack array of tagged messages."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Sequence

import msgspec

from mlx_tandem.engine.messages import MAX_FRAME, Inbound, Outbound
from mlx_tandem.engine.texts import escape_of

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

decode_outbound = msgspec.msgpack.Decoder(list[Outbound]).decode
"""Return the messages of a frame's body from the engine. Raises ValueError for any other body."""

decode_inbound = msgspec.msgpack.Decoder(list[Inbound]).decode
"""Return the messages of a frame's body from the front. Raises ValueError for any other body."""


class WireError(Exception):
    """Raised when the peer sent what is not a frame, or is gone."""


def encode(messages: Sequence[Inbound | Outbound]) -> bytes:
    """Return a frame of `messages`, their texts escaped and cut as `texts` says.

    Raises WireError for a frame that is too large.
    """
    body = _encoder.encode([_printable(message) for message in messages])
    if len(body) > MAX_FRAME:
        raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def _printable(message: Inbound | Outbound) -> Inbound | Outbound:
    escape = escape_of(type(message))
    safe: Inbound | Outbound = message if escape is None else escape(message)
    return safe


class FrameReader:
    """A reader that cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take in bytes that were read, in pieces of any size; return the bodies of the frames that are complete now.

        Raises WireError for a length over MAX_FRAME.
        """
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (n,) = _LENGTH.unpack_from(self._buffer, start)
            if n > MAX_FRAME:
                raise WireError(f"a frame of {n} bytes is over the limit of {MAX_FRAME}")
            end = start + _LENGTH.size + n
            if len(self._buffer) < end:
                break
            frames.append(bytes(memoryview(self._buffer)[start + _LENGTH.size : end]))  # copied once
            start = end
        if start:
            del self._buffer[:start]
        return frames


class EngineChannel:
    """The engine's end of the socket: it reads without blocking between steps, waits when idle, and writes whole
    frames.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        self._socket = sock
        self._reader = FrameReader()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    def receive(self, wait: float) -> list[Inbound]:
        """Return all messages that have arrived; wait up to `wait` seconds for the first, or until `wake`.

        Raises WireError when the front is gone.
        """
        messages: list[Inbound] = []
        while ready := select.select([self._socket, self._woken], [], [], 0.0 if messages else wait)[0]:
            if self._woken in ready:
                self._woken.recv(1 << 12)
                wait = 0.0
            if self._socket not in ready:
                continue
            data = self._socket.recv(1 << 20)
            if not data:
                raise WireError("the front closed the channel")
            for frame in self._reader.feed(data):
                messages += decode_inbound(frame)
        return messages

    def wake(self) -> None:
        """End a wait in `receive`, now or the next one; may be called from any thread."""
        with contextlib.suppress(OSError):  # the channel is closed, or has been woken many times
            self._waker.send(b"w")

    def send(self, messages: Sequence[Outbound]) -> None:
        """Send messages in one frame. Raises WireError when the front is gone or the frame is too large."""
        try:
            self._socket.sendall(encode(messages))
        except OSError as e:
            raise WireError(f"the front is gone: {e}") from e

    def close(self) -> None:
        """Close the sockets."""
        for sock in (self._socket, self._woken, self._waker):
            sock.close()
