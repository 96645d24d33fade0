"""The body of /v1/overview: the state, counters and gauges of a server, for readers that ask once a second.

Its size does not depend on how many adapters there are.
"""

from __future__ import annotations

import time
from typing import Any

from mlx_tandem import __version__
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.engine.histogram import Histogram
from mlx_tandem.server.health import disk_stats, status
from mlx_tandem.server.prometheus import hit_rate
from mlx_tandem.types import EngineInfo, MemoryBudget

PARTS = ("weights", "pool", "adapter_slots", "learning", "activations")
"""The parts of the device's memory that are given out at start, as `MemoryBudget` names them."""


def overview(front: ServerFront) -> dict[str, Any]:
    """Return the state of the server, its counters since the start, and its gauges."""
    client, metrics, admission = front.client, front.metrics, front.request_admission
    info, stats, occupancy = client.info, client.stats, client.occupancy
    now = time.time()
    return {
        "time": now,
        "status": status(front),
        "version": __version__,
        "model": front.models.id,
        "uptime_s": round(now - front.started, 3),
        "engine_restarts": client.restarts,
        "progress": client.progress._asdict() if client.state in ("starting", "restarting", "waking") else None,
        "engine": None if info is None else _engine(front, info),
        "requests": {
            "open": admission.open_requests,
            "running": occupancy.running,
            "waiting": occupancy.waiting,
            "completed": metrics.completed,
            "refused": sum(admission.refused.values()),
            "failed": sum(count for (_, reason), count in metrics.finished.items() if reason == "error"),
        },
        "tokens": {"prompt": stats.prompt_tokens, "generated": stats.generated_tokens},
        "latency": {
            "time_to_first_token": _histogram(metrics.time_to_first_token),
            "inter_token": _histogram(metrics.inter_token),
        },
        "cache": _cache(front),
        "disk_cache": disk_stats(front),
        "memory": _memory(front),
        "adapters": {
            "registered": len(front.models.registry),
            "slots": 0 if info is None else info.max_loras,
            "resident": len(stats.resident_adapters),
            "loaded": stats.loaded_adapters,
            "loaded_bytes": stats.loaded_adapter_bytes,
        },
        "learning": front.learning is not None,
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """Return a histogram: the upper bounds, how many values lie under each and above the last, and their sum."""
    return {"bounds": histogram.bounds, "counts": histogram.counts, "sum": histogram.total}


def _engine(front: ServerFront, info: EngineInfo) -> dict[str, Any]:
    """Return what the model and its device are."""
    return {
        "model_type": info.model_type,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "device": info.device,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "images": front.reads_images,
    }


def _cache(front: ServerFront) -> dict[str, Any]:
    """Return how full the KV pool is, and how much of prompts was found in it."""
    info, stats, occupancy = front.client.info, front.client.stats, front.client.occupancy
    return {
        "block_size": 0 if info is None else info.block_size,
        "blocks": occupancy.used_blocks + occupancy.free_blocks,
        "used_blocks": occupancy.used_blocks,
        "cached_blocks": stats.cached_blocks,
        "queried_tokens": stats.prefix_queries,
        "hit_tokens": stats.prefix_hits,
        "hit_rate": round(hit_rate(stats), 4),
    }


def _memory(front: ServerFront) -> dict[str, Any]:
    """Return the device's memory in bytes: what is in use, and what each part was given at start."""
    info, stats = front.client.info, front.client.stats
    budget = MemoryBudget() if info is None else info.memory
    return {
        "limit": budget.limit,
        "budget": budget.total,
        "active": stats.active_memory,
        "peak": stats.peak_memory,
        "kept": stats.kept_memory,
        "parts": {part: getattr(budget, part) for part in PARTS},
    }
