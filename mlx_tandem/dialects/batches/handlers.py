"""The handlers of the routes for files and batches."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from mlx_tandem.dialects.batches import multipart
from mlx_tandem.dialects.batches.bodies import BatchBody, BatchesQuery, ExpiresAfter, FilesQuery
from mlx_tandem.dialects.batches.records import Batch, FileRecord, new_id
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.route import Received, Reply
from mlx_tandem.dialects.training.bodies import NoBody
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.printable import printable
from mlx_tandem.strict_json import convert

MOST_NAME = 255
"""Most characters of a file's name; the rest is cut off."""

MOST_METADATA, MOST_KEY, MOST_VALUE = 16, 64, 512
"""Most entries of the metadata of a batch, and most characters of their names and values."""

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

MOST_WINDOW = 30 * 86_400
"""Longest time, in seconds, in which a batch may have to be answered."""


async def upload(front: ServerFront, body: Received) -> dict[str, Any]:
    """Keep a file of requests. Raises InvalidRequest naming the field of the form, QuotaExceeded and StorageError."""
    values, files = multipart.fields(body.content)
    if (purpose := values.get("purpose")) != "batch":
        raise InvalidRequest(f"purpose must be 'batch', not {purpose!r}", param="purpose")
    unknown = values.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"} | files.keys() - {"file"}
    if unknown:
        raise InvalidRequest(
            f"{min(unknown)[:80]!r} is no field of this form", param=min(unknown), code="unknown_parameter"
        )
    if "file" not in files:
        raise InvalidRequest("file is required, with a filename", param="file", code="missing_required_parameter")
    name, content = files["file"]
    now = time.time()
    name, expires, owner = printable(name)[:MOST_NAME], _expires(values, now), CALLER.get().tenant
    record = FileRecord(new_id("file-"), name, "batch", len(content), now, expires, owner)
    await front.batches.add_file(record, content)
    return record.describe()


def _expires(values: dict[str, str], now: float) -> float | None:
    """Return when a file is removed by the fields of its form. Raises InvalidRequest."""
    asked = {name: values.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if set(asked.values()) == {None}:
        return None
    seconds = asked["seconds"] or ""
    given: dict[str, Any] = {"anchor": asked["anchor"], "seconds": int(seconds) if seconds.isdecimal() else seconds}
    return now + convert(given, ExpiresAfter, "expires_after").seconds


async def files(front: ServerFront, query: FilesQuery) -> dict[str, Any]:
    """Return a page of the files."""
    found = [each for each in await front.batches.files() if query.purpose in (None, each.purpose)]
    if query.order == "asc":
        found.reverse()
    if query.after is not None:
        at = next((i for i, each in enumerate(found) if each.id == query.after), len(found))
        found = found[at + 1 :]
    return _page([each.describe() for each in found[: query.limit]], more=len(found) > query.limit)


async def file(front: ServerFront, file_id: str) -> dict[str, Any]:
    """Return OpenAI's object for a file. Raises NotFound."""
    return (await front.batches.file(file_id)).describe()


async def content(front: ServerFront, file_id: str) -> Reply:
    """Return what a file holds. Raises NotFound."""
    return Reply(media="application/octet-stream", path=await front.batches.path(file_id))


async def remove(front: ServerFront, file_id: str) -> dict[str, Any]:
    """Remove a file. Raises NotFound, and Conflict while a batch reads it."""
    await front.batches.remove_file(file_id)
    return {"id": file_id, "object": "file", "deleted": True}


async def create(front: ServerFront, body: BatchBody) -> dict[str, Any]:
    """Begin a batch. Raises InvalidRequest and NotFound naming the field, and QuotaExceeded."""
    _check_metadata(body.metadata)
    now, after = time.time(), body.output_expires_after
    batch = Batch(
        new_id("batch_"),
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        now,
        now + _window(body.completion_window),
        metadata=body.metadata,
        output_seconds=None if after is None else after.seconds,
        owner=CALLER.get().tenant,
        key=CALLER.get().name,
    )
    return (await front.batches.create(batch)).describe()


async def batches(front: ServerFront, query: BatchesQuery) -> dict[str, Any]:
    """Return a page of the batches."""
    found = await front.batches.batches(query.after, query.limit + 1)
    return _page([each.describe() for each in found[: query.limit]], more=len(found) > query.limit)


async def batch(front: ServerFront, batch_id: str) -> dict[str, Any]:
    """Return OpenAI's object for a batch. Raises NotFound."""
    return (await front.batches.batch(batch_id)).describe()


async def cancel(front: ServerFront, batch_id: str, body: NoBody) -> dict[str, Any]:
    """Cancel a batch. Raises NotFound, and Conflict for one that has ended."""
    return (await front.batches.cancel(batch_id)).describe()


def _page(shown: Sequence[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """Return a page of a list in OpenAI's form."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": more,
    }


def _window(text: str) -> int:
    """Return the seconds of a completion window. Raises InvalidRequest."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MOST_WINDOW:
        raise InvalidRequest(
            f"completion_window is {text[:40]!r}: it is 24h, or another time of at most 30d, such as 90m or 7d",
            param="completion_window",
        )
    return seconds


def _check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise InvalidRequest for metadata that is over OpenAI's limits."""
    given = metadata or {}
    if len(given) > MOST_METADATA:
        raise InvalidRequest(f"metadata has over {MOST_METADATA} entries", param="metadata")
    if any(len(key) > MOST_KEY or len(value) > MOST_VALUE for key, value in given.items()):
        raise InvalidRequest(
            f"metadata has names of at most {MOST_KEY} characters and values of at most {MOST_VALUE}", param="metadata"
        )
