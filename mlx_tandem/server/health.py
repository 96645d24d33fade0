"""The bodies of /health and of the endpoints with counters for people and scripts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import structs

from mlx_tandem import __version__
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.engine.histogram import FILL_PARTS
from mlx_tandem.server.prometheus import hit_rate
from mlx_tandem.types import DraftCounts, SpeculationStats

DEGRADED = 0.72
"""Share of the memory pressure threshold from which on the server counts as degraded."""


def status(front: ServerFront) -> str:
    """Return `ok`, `degraded`, `idle` or `waking` while requests are accepted, else the reason why they are not."""
    if front.client.state != "ready":
        return "shutting_down" if front.client.state == "draining" else front.client.state
    pressure = front.request_admission.utilization / front.config.server.memory_pressure_threshold
    return "overloaded" if pressure >= 1 else "degraded" if pressure >= DEGRADED else "ok"


def health(front: ServerFront, lost: str = "") -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body of /health. The status is 200 while requests are accepted, else 503.

    `lost` says what is wrong with the folder to which learning writes; empty: nothing.
    """
    client = front.client
    state = status(front)
    if lost and state == "ok":
        state = "degraded"
    body: dict[str, Any] = {
        "status": state,
        "version": __version__,
        "model": front.models.id,
        "adapters_loaded": len(front.models.registry),
        "open_requests": front.request_admission.open_requests,
        "utilization": round(front.request_admission.utilization, 4),
        "threshold": front.config.server.memory_pressure_threshold,
        "engine_restarts": client.restarts,
        "engine_unloads": client.unloads,
    }
    if client.state == "ready" and client.info is not None:
        body["engine"] = msgspec.to_builtins(client.info)
        body["memory"] = {
            "budget": client.info.memory.total,
            "active": client.stats.active_memory,
            "peak": client.stats.peak_memory,
        }
    if client.state in ("starting", "waking", "restarting"):
        body["progress"] = client.progress._asdict()
    if lost:
        body["learning_error"] = lost
    if client.failure is not None:
        body["error"] = client.failure.message
    return 200 if state in ("ok", "degraded", "idle", "waking") else 503, body


def engine_metrics(front: ServerFront) -> dict[str, Any]:
    """Return the body of /v1/engine/metrics: the counters of the engine, the front and each adapter version."""
    metrics = front.metrics
    return {
        "state": front.client.state,
        "restarts": front.client.restarts,
        "unloads": front.client.unloads,
        "open_requests": front.request_admission.open_requests,
        "open_choices": front.request_admission.open_choices,
        "held_requests": front.request_admission.held,
        "refused": dict(front.request_admission.refused),
        "max_queue_size": front.config.server.max_queue_size,
        "engine": structs.asdict(front.client.occupancy) | msgspec.to_builtins(front.client.stats),
        "prompt_tokens": sum(metrics.prompt_tokens.values()),
        "generated_tokens": sum(metrics.generation_tokens.values()),
        "total_tokens_generated": sum(metrics.generation_tokens.values()),  # MOLA's names of these two
        "requests_completed": metrics.completed,
        "finished": {reason: _by_reason(front, reason) for reason in ("stop", "length", "abort", "error")},
        "adapters": {
            v.ref.label: msgspec.to_builtins(v.counters)
            for e in front.models.registry.entries()
            for v in front.models.registry.versions(e.name)
        },
    }


def debug_metrics(front: ServerFront) -> dict[str, Any]:
    """Return the body of MLX ParaLLM's /debug/metrics, in which the engine's steps are the batches.

    Average tokens per second refer to the device time spent on requests, and those of the last step to its own time.
    Prompt tokens that did not have to be computed count only in the total.
    """
    client = front.client
    stats, info = client.stats, client.info
    seats = stats.steps * info.max_num_seqs if info is not None else 0
    seconds = stats.serving_ms / 1e3
    return {
        "batches_processed": stats.steps,
        "avg_batch_fill_pct": 100 * stats.rows / seats if seats else 0.0,
        "batch_fill_hist": stats.batch_fill or (0,) * FILL_PARTS,
        "queue_depth_last": client.occupancy.waiting,
        "stream_batches_processed": stats.steps,  # Streams are rows of the same batches.
        "prompt_tps_avg": (stats.prompt_tokens - stats.prefix_hits) / seconds if seconds else 0.0,
        "prompt_tps_last": stats.prompt_tokens_per_s,
        "decode_tps_avg": stats.generated_tokens / seconds if seconds else 0.0,
        "decode_tps_last": stats.decode_tokens_per_s,
        "prompt_tokens_total": stats.prompt_tokens,
        "decode_tokens_total": stats.generated_tokens,
    }


