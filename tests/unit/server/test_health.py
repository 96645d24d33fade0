"""The bodies of /health and of the endpoints with counters: what each state tells, and each counter under its name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs, to_builtins

from mlx_tandem import demo
from mlx_tandem.adapters.registry import Registry
from mlx_tandem.config import Config, EngineConfig, ModelConfig
from mlx_tandem.dialects.adapters.handlers import listing
from mlx_tandem.engine.client.start_times import StartProgress
from mlx_tandem.engine.messages import Occupancy
from mlx_tandem.errors import EngineDied
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.server.health import cache_stats, debug_metrics, engine_metrics, health, speculation_stats
from mlx_tandem.types import DiskStats, DraftCounts, DraftMinute, EngineStats, SpeculationStats
from tests.api.scripted import INFO

DISK = DiskStats(51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63_000_000_000, 6.5, False, False, "")
STATS = EngineStats(
    cached_blocks=11, prefix_queries=20, prefix_hits=5, prefix_evictions=12, active_memory=17, peak_memory=16,
    disk_hit_tokens=24, disk_unsaved=25,
)  # fmt: skip


def front(state: str = "ready", used: int = 0, **changes: Any) -> Any:
    """A front whose parts have numbers that no other has. `used` is the share of the pool in use, in percent."""

    async def refresh() -> None: ...

    client = SimpleNamespace(
        refresh=refresh,
        state=state,
        info=INFO if state == "ready" else None,
        stats=STATS,
        occupancy=Occupancy(31, 32, 30, 10),
        restarts=2,
        unloads=9,
        progress=StartProgress("weights", 0.25, 1.5, None),
        failure=None,
        check_ready=lambda: INFO,
    )
    admission = SimpleNamespace(
        open_requests=7, open_choices=8, held=4, utilization=used / 100, refused={"max_queue_size": 3}
    )
    found = SimpleNamespace(
        client=client,
        request_admission=admission,
        config=Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH)))),
        models=SimpleNamespace(id="base", registry=[1, 2, 3]),
    )
    for name, value in changes.items():
        setattr(client, name, value)
    return found


@pytest.mark.parametrize(
    ("state", "told", "members"),
    [
        ("starting", "starting", {"progress"}),
        ("restarting", "restarting", {"progress"}),
        ("ready", "ok", {"engine", "memory"}),
        ("idle", "idle", set()),
        ("waking", "waking", {"progress"}),
        ("draining", "shutting_down", set()),
        ("dead", "dead", set()),
    ],
)
def test_what_each_state_tells(state: str, told: str, members: set[str]) -> None:
    status, body = health(front(state))
    assert (status, body["status"]) == (200 if state in ("ready", "idle", "waking") else 503, told)
    assert {"progress", "engine", "memory", "error"} & body.keys() == members
    assert (body["model"], body["adapters_loaded"], body["open_requests"], body["engine_restarts"]) == ("base", 3, 7, 2)
    assert body["engine_unloads"] == 9
    if "progress" in members:
        assert body["progress"] == {"stage": "weights", "fraction": 0.25, "elapsed_s": 1.5, "left_s": None}
    failed = health(front(state, failure=EngineDied("it died")))[1]
    assert failed == body | {"error": "it died"}, "also while the next engine starts"


@pytest.mark.parametrize(("used", "told"), [(35, "ok"), (36, "degraded"), (49, "degraded"), (50, "overloaded")])
def test_pressure_is_told_from_its_bounds_on(used: int, told: str) -> None:
    """The bounds are shares of the threshold, which is half of the pool here."""
    found = front(used=used)
    server = structs.replace(found.config.server, memory_pressure_threshold=0.5)
    found.config = structs.replace(found.config, server=server)
    status, body = health(found)
    assert (status, body["status"]) == (200 if told != "overloaded" else 503, told)
    assert (body["utilization"], body["threshold"]) == (used / 100, 0.5)


def test_batches_of_the_debugging_page() -> None:
    stats = structs.replace(
        STATS, steps=10, rows=40, serving_ms=2000.0, prompt_tokens=105, generated_tokens=60, prompt_tokens_per_s=7.5,
        decode_tokens_per_s=8.5, batch_fill=(1, 2),
    )  # fmt: skip
    found = debug_metrics(front(stats=stats))
    assert found == {
        "batches_processed": 10, "avg_batch_fill_pct": 50.0, "batch_fill_hist": (1, 2), "queue_depth_last": 32,
        "stream_batches_processed": 10, "prompt_tps_avg": 50.0, "prompt_tps_last": 7.5, "decode_tps_avg": 30.0,
        "decode_tps_last": 8.5, "prompt_tokens_total": 105, "decode_tokens_total": 60,
    }  # fmt: skip
    none = debug_metrics(front(info=None))
    assert (none["avg_batch_fill_pct"], none["prompt_tps_avg"], none["decode_tps_avg"]) == (0.0, 0.0, 0.0)
    assert set(none["batch_fill_hist"]) == {0}


def test_memory_is_the_budget_and_what_the_device_has_told() -> None:
    info = structs.replace(INFO, memory=structs.replace(INFO.memory, weights=90, pool=9))
    assert health(front(info=info))[1]["memory"] == {"budget": 99, "active": 17, "peak": 16}


def test_nothing_is_told_of_an_engine_that_is_not_ready() -> None:
    assert not {"engine", "memory"} & health(front("draining", info=INFO))[1].keys()


def test_counters_of_the_pool() -> None:
    found = cache_stats(front())
    assert found.pop("disk") == {"enabled": False, "open": False}
    assert found == {
        "enabled": True, "block_size": 16, "blocks": 64, "used_blocks": 30, "cached_blocks": 11,
        "queried_tokens": 20, "hit_tokens": 5, "hit_rate": 0.25, "evicted_blocks": 12,
    }  # fmt: skip


def test_counters_of_the_drive() -> None:
    found = cache_stats(front(stats=structs.replace(STATS, disk=DISK)))["disk"]
    own = {"policy": "evict_only", "hit_tokens": 24, "unsaved_blocks": 25, "reload_gb_per_s": 9.692}
    assert found == {"enabled": False, "open": True} | own | to_builtins(DISK)
    unread = front(stats=structs.replace(STATS, disk=structs.replace(DISK, reload_seconds=0.0)))
    assert cache_stats(unread)["disk"]["reload_gb_per_s"] == 0.0


def test_counters_of_adapters() -> None:
    stats = structs.replace(
        STATS, resident_adapters=("a", "b"), loaded_adapters=3, loaded_adapter_bytes=4, adapter_slot_bytes=5,
        adapter_evictions=6,
    )  # fmt: skip
    asked = front(stats=stats)
    asked.models.registry = Registry()
    assert asyncio.run(listing(asked)) == {
        "adapters": [], "registered": 0, "slots": INFO.max_loras, "resident": 2, "loaded": 3, "loaded_bytes": 4,
        "slot_bytes": 5, "evictions": 6,
    }  # fmt: skip


def test_counters_of_drafts() -> None:
    drafts = SpeculationStats(
        "draft", 4, 20, 11, (4, 4, 3), 0.62506, sources=(DraftCounts("ngram", 1, 8, 5, 0.25),), undrafted=9,
        minutes=(DraftMinute(2, (DraftCounts("ngram", 1, 8, 5, 0.25),), 9),), per_row=4.256, uses_drafts=True,
        tokens_per_s_with=90.04, tokens_per_s_without=60.06,
    )  # fmt: skip
    found = speculation_stats(front(stats=structs.replace(STATS, speculation=drafts)))
    controller = found.pop("controller")
    assert found == {
        "enabled": False, "mode": "none", "num_drafts": 4, "num_draft_tokens": 20, "num_accepted_tokens": 11,
        "acceptance_rate": 0.55, "acceptance_rate_ema": 0.6251, "avg_accepted_tokens": 2.75,
        "mode_distribution": {"ngram": 1, "none": 9},
        "modes": {
            "ngram": {
                "num_drafts": 1, "num_draft_tokens": 8, "num_accepted_tokens": 5, "acceptance_rate": 0.625,
                "acceptance_rate_ema": 0.25, "avg_accepted_tokens": 5.0,
            },
        },
        "over_time": [
            {
                "minutes_ago": 2, "mode_distribution": {"ngram": 1, "none": 9}, "num_draft_tokens": 8,
                "num_accepted_tokens": 5,
            },
        ],
    }  # fmt: skip
    assert controller["k"] == 4.26
    assert (controller["uses_drafts"], controller["tokens_per_s_with"]) == (True, 90.0)
    assert controller["tokens_per_s_without"] == 60.1
    none = speculation_stats(front(stats=structs.replace(STATS, speculation=SpeculationStats("ngram"))))
    assert (none["acceptance_rate"], none["avg_accepted_tokens"], none["mode_distribution"]) == (0.0, 0.0, {})


def test_counters_of_the_front() -> None:
    asked = front()
    asked.metrics = metrics = Metrics()
    asked.models.registry = SimpleNamespace(entries=list, versions=None)
    metrics.completed = 9
    for name, tokens in (("base", 1), ("shout", 2)):
        metrics.prompt_tokens[name], metrics.generation_tokens[name] = 10 * tokens, 100 * tokens
        for reason, count in (("stop", 3), ("length", 4), ("abort", 5), ("error", 6)):
            metrics.finished[name, reason] = count
    found = engine_metrics(asked)
    assert found.pop("engine") == to_builtins(STATS) | {
        "running": 31, "waiting": 32, "used_blocks": 30, "free_blocks": 10, "deferred": 0,
    }  # fmt: skip

    assert found == {
        "state": "ready", "restarts": 2, "unloads": 9, "open_requests": 7, "open_choices": 8, "held_requests": 4,
        "refused": {"max_queue_size": 3}, "max_queue_size": asked.config.server.max_queue_size, "prompt_tokens": 30,
        "generated_tokens": 300, "total_tokens_generated": 300, "requests_completed": 9, "adapters": {},
        "finished": {"stop": 6, "length": 8, "abort": 10, "error": 12},
    }  # fmt: skip
