"""Counters of the front and their Prometheus form, with vLLM's names where one exists.

Plain numbers on one event loop: an observation is a bisection and two additions, because it is made for every token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_tandem.engine.histogram import Histogram
from mlx_tandem.errors import CODES, TandemError
from mlx_tandem.server import vllm_metrics
from mlx_tandem.server.text_admission import WAITING_TEXT
from mlx_tandem.server.vllm_metrics import ITL_BOUNDS, REQUESTS, SECONDS_BOUNDS, TTFT_BOUNDS
from mlx_tandem.types import DiskStats, EngineStats

if TYPE_CHECKING:
    from mlx_tandem.server.front import Front

LABELLED_MODELS = 1000
"""Names of models, and arms of aliases, that have series of their own; what the others do is counted under OTHER."""
OTHER = "other"


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


class Metrics:
    """What the front has seen since it started."""

    def __init__(self) -> None:
        self.prompt_tokens: Counter[str] = Counter()  # by model: the base's id or a registered adapter's name
        self.generation_tokens: Counter[str] = Counter()
        self.finished: Counter[tuple[str, str]] = Counter()  # choices by (model, reason)
        self.completed = 0  # requests of which every choice has come to its end
        self.errors: Counter[str] = Counter()  # by code
        self.error_replies: Counter[tuple[int, str]] = Counter()  # (HTTP status, code)
        self.shutdown_clean = True  # until the drain cuts something off
        self.time_to_first_token = Histogram(TTFT_BOUNDS)
        self.inter_token = Histogram(ITL_BOUNDS)
        self.end_to_end = Histogram(SECONDS_BOUNDS)
        self.requests = {name: Histogram(bounds) for name, (_, bounds) in REQUESTS.items()}

    def finish(
        self,
        prompts: Sequence[int],
        choices: Sequence[int],
        *,
        max_tokens: int,
        n: int,
        preemptions: int,
        times: tuple[float, float | None, float, float],
    ) -> None:
        """Count a request that has come to its end.

        prompts, choices: tokens of each; times: when it came, when its first row was planned (None: not known), and
        when its first and its last token came, in seconds of the monotonic clock.
        """
        self.completed += 1
        observe = {name: histogram.observe for name, histogram in self.requests.items()}
        for tokens in prompts:
            observe["request_prompt_tokens"](tokens)
        for tokens in choices:
            observe["request_generation_tokens"](tokens)
        observe["request_max_num_generation_tokens"](max(choices))
        observe["request_params_max_tokens"](max_tokens)
        observe["request_params_n"](n)
        observe["request_num_preemptions"](preemptions)
        came, started, first, last = times
        observe["request_decode_time_seconds"](last - first)
        if started is not None:
            observe["request_queue_time_seconds"](max(started - came, 0.0))
            observe["request_prefill_time_seconds"](max(first - started, 0.0))
            observe["request_inference_time_seconds"](max(last - started, 0.0))

    def fold(self, known: Collection[str]) -> None:
        """Count what models other than `known` did under OTHER from now on, so that no counter ever decreases."""
        for by_model in (self.prompt_tokens, self.generation_tokens):
            for model in [m for m in by_model if m not in known and m != OTHER]:
                by_model[OTHER] += by_model.pop(model)
        for model, reason in [key for key in self.finished if key[0] not in known and key[0] != OTHER]:
            self.finished[OTHER, reason] += self.finished.pop((model, reason))

    def count_error(self, error: TandemError, *, in_stream: bool = False) -> None:
        """Count what a request ended with: an error reply, or the last event of a stream."""
        code = error.code if error.code in CODES else "other"
        self.errors[code] += 1
        if not in_stream:
            self.error_replies[error.status, code] += 1

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
        stats, load = front.client.stats, front.client.load
        # Labels come from bounded sets: an adapter that is gone is counted under OTHER.
        metrics.fold({front.models.id, *islice((e.name for e in front.models.registry.entries()), LABELLED_MODELS)})

        def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, text)
            family.add_metric([], value)
            return family

        yield from vllm_metrics.families(metrics, front)
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
            from mlx_tandem.server.learning_metrics import families

            yield from families(front.learning)

        # The names that mlx-lm-server gives them.
        yield gauge("active_sequences", "Requests in the running batch.", load.running)
        yield gauge("queued_requests", "Requests that wait to be run.", load.waiting)
        yield gauge("used_blocks", "Blocks of the KV pool in use.", load.used_blocks)
        yield gauge("free_blocks", "Blocks of the KV pool that are free.", load.free_blocks)
        yield gauge("cache_hit_rate", "Share of prompt tokens found computed.", hit_rate(stats))
        yield gauge("dist_fatal", "Always 0: there is one machine.", 0.0)
        yield gauge("shutdown_clean", "0 once the drain has cut requests off.", metrics.shutdown_clean)

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
        arms = [arm for _, own in self._front.models.aliases.items() for arm in own]
        shown, rest = arms[:LABELLED_MODELS], arms[LABELLED_MODELS:]
        for field, family in families.items():
            for arm in shown:
                family.add_metric([arm.alias, arm.adapter], getattr(arm.counters, field))
            if rest:
                family.add_metric([OTHER, OTHER], sum(getattr(arm.counters, field) for arm in rest))
            yield family
