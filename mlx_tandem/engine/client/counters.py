"""Counters that go on where those of an earlier engine ended, so that no counter of the server goes backwards."""

from __future__ import annotations

from itertools import zip_longest
from typing import TypeVar

from msgspec import Struct, structs

from mlx_tandem.types import DraftCounts, EngineStats, SpeculationStats

T = TypeVar("T", bound=Struct)

ENGINE = (
    "prefix_queries", "prefix_hits", "prefix_evictions", "steps", "prompt_tokens", "generated_tokens", "preemptions",
    "step_failures", "adapter_evictions", "lora_rows", "rows", "serving_ms", "training_ms", "step_tokens",
    "step_tokens_sum", "batch_fill", "disk_hit_tokens", "disk_unsaved",
)  # fmt: skip
"""The fields of EngineStats that count since start. All others say what holds now."""

DISK = (
    "hits", "misses", "written", "written_bytes", "dropped", "evicted", "quarantined", "errors", "reload_bytes",
    "reload_seconds",
)  # fmt: skip
"""The fields of DiskStats that count since start."""

SPECULATION = ("rows", "drafted", "accepted", "by_position", "undrafted")
"""The fields of SpeculationStats that count since start, besides `sources`."""

DRAFTS = ("rows", "drafted", "accepted")
"""The fields of DraftCounts that count since start."""


def added(now: EngineStats, before: EngineStats) -> EngineStats:
    """Return the statistics `now` of an engine with its counters increased by those of the engines before it."""
    disk, speculation = now.disk or before.disk, now.speculation or before.speculation
    if now.disk is not None and before.disk is not None:
        disk = _added(now.disk, before.disk, DISK)
    if now.speculation is not None and before.speculation is not None:
        speculation = _with_sources(now.speculation, before.speculation)
    return structs.replace(_added(now, before, ENGINE), disk=disk, speculation=speculation)


def _with_sources(now: SpeculationStats, before: SpeculationStats) -> SpeculationStats:
    """Return the statistics of drafts with all counters added up."""
    found: dict[str, DraftCounts] = {counts.source: counts for counts in before.sources}
    for counts in now.sources:
        known = found.get(counts.source)
        found[counts.source] = counts if known is None else _added(counts, known, DRAFTS)
    return structs.replace(_added(now, before, SPECULATION), sources=tuple(found.values()))


def _added(now: T, before: T, fields: tuple[str, ...]) -> T:
    """Return `now` with the values of `before` added to these fields. Tuples are added number by number."""
    sums = {}
    for name in fields:
        one, other = getattr(now, name), getattr(before, name)
        if isinstance(one, tuple):
            sums[name] = tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
        else:
            sums[name] = one + other
    return structs.replace(now, **sums)
