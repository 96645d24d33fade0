"""The text of /metrics, with vLLM's names where one exists."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_tandem.generation.metrics import OTHER
from mlx_tandem.generation.text_admission import WAITING_TEXT
from mlx_tandem.server import learning_metrics, vllm_metrics
from mlx_tandem.training.live.front import ServerFront
from mlx_tandem.types import DiskStats, EngineStats

LABELLED_MODELS = 1000
"""Names of models, and arms of aliases, that have series of their own; what the others do is counted under OTHER."""


def render(front: ServerFront) -> bytes:
    """Return the text of /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(front))
    return generate_latest(registry)


def hit_rate(stats: EngineStats) -> float:
    """Return the share of the prompt tokens that were looked up in the prefix cache and found there."""
    return stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0


def _disk_families(stats: EngineStats, disk: DiskStats) -> Iterator[Metric]:
    for name, text, total in (
        ("hits", "Blocks read from the drive.", disk.hits),
        ("misses", "Reads that ended at a block that was not there or not right.", disk.misses),
        ("hit_tokens", "Prompt tokens that came from the drive.", stats.disk_hit_tokens),
        ("reload_bytes", "Bytes of the blocks read.", disk.reload_bytes),
        ("reload_seconds", "Time spent reading and checking them.", disk.reload_seconds),
        ("written", "Blocks written.", disk.written),
        ("written_bytes", "Bytes written.", disk.written_bytes),
        ("dropped", "Blocks that were to be written and were not.", disk.dropped + stats.disk_unsaved),
        ("evicted", "Blocks that went with their segment.", disk.evicted),
        ("quarantined", "Records and segments that were not as written.", disk.quarantined),
        ("errors", "Operations that the drive refused.", disk.errors),
    ):
        family = CounterMetricFamily(f"tandem_disk_cache_{name}", text)
        family.add_metric([], total)
        yield family
    for name, text, value in (
        ("bytes", "Of all segments.", disk.bytes),
        ("blocks", "That a prompt may find on the drive.", disk.records),
        ("queued", "Blocks that wait to be written.", disk.queued),
        ("off", "1 when the tier has been turned off.", bool(disk.off)),
    ):
        gauge = GaugeMetricFamily(f"tandem_disk_cache_{name}", text)
        gauge.add_metric([], value)
        yield gauge


class _Collector:
    """Makes every family when it is asked for its metrics."""

    def __init__(self, front: ServerFront):
        self._front = front

    def collect(self) -> Iterator[Metric]:
        front = self._front
        metrics = front.metrics
        stats, load = front.client.stats, front.client.load
        # Labels come from bounded sets: an adapter that is gone is counted under OTHER.
        metrics.fold({front.models.id, *islice((e.name for e in front.models.registry.entries()), LABELLED_MODELS)})

        def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, text)
            family.add_metric([], value)
            return family

        yield from vllm_metrics.families(front)
        yield from self._arms()
        errors = CounterMetricFamily("tandem_errors", "Requests that ended with an error.", labels=["code"])
        for code, value in metrics.errors.items():
            errors.add_metric([code], value)
        yield errors
        replies = CounterMetricFamily("tandem_error_replies", "HTTP error replies.", labels=["status", "code"])
        for (status, code), value in sorted(metrics.error_replies.items()):
            replies.add_metric([str(status), code], value)
        yield replies
        refused = CounterMetricFamily("tandem_refused", "Requests not let in, by the setting.", labels=["reason"])
        for setting in ("max_concurrent_requests", "max_queue_size", "memory_pressure_threshold", WAITING_TEXT):
            refused.add_metric([setting], front.admission.refused[setting])
        yield refused
        opened = front.admission.open_requests
        yield gauge("tandem_open_requests", "Requests admitted and not ended.", opened)
        yield gauge("tandem_adapters", "Adapter names registered.", len(front.models.registry))
        yield gauge("tandem_engine_ready", "1 while requests are taken.", front.client.state == "ready")
        yield gauge("tandem_step_milliseconds", "Moving average of a step.", stats.step_ms)
        yield gauge("tandem_active_memory_bytes", "Device memory in use.", stats.active_memory)
        budget = front.client.info.memory.total if front.client.info is not None else 0
        yield gauge("tandem_memory_budget_bytes", "Device memory divided at start.", budget)
        yield gauge("tandem_cached_blocks", "Blocks that a prompt may find.", stats.cached_blocks)
        yield gauge("tandem_peak_memory_bytes", "Highest device memory in use.", stats.peak_memory)
        yield gauge("tandem_kept_memory_bytes", "Freed arrays kept for the next.", stats.kept_memory)
        yield gauge("tandem_compiled_steps", "Compiled steps in memory.", stats.compiled_steps)
        for name, text, total in (
            ("tandem_engine_restarts", "Engines started again after a death.", front.client.restarts),
            ("tandem_prefix_cache_evictions", "Blocks of the prefix cache given to others.", stats.prefix_evictions),
            ("tandem_steps", "Steps run by this engine.", stats.steps),
            ("tandem_step_failures", "Steps that failed.", stats.step_failures),
            ("tandem_rows", "Rows of all steps.", stats.rows),
            ("tandem_lora_rows", "Rows that ran under an adapter.", stats.lora_rows),
        ):
            family = CounterMetricFamily(name, text)
            family.add_metric([], total)
            yield family
        if stats.disk is not None:
            yield from _disk_families(stats, stats.disk)
        if front.learning is not None:
            yield from learning_metrics.families(front.learning)

        # The names that mlx-lm-server gives them.
        yield gauge("active_sequences", "Requests in the running batch.", load.running)
        yield gauge("queued_requests", "Requests that wait to be run.", load.waiting)
        yield gauge("used_blocks", "Blocks of the KV pool in use.", load.used_blocks)
        yield gauge("free_blocks", "Blocks of the KV pool that are free.", load.free_blocks)
        yield gauge("cache_hit_rate", "Share of prompt tokens found computed.", hit_rate(stats))
        yield gauge("dist_fatal", "Always 0: there is one machine.", 0.0)
        yield gauge("shutdown_clean", "0 once the drain has cut requests off.", metrics.shutdown_clean)

    def _arms(self) -> Iterator[Metric]:
        """Yield what the arms of aliases did: their mean time is seconds over requests."""
        labels = ["alias", "arm"]
        by_field = {
            "requests": CounterMetricFamily("tandem_alias_requests", "Requests by arm of an alias.", labels=labels),
            "prompt_tokens": CounterMetricFamily("tandem_alias_prompt_tokens", "Prompt tokens by arm.", labels=labels),
            "generated_tokens": CounterMetricFamily("tandem_alias_generated_tokens", "Tokens by arm.", labels=labels),
            "errors": CounterMetricFamily("tandem_alias_errors", "Errors by arm.", labels=labels),
            "seconds": CounterMetricFamily("tandem_alias_seconds", "Time of requests by arm.", labels=labels),
        }
        arms = [arm for _, own in self._front.models.aliases.items() for arm in own]
        shown, rest = arms[:LABELLED_MODELS], arms[LABELLED_MODELS:]
        for field, family in by_field.items():
            for arm in shown:
                family.add_metric([arm.alias, arm.adapter], getattr(arm.counters, field))
            if rest:
                family.add_metric([OTHER, OTHER], sum(getattr(arm.counters, field) for arm in rest))
            yield family
