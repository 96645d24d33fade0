"""The records of files and batches, and OpenAI's objects for them."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from msgspec import Struct, field, structs

Purpose = Literal["batch", "batch_output"]
"""The purpose of a file: requests that a caller has sent, or what became of them."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
"""The state of a batch, in OpenAI's words."""

ENDED = frozenset[Status]({"failed", "completed", "expired", "cancelled"})
"""The states in which nothing more becomes of a batch."""


class FileRecord(Struct, frozen=True):
    """A file. Times are in seconds since 1970."""

    id: str
    name: str  # that the caller gave it
    purpose: Purpose
    size: int  # bytes
    created: float
    expires: float | None = None  # when it is removed; None: when somebody deletes it
    owner: str = ""  # the tenant who sees it, besides those with the scope admin; empty: keys without a tenant

    def describe(self) -> dict[str, Any]:
        """Return OpenAI's object for the file."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": int(self.created),
            "expires_at": None if self.expires is None else int(self.expires),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class Problem(Struct, frozen=True):
    """An error in a line of the requests. `line` counts from 1."""

    line: int | None
    message: str
    param: str | None
    code: str | None


class Batch(Struct):
    """A batch, as the database keeps it. Times are in seconds since 1970."""

    id: str
    endpoint: str
    input: str  # the file of its requests
    window: str  # the time in which its requests have to be answered, as the caller wrote it
    created: float
    expires: float
    status: Status = "validating"
    total: int = 0  # requests
    completed: int = 0
    failed: int = 0
    problems: tuple[Problem, ...] = ()
    metadata: dict[str, str] | None = None
    output_seconds: float | None = None  # after its end, when the files of the answers are removed; None: never
    output: str | None = None  # the file of the answers
    errors: str | None = None  # the file of the requests that failed
    times: dict[Status, float] = field(default_factory=dict)  # when it came into each state
    owner: str = ""  # the tenant who sees it, as for a file
    key: str = ""  # the name of the key that it was created with, under whose limits its requests run

    @property
    def has_ended(self) -> bool:
        """Whether nothing more becomes of it."""
        return self.status in ENDED

    def enter(self, status: Status, now: float) -> None:
        """Note that the batch is in a state from now on."""
        self.status = status
        self.times[status] = now

    def describe(self) -> dict[str, Any]:
        """Return OpenAI's object for the batch."""
        times = {f"{status}_at": int(at) for status, at in self.times.items()}
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        problems = [structs.asdict(each) for each in self.problems]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": self.input,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output,
            "error_file_id": self.errors,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            **{f"{name}_at": times.get(f"{name}_at") for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class LineOutcome(Struct, frozen=True):
    """The outcome of one request of a batch, as a line of the file of answers or of errors."""

    line: int  # of the requests, from 0 on
    succeeded: bool
    text: bytes  # JSON without a line break


def new_id(kind: str) -> str:
    """Return an id that nothing else has, such as `file-…`."""
    return f"{kind}{secrets.token_hex(12)}"
