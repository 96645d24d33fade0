"""Records that rows of the database hold as bytes: updates and answers, sealed with a checksum."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from mlx_tandem.engine.learning import AdamParams, Batch
from mlx_tandem.training.open_trajectories import Beginning, Exchange

T = TypeVar("T")

GOOD = ("published", "kept")
"""Outcomes of updates whose step stands."""

_SEAL = 8  # bytes of the checksum


class Taught(Struct, frozen=True, array_like=True):
    """What an update learned from feedback."""

    feedback: int  # how many
    replayed: int  # earlier good answers that were repeated beside it
    loss: float | None  # mean over what is compared or judged; None: answers are only shown


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
    taught: Taught | None = None  # None: it learns from trajectories


class Ended(Struct, frozen=True, array_like=True, tag="ended"):
    """What became of the update that began last. `digest` and `version` of what was published; empty and 0: nothing."""

    step: int  # the optimiser's, now
    outcome: str  # as in UpdateReport
    digest: str = ""
    version: int = 0


class Kept(Struct, frozen=True, array_like=True, tag="kept"):
    """An answer of a trajectory whose reward is still missing. `begun` is that of a new trajectory."""

    id: str
    at: float  # seconds since the epoch
    exchange: Exchange
    begun: Beginning | None = None


class State(Struct, frozen=True):
    """A state of the trainer on the drive: what it is after update `number`."""

    folder: str  # its name, beside the database
    number: int  # 0: before the first update
    step: int  # of the optimiser
    version: int  # of its content; 0: it was not published
    digest: str  # of its content; empty: not known
    files: dict[str, str] = {}  # BLAKE2b-256 by name


class Broken(ValueError):
    """Bytes of a row are not as they were written, or this version cannot read them."""


def seal(value: Any) -> bytes:
    """Return a value as bytes that `unseal` can tell from damaged ones."""
    body = msgspec.msgpack.encode(value)
    return hashlib.blake2b(body, digest_size=_SEAL).digest() + body


def unseal(data: bytes, kind: type[T]) -> T:
    """Return the value of sealed bytes. Raises Broken."""
    body = data[_SEAL:]
    if hashlib.blake2b(body, digest_size=_SEAL).digest() != data[:_SEAL]:
        raise Broken("it is not as it was written")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as e:
        raise Broken(f"this version cannot read it ({e})") from e
