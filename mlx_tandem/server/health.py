"""Whether the server can answer, and what it serves."""

from __future__ import annotations

from typing import Any

import msgspec

from mlx_tandem import __version__
from mlx_tandem.server.front import Front


def health(front: Front) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of /health: 200 while requests are taken, else 503 with the reason."""
    client = front.client
    body: dict[str, Any] = {
        "status": "ok" if client.state == "ready" else client.state,
        "version": __version__,
        "model": front.model_id,
        "adapters_loaded": len(front.registry),
        "open_requests": front.open_requests,
        "engine_restarts": client.restarts,
    }
    if client.state == "ready" and client.info is not None:
        body["engine"] = msgspec.to_builtins(client.info)
        return 200, body
    if client.state in ("starting", "restarting"):
        body["progress"] = {"stage": client.progress.stage, "fraction": client.progress.fraction}
    if client.failure is not None:
        body["error"] = client.failure.message
    return 503, body


def engine_metrics(front: Front) -> dict[str, Any]:
    """/v1/engine/metrics: the engine's counters and gauges, and what each adapter version did."""
    metrics = front.metrics
    return {
        "state": front.client.state,
        "restarts": front.client.restarts,
        "open_requests": front.open_requests,
        "max_queue_size": front.config.server.max_queue_size,
        "engine": msgspec.to_builtins(front.client.stats),
        "prompt_tokens": sum(metrics.prompt_tokens.values()),
        "generated_tokens": sum(metrics.generation_tokens.values()),
        "finished": {reason: _by_reason(front, reason) for reason in ("stop", "length", "abort", "error")},
        "adapters": {
            v.ref.label: msgspec.to_builtins(v.counters)
            for e in front.registry.entries()
            for v in front.registry.versions(e.name)
        },
    }


def _by_reason(front: Front, reason: str) -> int:
    return sum(count for (_, r), count in front.metrics.finished.items() if r == reason)