def cache_stats(front: ServerFront) -> dict[str, Any]:
    """Return the body of /v1/cache/stats: the use of the KV pool, and the share of prompts found in it."""
    client = front.client
    info, stats, occupancy = client.check_ready(), client.stats, client.occupancy
    return {
        "enabled": front.config.engine.cache.prefix_caching,
        "block_size": info.block_size,
        "blocks": info.num_blocks - 1,  # One block is scratch.
        "used_blocks": occupancy.used_blocks,
        "cached_blocks": stats.cached_blocks,
        "queried_tokens": stats.prefix_queries,
        "hit_tokens": stats.prefix_hits,
        "hit_rate": round(hit_rate(stats), 4),
        "evicted_blocks": stats.prefix_evictions,
        "disk": disk_stats(front),
    }


def speculation_stats(front: ServerFront) -> dict[str, Any]:
    """Return the body of /v1/spec_decode/metrics: accepted drafts by source and by minute, and the present decision."""
    config, found = front.config.engine.speculation, front.client.stats.speculation
    stats = found or SpeculationStats(config.method)
    return {
        "enabled": config.method != "none",
        "mode": config.method,
        **_acceptance(stats),
        "mode_distribution": _distribution(stats.sources, stats.undrafted),
        "modes": {counts.source: _acceptance(counts) for counts in stats.sources},
        "over_time": [
            {
                "minutes_ago": minute.minutes_ago,
                "mode_distribution": _distribution(minute.sources, minute.undrafted),
                "num_draft_tokens": sum(counts.drafted for counts in minute.sources),
                "num_accepted_tokens": sum(counts.accepted for counts in minute.sources),
            }
            for minute in stats.minutes
        ],
        "controller": {
            "dynamic": config.dynamic,
            "num_speculative_tokens": config.num_tokens,
            "k": round(stats.per_row, 2),
            "disable_batch_size": config.disable_batch_size,
            "uses_drafts": stats.uses_drafts,
            "tokens_per_s_with": round(stats.tokens_per_s_with, 1),
            "tokens_per_s_without": round(stats.tokens_per_s_without, 1),
        },
    }


def _acceptance(counts: SpeculationStats | DraftCounts) -> dict[str, Any]:
    """Return the counts of drafts with the shares that were accepted."""
    return {
        "num_drafts": counts.rows,
        "num_draft_tokens": counts.drafted,
        "num_accepted_tokens": counts.accepted,
        "acceptance_rate": round(counts.accepted / counts.drafted, 4) if counts.drafted else 0.0,
        "acceptance_rate_ema": round(counts.recent_acceptance, 4),
        "avg_accepted_tokens": round(counts.accepted / counts.rows, 4) if counts.rows else 0.0,
    }


def _distribution(sources: Iterable[DraftCounts], undrafted: int) -> dict[str, int]:
    """Return the rows that decoded, by the source of their drafts, with "none" for those without."""
    rows: dict[str, int] = {counts.source: counts.rows for counts in sources}
    return rows | {"none": undrafted} if undrafted else rows


def disk_stats(front: ServerFront) -> dict[str, Any]:
    """Return the counters of KV offload, and whether it is in use."""
    config, stats = front.config.engine.disk, front.client.stats
    shown: dict[str, Any] = {"enabled": config.on, "open": stats.disk is not None}
    if (disk := stats.disk) is not None:
        shown |= {
            "policy": config.policy,
            "hit_tokens": stats.disk_hit_tokens,
            "unsaved_blocks": stats.disk_unsaved,
            **msgspec.to_builtins(disk),
            "reload_gb_per_s": round(disk.reload_bytes / disk.reload_seconds / 1e9, 3) if disk.reload_seconds else 0.0,
        }
    return shown


def _by_reason(front: ServerFront, reason: str) -> int:
    """Return the number of choices of all models that ended for `reason`."""
    return sum(count for (_, r), count in front.metrics.finished.items() if r == reason)
