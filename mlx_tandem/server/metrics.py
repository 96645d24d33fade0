"""Counters of the front and their Prometheus form, with vLLM's names where one exists.

Plain numbers on one event loop: an observation is a bisection and two additions, because it is made for every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mlx_tandem.server.text_admission import WAITING_TEXT
from mlx_tandem.types import DiskStats, EngineStats

if TYPE_CHECKING:
    from mlx_tandem.server.front import Front

TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
E2E_BOUNDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0)


def hit_rate(stats: EngineStats) -> float:
    """Of the tokens of prompts that were looked up, the share that was found."""
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


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        pairs: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            pairs.append((bound, float(seen)))
        return pairs


class Metrics:
    """What the front has seen since it started."""

    def __init__(self) -> None:
        self.prompt_tokens: Counter[str] = Counter()  # by model: the base's id or a registered adapter's name
        self.generation_tokens: Counter[str] = Counter()
        self.finished: Counter[tuple[str, str]] = Counter()  # (model, reason)
        self.errors: Counter[str] = Counter()  # by code
        self.shutdown_clean = True  # until the drain cuts something off
        self.time_to_first_token = Histogram(TTFT_BOUNDS)
        self.inter_token = Histogram(ITL_BOUNDS)
        self.end_to_end = Histogram(E2E_BOUNDS)

    def render(self, front: Front) -> bytes:
        """The text of /metrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self, front))
        return generate_latest(registry)


class _Collector:
    def __init__(self, metrics: Metrics, front: Front):
        self._metrics = metrics
        self._front = front

    def collect(self) -> Iterator[Metric]:
        metrics, front = self._metrics, self._front
        base = front.models.id
        stats, load = front.client.stats, front.client.load
        # Labels come from fixed sets: an adapter that is gone is counted under "other".
        known = {base} | {e.name for e in front.models.registry.entries()}

        def gauge(name: str, text: str, value: float, model: bool = True) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, text, labels=["model_name"] if model else [])
            family.add_metric([base] if model else [], value)
            return family

        def counter(name: str, text: str, by_model: Counter[str]) -> CounterMetricFamily:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            merged: Counter[str] = Counter({base: 0})
            for model, value in by_model.items():
                merged[model if model in known else "other"] += value
            for model, value in merged.items():
                family.add_metric([model], value)
            return family

        def histogram(name: str, text: str, values: Histogram) -> HistogramMetricFamily:
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([base], buckets=values.buckets(), sum_value=values.total)
            return family

        blocks = load.used_blocks + load.free_blocks
        usage = load.used_blocks / blocks if blocks else 0.0
        yield gauge("vllm:num_requests_running", "Requests in the running batch.", load.running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait to be run.", load.waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", usage)
        yield gauge("vllm:gpu_cache_usage_perc", "The same under its older name.", usage)
        yield counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", metrics.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", metrics.generation_tokens)
        yield self._successes(known)
        preempted = CounterMetricFamily("vllm:num_preemptions", "Sequences preempted.", labels=["model_name"])
        preempted.add_metric([base], stats.preemptions)
        yield preempted
        for name, text, total in (
            ("queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ):
            for place in ("vllm:prefix_cache_", "vllm:gpu_prefix_cache_"):  # the second is the older name
                family = CounterMetricFamily(place + name, text, labels=["model_name"])
                family.add_metric([base], total)
                yield family
        yield histogram("vllm:time_to_first_token_seconds", "Until the first token.", metrics.time_to_first_token)
        yield histogram("vllm:inter_token_latency_seconds", "Between tokens.", metrics.inter_token)
        yield histogram("vllm:time_per_output_token_seconds", "The same, older name.", metrics.inter_token)
        yield histogram("vllm:e2e_request_latency_seconds", "Until the last token.", metrics.end_to_end)
        yield from self._arms()
        errors = CounterMetricFamily("tandem_errors", "Requests that ended with an error.", labels=["code"])
        for code, value in metrics.errors.items():
            errors.add_metric([code], value)
        yield errors
        refused = CounterMetricFamily("tandem_refused", "Requests not let in, by the setting.", labels=["reason"])
        for setting in ("max_concurrent_requests", "max_queue_size", "memory_pressure_threshold", WAITING_TEXT):
            refused.add_metric([setting], front.admission.refused[setting])
        yield refused
        opened = front.admission.open_requests
        yield gauge("tandem_open_requests", "Requests admitted and not ended.", opened, model=False)
        yield gauge("tandem_adapters", "Adapter names registered.", len(front.models.registry), model=False)
        yield gauge("tandem_engine_ready", "1 while requests are taken.", front.client.state == "ready", model=False)
        yield gauge("tandem_step_milliseconds", "Moving average of a step.", stats.step_ms, model=False)
        yield gauge("tandem_active_memory_bytes", "Device memory in use.", stats.active_memory, model=False)
        budget = front.client.info.memory.total if front.client.info is not None else 0
        yield gauge("tandem_memory_budget_bytes", "Device memory divided at start.", budget, model=False)
        yield gauge("tandem_cached_blocks", "Blocks that a prompt may find.", stats.cached_blocks, model=False)
        yield gauge("tandem_peak_memory_bytes", "Highest device memory in use.", stats.peak_memory, model=False)
        yield gauge("tandem_kept_memory_bytes", "Freed arrays kept for the next.", stats.kept_memory, model=False)
        yield gauge("tandem_compiled_steps", "Compiled steps in memory.", stats.compiled_steps, model=False)
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
            from mlx_tandem.server.learning_metrics import families

            yield from families(front.learning)

        # The names that mlx-lm-server gives them.
        yield gauge("active_sequences", "Requests in the running batch.", load.running, model=False)
        yield gauge("queued_requests", "Requests that wait to be run.", load.waiting, model=False)
        yield gauge("used_blocks", "Blocks of the KV pool in use.", load.used_blocks, model=False)
        yield gauge("free_blocks", "Blocks of the KV pool that are free.", load.free_blocks, model=False)
        yield gauge("cache_hit_rate", "Share of prompt tokens found computed.", hit_rate(stats), model=False)
        yield gauge("dist_fatal", "Always 0: there is one machine.", 0.0, model=False)
        yield gauge("shutdown_clean", "0 once the drain has cut requests off.", metrics.shutdown_clean, model=False)

    def _successes(self, known: set[str]) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "vllm:request_success", "Choices that finished.", labels=["model_name", "finished_reason"]
        )
        merged: Counter[tuple[str, str]] = Counter()
        for (model, reason), value in self._metrics.finished.items():
            merged[model if model in known else "other", reason] += value
        for labels, value in merged.items():
            family.add_metric(list(labels), value)
        return family

    def _arms(self) -> Iterator[Metric]:
        """What the arms of aliases did: mean time is seconds over requests."""
        labels = ["alias", "arm"]
        families = {
            "requests": CounterMetricFamily("tandem_alias_requests", "Requests by arm of an alias.", labels=labels),
            "prompt_tokens": CounterMetricFamily("tandem_alias_prompt_tokens", "Prompt tokens by arm.", labels=labels),
            "generated_tokens": CounterMetricFamily("tandem_alias_generated_tokens", "Tokens by arm.", labels=labels),
            "errors": CounterMetricFamily("tandem_alias_errors", "Errors by arm.", labels=labels),
            "seconds": CounterMetricFamily("tandem_alias_seconds", "Time of requests by arm.", labels=labels),
        }
        for alias, arms in self._front.models.aliases.items():
            for arm in arms:
                for field, family in families.items():
                    family.add_metric([alias, arm.adapter], getattr(arm.counters, field))
        yield from families.values()
