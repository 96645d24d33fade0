"""The part of /metrics with vLLM's names, labels, bounds and meanings, for dashboards made for vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mlx_tandem.engine.histogram import STEP_TOKENS, Histogram
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.metrics import REQUESTS
from mlx_tandem.types import SpeculationStats

ENGINE = "0"
"""The value of the label `engine` in every series, as there is one engine."""

ADAPTER_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
"""The labels of `lora_requests_info`: the slots of the device, and two lists of names between commas."""

NAMED = 1000
"""Most adapters that a label names."""


def families(front: Front) -> Iterator[Metric]:
    """Yield all families. Counts by model have the model's name, and all others but `_adapters` have the base's."""
    base, stats, occupancy, metrics = front.models.id, front.client.stats, front.client.occupancy, front.metrics
    blocks = occupancy.used_blocks + occupancy.free_blocks
    usage = occupancy.used_blocks / blocks if blocks else 0.0
    for name, text, value in (
        ("num_requests_running", "Choices in the running batch.", occupancy.running),
        ("num_requests_waiting", "Choices that wait to be run.", occupancy.waiting),
        ("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", usage),
        ("gpu_cache_usage_perc", "The same under its older name.", usage),
    ):
        yield _gauge(name, text, [], [((base,), value)])
    waiting = {(base, "capacity"): occupancy.waiting - occupancy.deferred, (base, "deferred"): occupancy.deferred}
    text = "Choices that wait for room in the batch (capacity), or for their adapter to be read (deferred)."
    yield _gauge("num_requests_waiting_by_reason", text, ["reason"], waiting.items())
    for name, text, tokens in (
        ("prompt_tokens", "Prompt tokens of admitted requests.", metrics.prompt_tokens),
        ("generation_tokens", "Tokens generated.", metrics.generation_tokens),
    ):
        yield _counter(name, text, [], (((model,), value) for model, value in {base: 0, **tokens}.items()))
    ended = {(base, reason): 0 for reason in ("stop", "length", "abort", "error")} | dict(metrics.finished)
    yield _counter("request_success", "Choices that ended.", ["finished_reason"], ended.items())
    for name, text, total in (
        ("num_preemptions", "Sequences preempted.", stats.preemptions),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ("gpu_prefix_cache_queries", "The same as prefix_cache_queries, under its older name.", stats.prefix_queries),
        ("gpu_prefix_cache_hits", "The same as prefix_cache_hits, under its older name.", stats.prefix_hits),
    ):
        yield _counter(name, text, [], [((base,), total)])
    if stats.speculation is not None:
        yield from _speculation(base, stats.speculation)
    steps = Histogram(STEP_TOKENS, stats.step_tokens, stats.step_tokens_sum)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "Until the first token.", metrics.time_to_first_token),
        ("inter_token_latency_seconds", "Between tokens.", metrics.inter_token),
        ("time_per_output_token_seconds", "The same under its older name.", metrics.inter_token),
        ("e2e_request_latency_seconds", "Until the last token.", metrics.end_to_end),
        ("iteration_tokens_total", "Tokens that a step computed.", steps),
        *((name, text, metrics.requests[name]) for name, (text, _) in REQUESTS.items()),
    ):
        family = HistogramMetricFamily("vllm:" + name, text, labels=["model_name", "engine"])
        family.add_metric([base, ENGINE], buckets=histogram.buckets(), sum_value=histogram.total)
        yield family
    yield _adapters(front)
    settings = _cache_settings(front)
    yield _gauge("cache_config_info", "Settings of the KV cache.", list(settings), [((base, *settings.values()), 1)])


def _adapters(front: Front) -> GaugeMetricFamily:
    """Return the adapters in use, by which the Gateway API Inference Extension routes.

    It has vLLM's labels, and no others; the value is the time in seconds since the epoch. At most NAMED adapters of
    each list are named.
    """
    text = "Adapters whose requests run and adapters whose requests only wait; the value is the time."
    family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=list(ADAPTER_LABELS))
    lists = (",".join(sorted(names)[:NAMED]) for names in front.client.adapters_in_use())
    family.add_metric([str(front.config.engine.lora.max_loras), *lists], time.time())
    return family


def _speculation(base: str, stats: SpeculationStats) -> Iterator[Metric]:
    """Yield the families of drafts."""
    for name, text, total in (
        ("spec_decode_num_drafts", "Rows that verified drafts.", stats.rows),
        ("spec_decode_num_draft_tokens", "Draft tokens.", stats.drafted),
        ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", stats.accepted),
    ):
        yield _counter(name, text, [], [((base,), total)])
    places = [((base, str(n)), count) for n, count in enumerate(stats.by_position) if count]
    text = "Rows whose draft at this position was accepted."
    yield _counter("spec_decode_num_accepted_tokens_per_pos", text, ["position"], places)


def _gauge(
    name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    """Return a gauge with a series for each entry of `values`: the model and the values of `labels`, then the value."""
    family = GaugeMetricFamily("vllm:" + name, text, labels=["model_name", "engine", *labels])
    for (model, *own), value in values:
        family.add_metric([model, ENGINE, *own], value)
    return family


def _counter(
    name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    """Return a counter with a series for each entry of `values`, which are those of `_gauge`."""
    family = CounterMetricFamily("vllm:" + name, text, labels=["model_name", "engine", *labels])
    for (model, *own), value in values:
        family.add_metric([model, ENGINE, *own], value)
    return family


def _cache_settings(front: Front) -> dict[str, str]:
    """Return the labels of `cache_config_info`. Those that only an engine knows are missing while there is none."""
    cache, info = front.config.engine.cache, front.client.info
    settings: dict[str, object] = {
        "enable_prefix_caching": cache.prefix_caching,
        "gpu_memory_utilization": cache.memory_fraction,
        "num_gpu_blocks_override": cache.num_blocks or None,
    }
    if info is not None:
        windows = [pool.window for pool in info.memory.pools if pool.window]
        settings |= {
            "block_size": info.block_size,
            "cache_dtype": info.dtype if info.kv_bits > 8 else f"int{info.kv_bits}",
            "kv_cache_size_tokens": (info.num_blocks - 1) * info.block_size,  # One block is scratch.
            "num_gpu_blocks": info.num_blocks - 1,
            "sliding_window": min(windows, default=None),
        }
    return {name: str(value) for name, value in settings.items()}
