"""What is scored and by what, and the frames between the pool and its workers."""

from __future__ import annotations

import socket
from typing import Any, BinaryIO, Literal, get_args

import msgspec
from msgspec import Struct

from mlx_tandem.config import RewardSpec

Kind = Literal["timeout", "memory", "died", "raised", "invalid", "too_large"]
"""Why there is no score. `invalid`: the function returned something else than a number in limits.py's range."""
KINDS: tuple[Kind, ...] = get_args(Kind)


class Sample(Struct, frozen=True):
    """One completion, as reward functions see it."""

    prompt: str
    completion: str
    metadata: dict[str, Any] = {}
    tokens: int = 0  # of the completion


class Scoring(Struct, frozen=True):
    """A checked wish: the weighted sum of `parts` is the reward."""

    function: str  # the name that was asked for; of an unnamed composite its parts' names, joined by +
    parts: tuple[RewardSpec, ...]
    metadata: dict[str, Any] = {}


class Item(Struct, frozen=True, array_like=True):
    """One score to compute. A batch is a list of encoded ones: each is decoded afresh, so nothing is shared."""

    parts: tuple[RewardSpec, ...]
    sample: Sample


class Scored(Struct, frozen=True, array_like=True, tag=True):
    """An item's reward. The items of a batch are answered in their order."""

    value: float


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """An item that has no reward."""

    kind: Kind
    detail: str = ""  # an exception's or a value's type: never a text, which may quote a prompt


class Busy(Struct, frozen=True, array_like=True, tag=True):
    """From now on the worker may be silent for so long. The first frame that it sends."""

    seconds: float


MAX_ANSWER = 1024  # bytes
OUT_OF_MEMORY = 86  # the exit status of a worker that was

encode = msgspec.msgpack.encode
decode_batch = msgspec.msgpack.Decoder(list[bytes]).decode
decode_item = msgspec.msgpack.Decoder(Item).decode
decode_answer = msgspec.msgpack.Decoder(Scored | Failed | Busy).decode


def send(sock: socket.socket, frame: bytes) -> None:
    """Raises OSError when the other side is gone, TimeoutError when it takes nothing."""
    sock.sendall(len(frame).to_bytes(8, "big") + frame)


def receive(stream: BinaryIO, limit: int) -> bytes:
    """The next frame. EOFError when the other side is gone, ValueError for more than `limit` bytes."""
    size = int.from_bytes(_exactly(stream, 8), "big")
    if size > limit:
        raise ValueError(f"a frame of {size} bytes")
    return _exactly(stream, size)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
