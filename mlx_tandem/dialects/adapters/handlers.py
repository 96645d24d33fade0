"""The handlers of the routes for adapters and aliases, which list and change them while the server runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from mlx_tandem.adapters.aliases import AliasArm
from mlx_tandem.adapters.registry import Entry
from mlx_tandem.dialects.adapters.bodies import AdapterBody, AliasBody
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.generation.front import Front


def describe(entry: Entry, resident: Collection[str]) -> dict[str, Any]:
    """Return the description of one adapter version. `resident` has the digests of the adapters in slots."""
    info = entry.info
    return {
        "name": entry.name,
        "version": entry.ref.version,
        "id": entry.ref.label,
        "path": None if entry.source is None else entry.source.path,
        "digest": info.digest,
        "format": info.format,
        "rank": info.rank,
        "scale": info.scale,
        "targets": list(info.targets),
        "invocation_tokens": list(info.invocation),
        "reward_model": bool(info.score_head),
        "size_bytes": info.nbytes,
        "memory_bytes": info.memory_bytes,
        "created": int(entry.created),
        "pinned": entry.pinned,
        "resident": info.digest in resident,
        **msgspec.to_builtins(entry.counters),
    }


async def listing(front: Front) -> dict[str, Any]:
    """Return all adapters: first the current version of each name that was read, then the names that were not.

    A current version comes with the numbers of all versions of its name.
    """
    await front.client.refresh()
    registry, stats = front.models.registry, front.client.stats
    resident = frozenset(stats.resident_adapters)
    read = [
        describe(e, resident) | {"versions": [v.ref.version for v in registry.versions(e.name)]}
        for e in registry.entries()
    ]
    unread: list[dict[str, Any]] = [
        {"name": n, "version": None, "path": s.path, "versions": []} for n, s in registry.unread()
    ]
    info = front.client.info
    slots = info.max_loras if info is not None else 0
    return {
        "adapters": read + unread,
        "registered": len(registry),
        "slots": slots,
        "resident": len(stats.resident_adapters),
        "loaded": stats.loaded_adapters,
        "loaded_bytes": stats.loaded_adapter_bytes,
        "slot_bytes": stats.adapter_slot_bytes,
        "evictions": stats.adapter_evictions,
    }


async def one(front: Front, model_id: str) -> dict[str, Any]:
    """Return the description of a version, or of a name or saved version that was not read yet.

    Raises NotFound (`adapter_not_found`).
    """
    registry = front.models.registry
    source = registry.source(model_id)
    if source is not None and not registry.is_read(model_id):
        return {"name": model_id, "version": None, "path": source.path, "versions": []}
    try:
        entry = registry.entry(model_id)
        await front.client.refresh()
        return describe(entry, front.client.stats.resident_adapters)
    except NotFound as e:
        shelved = front.models.shelved(model_id)
        if shelved is not None:
            name, _, number = model_id.partition("@")
            return {"name": name, "version": int(number), "id": model_id, "path": shelved.path}
        raise NotFound(e.message, param="name", code="adapter_not_found") from None


async def load(front: Front, body: AdapterBody) -> dict[str, Any]:
    """Load a folder, or go to a version that the name has. The next request under the name uses it.

    Raises InvalidRequest, Conflict, QuotaExceeded, and NotFound (`adapter_not_found`).
    """
    if body.version is not None:
        if body.path is not None:
            raise InvalidRequest("give either path or version", param="version")
        entry = front.models.stand_for(body.name, body.version, body.pin)
        return {"status": "current"} | describe(entry, front.client.stats.resident_adapters)
    entry = await front.models.load(body.name, front.models.source(body.name, body.path), body.pin)
    return {"status": "loaded"} | describe(entry, front.client.stats.resident_adapters)


async def unload(front: Front, name: str) -> dict[str, Any]:
    """Remove an adapter and all its versions."""
    refs = await front.models.unload(name)
    return {"status": "unloaded", "name": name, "versions": [r.version for r in refs]}


def describe_alias(front: ServerFront, name: str, arms: Sequence[AliasArm]) -> dict[str, Any]:
    """Return the description of an alias."""
    total = sum(a.weight for a in arms)
    return {
        "name": name,
        "arms": [
            {"adapter": a.adapter, "weight": a.weight, "share": a.weight / total} | msgspec.to_builtins(a.counters)
            for a in arms
        ],
        "ab_test": front.ab_tests.describe(name),
    }


def aliases(front: ServerFront) -> dict[str, Any]:
    """Return the descriptions of all aliases."""
    return {"aliases": [describe_alias(front, name, arms) for name, arms in front.models.aliases.items()]}


def one_alias(front: ServerFront, name: str) -> dict[str, Any]:
    """Return the description of one alias. Raises NotFound."""
    return describe_alias(front, name, front.models.aliases.arms(name))


async def put_alias(front: ServerFront, name: str, body: AliasBody) -> dict[str, Any]:
    """Create an alias, or replace the arms of one; an A/B test of other arms begins anew or ends."""
    return describe_alias(front, name, await front.ab_tests.put(name, body.arms, body.ab_test))


async def remove_alias(front: ServerFront, name: str) -> dict[str, Any]:
    """Remove an alias and its A/B test."""
    await front.ab_tests.remove(name)
    return {"status": "removed", "name": name}
