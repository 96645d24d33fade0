"""The part of /metrics that dashboards of vLLM read: its names, labels, bounds and meanings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mlx_tandem.engine.histogram import STEP_TOKENS, Histogram

if TYPE_CHECKING:
    from mlx_tandem.server.front import Front
    from mlx_tandem.server.metrics import Metrics

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
ITL_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
SECONDS_BOUNDS = (
    *(0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS_BOUNDS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
CHOICES_BOUNDS = (1, 2, 5, 10, 20, 50, 100)
PREEMPTIONS_BOUNDS = (0, 1, 2, 3, 4, 5, 10, 20)
"""All of these are vLLM's bounds and finer ones below, for machines that are quick because their models are small."""

REQUESTS: dict[str, tuple[str, Sequence[float]]] = {
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS_BOUNDS),
    "request_generation_tokens": ("Tokens of a choice.", TOKENS_BOUNDS),
    "request_max_num_generation_tokens": ("Tokens of the longest choice of a request.", TOKENS_BOUNDS),
    "request_params_max_tokens": ("max_tokens of a request.", TOKENS_BOUNDS),
    "request_params_n": ("n of a request.", CHOICES_BOUNDS),
    "request_num_preemptions": ("Times that a sequence of a request was preempted.", PREEMPTIONS_BOUNDS),
    "request_queue_time_seconds": ("Until the first tokens of a request were computed.", SECONDS_BOUNDS),
    "request_prefill_time_seconds": ("From then until its first token was drawn.", SECONDS_BOUNDS),
    "request_decode_time_seconds": ("From then until its last token was drawn.", SECONDS_BOUNDS),
    "request_inference_time_seconds": ("Prefill and decode together.", SECONDS_BOUNDS),
}
"""vLLM's histograms of finished requests: what each says, and its bounds."""

ENGINE = "0"
"""The label `engine` of every series: there is one engine."""


def families(metrics: Metrics, front: Front) -> Iterator[Metric]:
    """Yield every family. Counts by model have the model's name, all others the base's."""
    base, stats, load = front.models.id, front.client.stats, front.client.load
    blocks = load.used_blocks + load.free_blocks
    usage = load.used_blocks / blocks if blocks else 0.0
    for name, text, value in (
        ("num_requests_running", "Choices in the running batch.", load.running),
        ("num_requests_waiting", "Choices that wait to be run.", load.waiting),
        ("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", usage),
        ("gpu_cache_usage_perc", "The same under its older name.", usage),
    ):
        yield _gauge(name, text, [], [((base,), value)])
    waiting = {(base, "capacity"): load.waiting - load.deferred, (base, "deferred"): load.deferred}
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
    settings = _cache_settings(front)
    yield _gauge("cache_config_info", "Settings of the KV cache.", list(settings), [((base, *settings.values()), 1)])


def _gauge(
    name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    """Return a family with a series for each model and value of the further `labels`."""
    family = GaugeMetricFamily("vllm:" + name, text, labels=["model_name", "engine", *labels])
    for (model, *own), value in values:
        family.add_metric([model, ENGINE, *own], value)
    return family


def _counter(
    name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    """Return a family with a series for each model and value of the further `labels`."""
    family = CounterMetricFamily("vllm:" + name, text, labels=["model_name", "engine", *labels])
    for (model, *own), value in values:
        family.add_metric([model, ENGINE, *own], value)
    return family


def _cache_settings(front: Front) -> dict[str, str]:
    """Return labels of `cache_config_info`; those that only an engine knows are missing while there is none."""
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
            "kv_cache_size_tokens": (info.num_blocks - 1) * info.block_size,  # one block is scratch
            "num_gpu_blocks": info.num_blocks - 1,
            "sliding_window": min(windows, default=None),
        }
    return {name: str(value) for name, value in settings.items()}
