"""`/v1/adapters` and `/v1/aliases`: what is known and loaded, and changing it while serving; vLLM's two routes, too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from mlx_tandem.adapters.aliases import AliasArm
from mlx_tandem.adapters.registry import Entry
from mlx_tandem.config import Arm
from mlx_tandem.errors import InvalidRequest, NotFound, renamed
from mlx_tandem.training.live.front import ServerFront


class AdapterBody(Struct, forbid_unknown_fields=True):
    name: str
    path: str | None = None  # under the adapter root; absent: the folder that the name is known by
    pin: bool = False


class AliasBody(Struct, forbid_unknown_fields=True):
    arms: list[Arm]


class VllmLoadBody(Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str | None = None
    load_inplace: bool = False
    base_model_name: str | None = None


class VllmUnloadBody(Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None


def describe(entry: Entry, resident: Collection[str]) -> dict[str, Any]:
    """One adapter version as clients see it; `resident` are the digests in slots."""
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
        "size_bytes": info.nbytes,
        "memory_bytes": info.memory_bytes,
        "created": int(entry.created),
        "pinned": entry.pinned,
        "resident": info.digest in resident,
        **msgspec.to_builtins(entry.counters),
    }


def listing(front: ServerFront) -> dict[str, Any]:
    """Current versions, each with the numbers of all versions of its name; then names that were never asked for."""
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


def one(front: ServerFront, selector: str) -> dict[str, Any]:
    """One version, or a name, or a version in a checkpoint, that was never asked for."""
    registry = front.models.registry
    source = registry.source(selector)
    if source is not None and not registry.is_read(selector):
        return {"name": selector, "version": None, "path": source.path, "versions": []}
    try:
        return describe(registry.entry(selector), front.client.stats.resident_adapters)
    except NotFound as e:
        shelved = front.models.shelved(selector)
        if shelved is not None:
            name, _, number = selector.partition("@")
            return {"name": name, "version": int(number), "id": selector, "path": shelved.path}
        raise NotFound(e.message, param="name", code="adapter_not_found") from None


async def load(front: ServerFront, body: AdapterBody) -> dict[str, Any]:
    """Under a name that exists this publishes a new version: the name stands for it from the next request on."""
    entry = await front.models.load(body.name, front.models.source(body.name, body.path), body.pin)
    return {"status": "loaded"} | describe(entry, front.client.stats.resident_adapters)


async def unload(front: ServerFront, name: str) -> dict[str, Any]:
    refs = await front.models.unload(name)
    return {"status": "unloaded", "name": name, "versions": [r.version for r in refs]}


async def vllm_load(front: ServerFront, body: VllmLoadBody) -> str:
    """vLLM refuses a name that is loaded unless `load_inplace` says that it shall be replaced."""
    models = front.models

    def check() -> None:
        if models.registry.is_read(body.lora_name) and not body.load_inplace:
            raise InvalidRequest(
                f"the LoRA adapter {body.lora_name!r} has already been loaded; set load_inplace to replace it",
                param="lora_name",
            )

    with renamed(name="lora_name", path="lora_path"):
        await models.load(body.lora_name, models.source(body.lora_name, body.lora_path), check=check)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


async def vllm_unload(front: ServerFront, body: VllmUnloadBody) -> str:
    with renamed(name="lora_name"):
        await front.models.unload(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def describe_alias(name: str, arms: Sequence[AliasArm]) -> dict[str, Any]:
    total = sum(a.weight for a in arms)
    return {
        "name": name,
        "arms": [
            {"adapter": a.adapter, "weight": a.weight, "share": a.weight / total} | msgspec.to_builtins(a.counters)
            for a in arms
        ],
    }


def aliases(front: ServerFront) -> dict[str, Any]:
    return {"aliases": [describe_alias(name, arms) for name, arms in front.models.aliases.items()]}


def one_alias(front: ServerFront, name: str) -> dict[str, Any]:
    return describe_alias(name, front.models.aliases.arms(name))


async def put_alias(front: ServerFront, name: str, body: AliasBody) -> dict[str, Any]:
    return describe_alias(name, await front.models.put_alias(name, body.arms))


def remove_alias(front: ServerFront, name: str) -> dict[str, Any]:
    front.models.aliases.remove(name)
    return {"status": "removed", "name": name}
