"""The text of /metrics, which uses vLLM's names where they exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.engine.client.wakeable_engine import ACCEPTING
from mlx_tandem.generation.caller import Caller
from mlx_tandem.generation.metrics import OTHER
from mlx_tandem.generation.text_admission import WAITING_TEXT
from mlx_tandem.server import learning_metrics, vllm_metrics
from mlx_tandem.server.receiving import RECEIVING
from mlx_tandem.training.ab.running import State
from mlx_tandem.types import DiskStats, EngineStats

LABELLED_MODELS = 1000
"""Most model names, and most arms of aliases, with series of their own. OTHER counts all further ones."""


def render(front: ServerFront, callers: Sequence[Caller] = ()) -> bytes:
    """Return the text of /metrics, with series of their own for `callers`, whose keys have names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(front, callers))
    return generate_latest(registry)


def hit_rate(stats: EngineStats) -> float:
    """Return the share of the prompt tokens looked up in the prefix cache that were found there, 0 to 1."""
    return stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0


def _disk_families(stats: EngineStats, disk: DiskStats) -> Iterator[Metric]:
    """Yield the families of KV offload."""
    for name, text, total in (
        ("hits", "Blocks read from the drive.", disk.hits),
        ("misses", "Reads that ended at a block that was not there or not right.", disk.misses),
        ("hit_tokens", "Prompt tokens that came from the drive.", stats.disk_hit_tokens),
        ("reload_bytes", "Bytes of the blocks read.", disk.reload_bytes),
        ("reload_seconds", "Time spent reading and checking them.", disk.reload_seconds),
        ("written", "Blocks written.", disk.written),
        ("written_bytes", "Bytes written.", disk.written_bytes),
        ("dropped", "Blocks that were to be written and were not.", disk.dropped),
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
        ("off", "1 when the offload has been turned off.", bool(disk.off)),
    ):
        gauge = GaugeMetricFamily(f"tandem_disk_cache_{name}", text)
        gauge.add_metric([], value)
        yield gauge


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """Return a gauge without labels."""
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def _error_families(front: ServerFront) -> Iterator[Metric]:
    """Yield the counts of errors, error replies and refusals."""
    errors = CounterMetricFamily("tandem_errors", "Requests that ended with an error.", labels=["code"])
    for code, value in front.metrics.errors.items():
        errors.add_metric([code], value)
    yield errors
    replies = CounterMetricFamily("tandem_error_replies", "HTTP error replies.", labels=["status", "code"])
    for (status, code), value in sorted(front.metrics.error_replies.items()):
        replies.add_metric([str(status), code], value)
    yield replies
    refused = CounterMetricFamily("tandem_refused", "Requests not let in, by the setting or limit.", labels=["reason"])
    for setting in (
        "max_concurrent_requests",
        "max_queue_size",
        "memory_pressure_threshold",
        "open_images",
        WAITING_TEXT,
        RECEIVING,
    ):
        refused.add_metric([setting], front.request_admission.refused[setting])
    yield refused


def _engine_families(front: ServerFront) -> Iterator[Metric]:
    """Yield the families of the front and the engine under this project's own names."""
    stats = front.client.stats
    yield _gauge("tandem_open_requests", "Requests admitted and not ended.", front.request_admission.open_requests)
    yield _gauge("tandem_adapters", "Adapter names registered.", len(front.models.registry))
    yield _gauge("tandem_engine_ready", "1 while requests are taken.", front.client.state in ACCEPTING)
    yield _gauge(
        "tandem_engine_idle", "1 while the engine is unloaded until the next request.", front.client.state == "idle"
    )
    yield _gauge("tandem_step_milliseconds", "Moving average of a step.", stats.step_ms)
    yield _gauge("tandem_active_memory_bytes", "Device memory in use.", stats.active_memory)
    budget = front.client.info.memory.total if front.client.info is not None else 0
    yield _gauge("tandem_memory_budget_bytes", "Device memory divided at start.", budget)
    yield _gauge("tandem_cached_blocks", "Blocks that a prompt may find.", stats.cached_blocks)
    yield _gauge("tandem_peak_memory_bytes", "Highest device memory in use.", stats.peak_memory)
    yield _gauge("tandem_kept_memory_bytes", "Freed arrays kept for the next.", stats.kept_memory)
    yield _gauge("tandem_compiled_steps", "Compiled steps in memory.", stats.compiled_steps)
    cache = front.images.cache
    yield _gauge("tandem_kept_image_bytes", "Processed images kept for later turns.", cache.nbytes)
    for name, text, total in (
        ("tandem_kept_image_hits", "Images of requests that were found processed.", cache.hits),
        ("tandem_kept_image_misses", "Images of requests that had to be processed.", cache.misses),
        ("tandem_engine_restarts", "Engines started again after a death.", front.client.restarts),
        ("tandem_engine_unloads", "Times that the engine was unloaded for lack of use.", front.client.unloads),
        ("tandem_prefix_cache_evictions", "Blocks of the prefix cache given to others.", stats.prefix_evictions),
        ("tandem_steps", "Steps run.", stats.steps),
        ("tandem_step_failures", "Steps that failed.", stats.step_failures),
        ("tandem_rows", "Rows of all steps.", stats.rows),
        ("tandem_lora_rows", "Rows that ran under an adapter.", stats.lora_rows),
    ):
        family = CounterMetricFamily(name, text)
        family.add_metric([], total)
        yield family
    if stats.speculation is not None:
        drafted = CounterMetricFamily("tandem_drafts", "Draft tokens by where they came from.", labels=["source"])
        text = "Draft tokens that were accepted, by where they came from."
        accepted = CounterMetricFamily("tandem_accepted_drafts", text, labels=["source"])
        for counts in stats.speculation.sources:
            drafted.add_metric([counts.source], counts.drafted)
            accepted.add_metric([counts.source], counts.accepted)
        yield from (drafted, accepted)


