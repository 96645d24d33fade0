"""The lines of a batch: requests as callers write them, and what became of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.dialects.batches.records import LineOutcome, Problem, Status, new_id
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import decode, dumps

MOST_PROBLEMS = 50
"""Most wrong lines that are reported for a batch."""


class RequestLine(Struct, forbid_unknown_fields=True):
    """One request of a batch, as a line of its file."""

    custom_id: str  # the caller's name for it
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class LinePlace(NamedTuple):
    """The place of a line in its file, in bytes."""

    start: int
    size: int


class LineReply(NamedTuple):
    """The reply to one request."""

    status: int
    body: bytes
    request: str  # its id


def checked(path: Path, endpoint: str) -> tuple[list[LinePlace], list[Problem]]:
    """Return the places of all requests in a file, and what is wrong with lines of it. It may wait for the drive.

    Empty lines count as lines, and are no requests.
    """
    places: list[LinePlace] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, (place, text) in enumerate(_lines(path), 1):
        if not text.strip():
            continue
        places.append(place)
        if len(places) > limits.MAX_BATCH_LINES:
            message = f"the file has over {limits.MAX_BATCH_LINES} requests"
            return places, [Problem(number, message, None, "too_many_requests")]
        try:
            _check(read(text), endpoint, seen)
        except InvalidRequest as e:
            problems.append(Problem(number, e.message, e.param, e.code))
            if len(problems) >= MOST_PROBLEMS:
                break
    if not places:
        problems.append(Problem(None, "the file has no requests", None, "empty_file"))
    return places, problems


def read(text: bytes) -> RequestLine:
    """Return a line as a request. Raises InvalidRequest."""
    return decode(text, RequestLine)


def read_at(path: Path, place: LinePlace) -> bytes:
    """Return the text of the line at this place. It may wait for the drive."""
    with path.open("rb") as file:
        file.seek(place.start)
        return file.read(place.size)


def _lines(path: Path) -> Iterator[tuple[LinePlace, bytes]]:
    """Yield each line of a file with its place."""
    start = 0
    with path.open("rb") as file:
        for text in file:
            yield LinePlace(start, len(text)), text
            start += len(text)


def _check(line: RequestLine, endpoint: str, seen: set[str]) -> None:
    """Raise InvalidRequest unless a request may be in a batch of this endpoint. `seen` are the ids before it."""
    if not 0 < len(line.custom_id) <= limits.MAX_CUSTOM_ID:
        raise InvalidRequest(f"custom_id must have 1 to {limits.MAX_CUSTOM_ID} characters", param="custom_id")
    if line.custom_id in seen:
        raise InvalidRequest(f"custom_id {line.custom_id!r} is that of an earlier line", param="custom_id")
    seen.add(line.custom_id)
    if line.url != endpoint:
        raise InvalidRequest(f"url is {line.url[:100]!r}, but the batch is for {endpoint}", param="url")
    if line.body.get("stream"):
        raise InvalidRequest("body.stream must be false: answers of batches are not streamed", param="body.stream")


def answered(number: int, custom_id: str, answer: LineReply) -> LineOutcome:
    """Return the outcome of a request that was answered, well or with an error."""
    response = {"status_code": answer.status, "request_id": answer.request, "body": msgspec.Raw(answer.body)}
    return LineOutcome(number, answer.status < 400, _line(custom_id, response, None))


def unanswered(number: int, custom_id: str, code: str, message: str) -> LineOutcome:
    """Return the outcome of a request that was never answered."""
    return LineOutcome(number, False, _line(custom_id, None, {"code": code, "message": message}))


def _line(custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    """Return a line of the file of answers or of errors."""
    return dumps({"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error})


UNANSWERED = {
    "expired": ("batch_expired", "the request was not answered before the completion window ended"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the request was answered"),
    "failed": ("batch_quota_exceeded", "the answers of all batches take as much of the drive as they may"),
}
"""The code and the message of requests that were never answered, by the state in which their batch has ended."""


def left(status: Status, path: Path, places: Mapping[int, LinePlace]) -> Iterator[LineOutcome]:
    """Yield an outcome for each request that will not be answered, since its batch ends in the state `status`.

    It may wait for the drive.
    """
    code, message = UNANSWERED[status]
    for number, place in places.items():
        yield unanswered(number, read(read_at(path, place)).custom_id, code, message)
