"""The bodies and queries of requests about feedback."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from mlx_tandem.limits import bounds


class FeedbackBody(Struct, forbid_unknown_fields=True):
    """The body of a request that says what a completion is worth. It says at least one of the things below."""

    completion_id: str  # the id of the reply, of whichever API
    choice: Annotated[int, bounds("choice")] | None = None  # that it is about; absent: the first
    thumb: Literal["up", "down"] | None = None
    score: float | None = None  # from 0, a bad answer, to 1, a good one
    preferred: Annotated[int, bounds("choice")] | None = None  # the best choice of all that answer the same prompt
    corrected: str | None = None  # the text that the choice should have had
    comment: str | None = None  # for people
    metadata: dict[str, Any] | None = None


class ListQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of a request for a page of the feedback in the store."""

    limit: Annotated[int, bounds("limit")] = 20
    order: Literal["asc", "desc"] = "desc"  # by when it came; desc: the newest first
    after: Annotated[int, bounds("version")] | None = None  # the number of the last feedback of the page before
