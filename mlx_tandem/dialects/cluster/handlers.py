"""The handlers of the routes of a leader: its base, its adapters and their files, and trajectories on their way."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mlx_tandem import limits
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.route import Received, Reply
from mlx_tandem.errors import Forbidden, NotFound
from mlx_tandem.training.cluster.wire import (
    MOST_ITEMS,
    MOST_WAIT,
    Contribution,
    File,
    FileName,
    Id,
    Items,
    Publication,
    Sha256,
    decode,
    plain,
)

Wait = Annotated[float, Meta(ge=0.0, le=MOST_WAIT)]
Count = Annotated[int, Meta(ge=0, le=2**62)]


class FeedQuery(Struct, forbid_unknown_fields=True):
    """The newest adapters that the caller has, by their sequence in one run of the leader."""

    after: Count = 0
    leader: Annotated[str, Meta(max_length=16)] = ""
    wait: Wait = 0.0  # seconds for which the reply may wait for something newer


class ReadQuery(Struct, forbid_unknown_fields=True):
    """The place in a file from which on it is read."""

    offset: Count = 0


class WriteQuery(Struct, forbid_unknown_fields=True):
    """The trainer that sends a file, the file's name and size, and the place from which on it is written."""

    trainer: Id
    name: FileName
    size: Annotated[int, Meta(ge=1, le=limits.MAX_ADAPTER_BYTES)]
    offset: Count = 0


class TakeQuery(Struct, forbid_unknown_fields=True):
    """A trainer's request for trajectories. It already has those with numbers up to `after` in `queue`."""

    trainer: Id
    queue: Id
    after: Count = 0
    most: Annotated[int, Meta(ge=0, le=MOST_ITEMS)] = MOST_ITEMS
    wait: Wait = 0.0


async def base(front: ServerFront) -> dict[str, Any]:
    """Return the leader's base model."""
    return dict(plain(await front.check_leader().base()))


async def versions(front: ServerFront, query: FeedQuery) -> Reply:
    """Return the leader's adapters once there is something new."""
    feed = await front.check_leader().feed(query.after, query.leader, query.wait)
    return Reply(msgspec.json.encode(feed), "application/json")


async def read(front: ServerFront, sha256: str, query: ReadQuery) -> Reply:
    """Return the next bytes of a file of an adapter; none at its end."""
    content = await asyncio.to_thread(front.check_leader().files.read, _hash(sha256), query.offset)
    return Reply(content, "application/octet-stream")


async def write(front: ServerFront, sha256: str, query: WriteQuery, body: Received) -> dict[str, Any]:
    """Take the next bytes of a file that a trainer publishes; return how many there are."""
    file = File(query.name, query.size, _hash(sha256))
    return {"received": await front.check_leader().receive(query.trainer, file, query.offset, body.content)}


async def publish(front: ServerFront, body: Received) -> dict[str, Any]:
    """Serve a trainer's version, whose files are there."""
    wanted = decode(body.content, Publication)
    await front.check_leader().publish(wanted)
    return {"status": "published", "model": f"{wanted.adapter}@{wanted.version.number}"}


async def contribute(front: ServerFront, body: Received) -> dict[str, Any]:
    """Take what a trainer has learned in a round of federated averaging."""
    await front.check_leader().contribute(decode(body.content, Contribution))
    return {"status": "contributed"}


def refuse_browser(front: ServerFront) -> None:
    """Raise Forbidden: a page that a browser shows could take a trainer's lease by GET."""
    raise Forbidden("browsers may not take trajectories")


async def take(front: ServerFront, query: TakeQuery) -> Reply:
    """Return trajectories for a trainer."""
    found = await front.check_leader().take(query.trainer, query.queue, query.after, query.most, query.wait)
    return Reply(msgspec.json.encode(found), "application/json")


async def collect(front: ServerFront, body: Received) -> dict[str, Any]:
    """Take trajectories of a follower; return how many."""
    return {"received": await front.check_leader().collect(decode(body.content, Items))}


def status(front: ServerFront) -> dict[str, Any]:
    """Return the role of this server among several machines, and its counters."""
    if front.cluster is None:
        raise NotFound("this server is one machine: it neither leads (--share-model) nor is connected (--connect-to)")
    return dict(plain(front.cluster.status()))


def _hash(sha256: str) -> str:
    """Return a hash of the path. Raises NotFound for another text."""
    try:
        return msgspec.convert(sha256, Sha256)
    except msgspec.ValidationError:
        raise NotFound("there is no such file", param="sha256") from None