def _mlx_lm_server_families(front: ServerFront) -> Iterator[Metric]:
    """Yield the families under the names that mlx-lm-server gives them."""
    stats, occupancy = front.client.stats, front.client.occupancy
    yield _gauge("active_sequences", "Requests in the running batch.", occupancy.running)
    yield _gauge("queued_requests", "Requests that wait to be run.", occupancy.waiting)
    yield _gauge("used_blocks", "Blocks of the KV pool in use.", occupancy.used_blocks)
    yield _gauge("free_blocks", "Blocks of the KV pool that are free.", occupancy.free_blocks)
    yield _gauge("cache_hit_rate", "Share of prompt tokens found computed.", hit_rate(stats))
    fatal = front.config.engine.parallel.ranks > 1 and front.client.state in ("restarting", "dead")
    yield _gauge("dist_fatal", "1 from the end of a group of ranks until another one serves.", float(fatal))
    yield _gauge("shutdown_clean", "0 once the drain has cut requests off.", front.metrics.shutdown_clean)


class _Collector:
    """A Prometheus collector that makes all families anew for each scrape."""

    def __init__(self, front: ServerFront, callers: Sequence[Caller]):
        self._front = front
        self._callers = callers

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        front, stats = self._front, self._front.client.stats
        # The values of labels come from bounded sets: adapters that are gone are counted under OTHER.
        names = islice((e.name for e in front.models.registry.entries()), LABELLED_MODELS)
        front.metrics.fold({front.models.id, *names})
        yield from vllm_metrics.families(front)
        yield from self._arms()
        yield from _test_families(front)
        yield from _error_families(front)
        yield from _engine_families(front)
        if stats.disk is not None:
            yield from _disk_families(stats, stats.disk)
        if front.learning is not None:
            yield from learning_metrics.families(tuple(front.learning))
        if front.tinker is not None:
            yield from learning_metrics.tinker_families(front.tinker)
        yield from _mlx_lm_server_families(front)
        if self._callers:
            yield from _key_families(self._callers)

    def _arms(self) -> Iterator[Metric]:
        """Yield the counters of the arms of aliases. The mean time of a request is seconds over requests."""
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


def _key_families(callers: Sequence[Caller]) -> Iterator[Metric]:
    """Yield the counters of each key that the file of keys names. Keys beyond the first LABELLED_MODELS have none."""
    labels, shown = ["key", "tenant"], callers[:LABELLED_MODELS]
    for field, text in (
        ("requests", "Requests by key."),
        ("prompt_tokens", "Prompt tokens by key."),
        ("generated_tokens", "Tokens of answers by key."),
    ):
        family = CounterMetricFamily(f"tandem_key_{field}", text, labels=labels)
        for caller in shown:
            family.add_metric([caller.name, caller.tenant], getattr(caller.use, field))
        yield family
    opened = GaugeMetricFamily("tandem_key_open_requests", "Open requests by key.", labels=labels)
    refused = CounterMetricFamily("tandem_key_refused", "Requests over a key's limit.", labels=[*labels, "limit"])
    for caller in shown:
        opened.add_metric([caller.name, caller.tenant], caller.use.open_requests)
        for limit, count in caller.use.refused.items():
            refused.add_metric([caller.name, caller.tenant, limit], count)
    yield from (opened, refused)


def _test_families(front: ServerFront) -> Iterator[Metric]:
    """Yield the families of A/B tests. Arms beyond the first LABELLED_MODELS have no series."""
    tests = list(front.ab_tests)
    states = GaugeMetricFamily("tandem_ab_tests", "A/B tests of aliases by their state.", labels=["state"])
    for state in get_args(State):
        states.add_metric([state], sum(front.ab_tests.state(test) == state for test in tests))
    yield states
    labels = ["alias", "arm"]
    answers = CounterMetricFamily("tandem_ab_test_answers", "Scored answers that count by arm.", labels=labels)
    means = GaugeMetricFamily("tandem_ab_test_mean_score", "Mean score of these answers.", labels=labels)
    evidence = GaugeMetricFamily(
        "tandem_ab_test_evidence",
        "Evidence that an arm is better, or worse, than the control; 1 at the beginning.",
        labels=[*labels, "of"],
    )
    arms = islice(((test, arm.adapter) for test in tests for arm in test.arms), LABELLED_MODELS)
    for test, arm in arms:
        own, challenger = test.scores[arm], test.challengers.get(arm)
        answers.add_metric([test.alias, arm], own.answers)
        if own.mean is not None:
            means.add_metric([test.alias, arm], own.mean)
        if challenger is not None:
            evidence.add_metric([test.alias, arm, "better"], challenger.comparison.gain.wealth)
            evidence.add_metric([test.alias, arm, "worse"], challenger.comparison.harm.wealth)
    yield from (answers, means, evidence)
