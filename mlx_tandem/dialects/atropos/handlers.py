"""The handlers of Atropos' trajectory API."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, TypeVar

from msgspec import Struct

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.route import Received
from mlx_tandem.errors import Forbidden, InvalidRequest, NotFound, TooLarge, UnsupportedMedia
from mlx_tandem.strict_json import decode, dumps
from mlx_tandem.training.atropos.client import NotRegistered
from mlx_tandem.training.atropos.hub import EnvironmentBody, Group, Hub, Registration

MOST_UNPACKED = 64 << 20
"""Most bytes of a body after decompression."""

GZIP = 16 + zlib.MAX_WBITS
"""The argument that tells zlib that data has gzip's header."""

T = TypeVar("T")


class EnvironmentId(Struct):
    """The number of an environment."""

    env_id: int


def _hub(front: ServerFront) -> Hub:
    """Return the API. Raises NotFound on a server that does not have it."""
    hub = None if front.learning is None else front.learning.default.hub
    if hub is None:
        raise NotFound("Atropos' trajectory API is switched off: start the server with --atropos-api")
    return hub


async def _groups(hub: Hub, body: Received, *, several: bool) -> list[Group]:
    """Return the groups of a body, or its only one, which are decoded and counted on another thread, a body at a time.

    Those that wait for their turn are held as they were sent. Raises UnsupportedMedia, TooLarge, InvalidRequest.
    """

    def read() -> list[Group]:
        groups = _unpacked(body, list[Group]) if several else [_unpacked(body, Group)]
        for group in groups:
            group.nbytes  # noqa: B018 - computed here and kept
        return groups

    async with hub.reading:
        return await asyncio.to_thread(read)


def _unpacked(body: Received, kind: type[T]) -> T:
    """Return a JSON body, which may be compressed with gzip. Raises UnsupportedMedia, TooLarge, InvalidRequest."""
    if body.media != "application/json":
        raise UnsupportedMedia("Content-Type must be application/json")
    if body.encoding not in ("identity", "gzip"):
        raise UnsupportedMedia("Content-Encoding must be gzip, if there is one")
    content = body.content
    if body.encoding == "gzip":
        unpacking = zlib.decompressobj(GZIP)
        try:
            content = unpacking.decompress(content, MOST_UNPACKED)
        except zlib.error as e:
            raise InvalidRequest("the body is not complete gzip data") from e
        if unpacking.unconsumed_tail:
            raise TooLarge(f"the body is over the limit of {MOST_UNPACKED} bytes when it is unpacked")
        if not unpacking.eof:
            raise InvalidRequest("the body is not complete gzip data")
    return decode(content, kind)


def register(front: ServerFront, body: Registration) -> bytes:
    """Register a trainer; return its number, which has up to 128 bits."""
    return b'{"uuid":%d}' % _hub(front).register(body)


def register_env(front: ServerFront, body: EnvironmentBody) -> dict[str, Any]:
    """Register an environment; return its number and what the trainer has said of itself."""
    hub = _hub(front)
    joined = hub.join(body)
    if joined is None or hub.trainer is None:
        return {"status": "wait for trainer to start"}
    env_id, name = joined
    return {
        "status": "success",
        "env_id": env_id,
        "wandb_name": name,
        "checkpoint_dir": hub.trainer.checkpoint_dir,
        "starting_step": hub.step,
        "checkpoint_interval": hub.trainer.save_checkpoint_interval,
        "num_steps": hub.trainer.num_steps,
    }


def disconnect_env(front: ServerFront, body: EnvironmentId) -> dict[str, str]:
    """Record that an environment has gone."""
    try:
        _hub(front).leave(body.env_id)
    except NotFound as e:
        return {"status": "failure", "error": e.message}
    return {"status": "success"}


def wandb_info(front: ServerFront) -> dict[str, str | None]:
    """Return the group and project of the trainer's run."""
    trainer = _hub(front).trainer
    if trainer is None:
        return {"group": None, "project": None}
    return {"group": trainer.wandb_group, "project": trainer.wandb_project}


def info(front: ServerFront) -> dict[str, int]:
    """Return how many sequences a batch has, and how many tokens a sequence may have."""
    trainer = _hub(front).trainer
    if trainer is None:
        return {"batch_size": -1, "max_token_len": -1}
    return {"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len}


async def batch(front: ServerFront) -> bytes | dict[str, Any]:
    """Take the next batch."""
    try:
        return await asyncio.to_thread(dumps, {"batch": _hub(front).take()})
    except NotRegistered:
        return {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}


def status(front: ServerFront) -> dict[str, int]:
    """Return how many batches were taken, and how many groups wait."""
    hub = _hub(front)
    return {"current_step": hub.step, "queue_size": hub.queue_size}


def status_env(front: ServerFront, body: EnvironmentId) -> dict[str, float]:
    """Return the numbers by which an environment paces itself."""
    return _hub(front).pace(body.env_id)


async def scored_data(front: ServerFront, body: Received) -> dict[str, Any]:
    """Take a group."""
    hub = _hub(front)
    (group,) = await _groups(hub, body, several=False)
    waiting = hub.put(group)
    return {"status": "received"} if waiting is None else {"status": "buffered", "buffer_size": waiting}


async def scored_data_list(front: ServerFront, body: Received) -> dict[str, Any]:
    """Take several groups."""
    hub = _hub(front)
    groups = await _groups(hub, body, several=True)
    buffered = [waiting for waiting in map(hub.put, groups) if waiting is not None]
    found: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
    return found | ({"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {})


async def latest_example(front: ServerFront) -> bytes:
    """Return the group that came last, or an empty one."""
    latest = _hub(front).latest
    names = (
        "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs",
        "messages", "images",
    )  # fmt: skip
    return await asyncio.to_thread(dumps, {name: [] for name in names} if latest is None else latest)


def reset_data(front: ServerFront) -> str:
    """Forget the trainer, the environments and all groups."""
    _hub(front).reset()
    return "Reset successful"


def refuse_browser(front: ServerFront) -> None:
    """Raise Forbidden: any page that a browser shows can make it send GET requests."""
    raise Forbidden("browsers may not take or drop what environments have posted")
