"""The bodies and queries of requests about files and batches."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from mlx_tandem.limits import bounds

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
"""A route whose requests a batch may have."""


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """When a file is removed."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, bounds("expires_after_s")]


class BatchBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request that begins a batch."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class FilesQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of a request for a page of the files."""

    purpose: str | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"  # by when they came; desc: the newest first
    after: str | None = None  # the id of the last file of the page before


class BatchesQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of a request for a page of the batches, the newest first."""

    limit: Annotated[int, bounds("limit")] = 20
    after: str | None = None  # the id of the last batch of the page before
