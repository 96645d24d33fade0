"""`/v1/adapters`: what is loaded, loading and removing while serving."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from mlx_tandem.adapters.registry import Entry
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.front import Front


class AdapterBody(Struct, forbid_unknown_fields=True):
    name: str
    path: str


def describe(entry: Entry, front: Front) -> dict[str, Any]:
    """One adapter version as clients see it."""
    info, counters = entry.info, entry.counters
    return {
        "name": entry.name,
        "version": entry.ref.version,
        "id": entry.ref.label,
        "path": entry.path,
        "digest": info.digest,
        "format": info.format,
        "rank": info.rank,
        "scale": info.scale,
        "targets": list(info.targets),
        "size_bytes": info.nbytes,
        "created": int(entry.created),
        "resident": info.digest in front.client.stats.resident_adapters,
        "requests": counters.requests,
        "prompt_tokens": counters.prompt_tokens,
        "generated_tokens": counters.generated_tokens,
        "errors": counters.errors,
    }


def listing(front: Front) -> dict[str, Any]:
    """Current versions, each with the numbers of all versions of its name."""
    return {
        "adapters": [
            describe(e, front) | {"versions": [v.ref.version for v in front.registry.versions(e.name)]}
            for e in front.registry.entries()
        ]
    }


async def load(front: Front, body: AdapterBody) -> dict[str, Any]:
    """Under a name that exists this publishes a new version: the name stands for it from the next request on."""
    if not body.path or "\0" in body.path or len(body.path) > 4096:
        raise InvalidRequest("path must name a folder", param="path")
    entry = await front.load_adapter(body.name, body.path)
    return {"status": "loaded"} | describe(entry, front)


async def unload(front: Front, name: str) -> dict[str, Any]:
    refs = await front.unload_adapter(name)
    return {"status": "unloaded", "name": name, "versions": [r.version for r in refs]}
