"""How many series `/metrics` has, whatever names come and go, and that no counter of it ever decreases."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem import demo
from mlx_tandem.adapters.aliases import Aliases
from mlx_tandem.adapters.registry import Registry
from mlx_tandem.config import ABTest, Arm, Config, EngineConfig, ModelConfig
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.engine.messages import Occupancy
from mlx_tandem.generation.metrics import OTHER, Metrics
from mlx_tandem.server import learning_metrics
from mlx_tandem.server.prometheus import LABELLED_MODELS, render
from mlx_tandem.training.ab.comparing import AliasTest
from mlx_tandem.training.atropos.feed import FeedStatus
from mlx_tandem.training.online.serving import Recorded
from mlx_tandem.training.verifiers.environment import Status
from mlx_tandem.types import AdapterInfo, DiskStats, EngineStats

CONFIG = Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH))))
NAMES = ("a", "b", "c", "d")


def never() -> NoReturn:
    raise AssertionError("no engine is started here")


@cache
def loaded() -> ServerFront:
    return ServerFront(CONFIG, never)


def empty() -> ServerFront:
    """A front that knows no adapter and has seen nothing; one at a time."""
    front = loaded()
    front.metrics, front.models.registry, front.models.aliases = Metrics(), Registry(), Aliases()
    return front


@pytest.fixture
def front() -> ServerFront:
    return empty()


def info(digest: str) -> AdapterInfo:
    return AdapterInfo(digest, 8, 2.0, "peft", ("self_attn.q_proj",), 64, 64)


def use(front: ServerFront, name: str, tokens: int) -> None:
    """Count as a finished request for `name` does."""
    front.metrics.prompt_tokens[name] += tokens
    front.metrics.generation_tokens[name] += tokens
    front.metrics.finished[name, "stop"] += 1


def scraped(front: ServerFront) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """By family and labels."""
    found: dict[str, dict[Any, float]] = {}
    for family in text_string_to_metric_families(render(front).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def by_model(found: dict[frozenset[tuple[str, str]], float]) -> Counter[str]:
    total: Counter[str] = Counter()
    for labels, value in found.items():
        total[dict(labels)["model_name"]] += int(value)
    return total


COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")


@pytest.mark.promise("H3")
def test_a_hundred_thousand_adapters_have_a_bounded_number_of_series(front: ServerFront) -> None:
    for i in range(100_000):
        front.models.registry.publish(f"adapter-{i}", None, info(f"{i:064x}"))
        use(front, f"adapter-{i}", 3)
    found = scraped(front)
    for name in COUNTERS[:2]:
        models = by_model(found[name])
        assert len(models) == LABELLED_MODELS + 2, "the base, as many adapters, and the others"
        assert models.total() == 300_000
        assert models["adapter-0"] == 3 and models[OTHER] == 3 * (100_000 - LABELLED_MODELS)
    assert by_model(found["vllm:request_success_total"]).total() == 100_000
    assert sum(map(len, found.values())) < 5 * LABELLED_MODELS
    assert len(front.metrics.prompt_tokens) <= LABELLED_MODELS + 2, "nor is more than that remembered"


def test_many_aliases_have_a_bounded_number_of_series(front: ServerFront) -> None:
    for i in range(3 * LABELLED_MODELS):
        for arm in front.models.aliases.put(f"alias-{i}", [Arm("base", 1.0), Arm("x", 1.0)]):
            arm.counters.requests += 2
    requests = scraped(front)["tandem_alias_requests_total"]
    assert len(requests) == LABELLED_MODELS + 1
    assert sum(requests.values()) == 12 * LABELLED_MODELS


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["use", "publish", "remove", "scrape"]), st.sampled_from(NAMES), st.integers(1, 9)),
        max_size=40,
    )
)
def test_no_counter_decreases_while_adapters_come_and_go(events: list[tuple[str, str, int]]) -> None:
    """What a removed adapter did is counted under OTHER for good, also when its name comes back. Requests may end
    after their adapter was removed."""
    front = empty()
    registry, used, before = front.models.registry, 0, {name: Counter[str]() for name in COUNTERS}
    for event, name, tokens in [*events, ("scrape", "", 0)]:
        if event == "use":
            use(front, name, tokens)
            used += tokens
        elif event == "publish":
            registry.publish(name, None, info(name))
        elif event == "remove" and name in registry:
            registry.remove(name)
        elif event == "scrape":
            found = scraped(front)
            known = {"base", OTHER, *(e.name for e in registry.entries())}
            for counter in COUNTERS:
                now = by_model(found[counter])
                assert set(now) <= known
                assert now[OTHER] >= before[counter][OTHER], "what others did is less than it was"
                before[counter] = now
            assert before[COUNTERS[0]].total() == before[COUNTERS[1]].total() == used


def alone(found: dict[str, dict[frozenset[tuple[str, str]], float]]) -> dict[str, float]:
    """The families that have one series, by name."""
    return {name: next(iter(series.values())) for name, series in found.items() if len(series) == 1}


def test_each_family_of_the_engine_has_its_own_number(front: ServerFront, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskStats(51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 6.5, False, False, "")
    stats = EngineStats(
        cached_blocks=11, prefix_queries=20, prefix_hits=5, prefix_evictions=12, steps=13, preemptions=14,
        step_failures=15, step_ms=1.5, peak_memory=16, active_memory=17, kept_memory=18, compiled_steps=19,
        lora_rows=21, rows=22, step_tokens_sum=23, disk=disk, disk_hit_tokens=24, disk_unsaved=25,
    )  # fmt: skip
    monkeypatch.setattr(front.client, "stats", stats)
    monkeypatch.setattr(
        front.client, "occupancy", Occupancy(running=31, waiting=32, used_blocks=30, free_blocks=10, deferred=33)
    )
    monkeypatch.setattr(front.client, "restarts", 41)
    monkeypatch.setattr(front.client, "unloads", 42)
    monkeypatch.setattr(front.client, "state", "idle")
    cache = front.images.cache
    cache.nbytes, cache.hits, cache.misses = 44, 45, 46
    expected = {
        "tandem_engine_restarts_total": 41, "tandem_engine_unloads_total": 42, "tandem_engine_ready": 1,
        "tandem_engine_idle": 1, "tandem_open_requests": 0, "tandem_adapters": 0,
        "tandem_steps_total": 13, "tandem_step_failures_total": 15, "tandem_step_milliseconds": 1.5,
        "tandem_rows_total": 22, "tandem_lora_rows_total": 21, "tandem_compiled_steps": 19,
        "tandem_cached_blocks": 11, "tandem_prefix_cache_evictions_total": 12,
        "tandem_peak_memory_bytes": 16, "tandem_active_memory_bytes": 17, "tandem_kept_memory_bytes": 18,
        "tandem_memory_budget_bytes": 0, "tandem_kept_image_bytes": 44, "tandem_kept_image_hits_total": 45,
        "tandem_kept_image_misses_total": 46,
        "vllm:num_requests_running": 31, "vllm:num_requests_waiting": 32, "vllm:num_preemptions_total": 14,
        "vllm:kv_cache_usage_perc": 0.75, "vllm:gpu_cache_usage_perc": 0.75,
        "vllm:prefix_cache_queries_total": 20, "vllm:prefix_cache_hits_total": 5,
        "vllm:gpu_prefix_cache_queries_total": 20, "vllm:gpu_prefix_cache_hits_total": 5,
        "active_sequences": 31, "queued_requests": 32, "used_blocks": 30, "free_blocks": 10, "cache_hit_rate": 0.25,
        "dist_fatal": 0, "shutdown_clean": 1,
        "tandem_disk_cache_bytes": 51, "tandem_disk_cache_blocks": 52, "tandem_disk_cache_queued": 54,
        "tandem_disk_cache_hits_total": 55, "tandem_disk_cache_misses_total": 56, "tandem_disk_cache_off": 0,
        "tandem_disk_cache_written_total": 57, "tandem_disk_cache_written_bytes_total": 58,
        "tandem_disk_cache_dropped_total": 59, "tandem_disk_cache_evicted_total": 60,
        "tandem_disk_cache_quarantined_total": 61, "tandem_disk_cache_errors_total": 62,
        "tandem_disk_cache_reload_bytes_total": 63, "tandem_disk_cache_reload_seconds_total": 6.5,
        "tandem_disk_cache_hit_tokens_total": 24,
    }  # fmt: skip
    found = alone(scraped(front))
    assert {name: found[name] for name in expected} == expected
    assert {n for n in found if n.startswith(("tandem_", "vllm:gpu"))} <= expected.keys(), "a family without its number"


def test_each_counter_of_an_arm_has_its_own_number(front: ServerFront) -> None:
    (arm,) = front.models.aliases.put("a", [Arm("base", 1)])
    numbers = {"requests": 1, "prompt_tokens": 2, "generated_tokens": 3, "errors": 4, "seconds": 0.5}
    for name, number in numbers.items():
        setattr(arm.counters, name, number)
    found = scraped(front)
    labels = frozenset({("alias", "a"), ("arm", "base")})
    assert {name: found[f"tandem_alias_{name}_total"][labels] for name in numbers} == numbers


def test_each_family_of_ab_tests_has_its_own_number(front: ServerFront) -> None:
    arms = (Arm("base", 1.0), Arm("x", 1.0))
    test = AliasTest.begin("1", "a", ABTest("base"), arms, (None, None), 0.0)
    for adapter, score in (("base", 0.25), ("x", 1.0), ("x", 0.5)):
        test.add(adapter, score, 0.0)
    front.ab_tests._tests["a"] = test
    found = scraped(front)
    by_arm = {arm: frozenset({("alias", "a"), ("arm", arm)}) for arm in ("base", "x")}
    assert found["tandem_ab_test_answers_total"] == {by_arm["base"]: 1.0, by_arm["x"]: 2.0}
    assert found["tandem_ab_test_mean_score"] == {by_arm["base"]: 0.25, by_arm["x"]: 0.75}
    evidence = found["tandem_ab_test_evidence"]
    assert evidence[by_arm["x"] | {("of", "better")}] > 1.0 > evidence[by_arm["x"] | {("of", "worse")}]
    states = {dict(labels)["state"]: count for labels, count in found["tandem_ab_tests"].items()}
    assert states == {"running": 0, "paused": 1, "promoted": 0, "taken_back": 0}, "there is no x"


def test_each_family_of_learning_has_its_own_number() -> None:
    status = SimpleNamespace(
        trajectories_collected=1, siblings_drawn=23, dropped_stale=2, dropped_duplicate=3, dropped_overflow=4,
        dropped_no_reward=21,
        open_trajectories=22, skipped_groups=5,
        publishes=6, rollbacks=7, checkpoint_saves=8, buffered=9, recovering=10, running=True, step=11, version=12,
        loss=0.1, mean_reward=0.2, kl=0.3, grad_norm=0.4, recorded_prompts=Recorded(130, 31, 32, 33, 34),
    )  # fmt: skip
    learner = SimpleNamespace(status=lambda: status, history=[], rewards=SimpleNamespace(failures={"raised": 13}))
    learning: Any = SimpleNamespace(
        learner=learner,
        stats=EngineStats(serving_ms=1500.0, training_ms=2500.0),
        swaps=14,
        updates_per_second=lambda: 0.5,
        outcomes=Counter(published=15),
        feed=SimpleNamespace(status=FeedStatus("", batches=24, trajectories=25, refused_groups=26)),
        environment=SimpleNamespace(
            status=Status("x", rounds=27, episodes=28, failed_episodes=29, trajectories=30, refused_groups=31)
        ),
    )

    def scraped(*each: Any) -> dict[tuple[str, ...], float]:
        families = learning_metrics.families(each)
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    found = scraped(learning)
    assert found == {
        ("tandem_training_trajectories_total",): 1,
        ("tandem_training_siblings_total",): 23,
        ("tandem_training_trajectories_dropped_total", "stale"): 2,
        ("tandem_training_trajectories_dropped_total", "duplicate"): 3,
        ("tandem_training_trajectories_dropped_total", "overflow"): 4,
        ("tandem_training_trajectories_dropped_total", "no_reward"): 21,
        ("tandem_training_groups_skipped_total",): 5,
        ("tandem_training_updates_total", "published"): 15,
        ("tandem_training_reward_failures_total", "raised"): 13,
        ("tandem_training_recorded_prompts", "new"): 31,
        ("tandem_training_recorded_prompts", "solved"): 32,
        ("tandem_training_recorded_prompts", "hopeless"): 33,
        ("tandem_training_recorded_prompts", "between"): 34,
        ("tandem_training_atropos_batches_total",): 24,
        ("tandem_training_atropos_trajectories_total",): 25,
        ("tandem_training_atropos_refused_groups_total",): 26,
        ("tandem_training_environment_rounds_total",): 27,
        ("tandem_training_environment_episodes_total",): 28,
        ("tandem_training_environment_failed_episodes_total",): 29,
        ("tandem_training_environment_trajectories_total",): 30,
        ("tandem_training_environment_refused_groups_total",): 31,
        ("tandem_training_publishes_total",): 6,
        ("tandem_training_rollbacks_total",): 7,
        ("tandem_training_checkpoint_saves_total",): 8,
        ("tandem_training_swaps_total",): 14,
        ("tandem_training_device_seconds_total",): 2.5,
        ("tandem_serving_device_seconds_total",): 1.5,
        ("tandem_training_buffered",): 9,
        ("tandem_training_recovering",): 10,
        ("tandem_training_running",): 1,
        ("tandem_training_diverged",): 0,
        ("tandem_training_step",): 11,
        ("tandem_training_version",): 12,
        ("tandem_training_loss",): 0.1,
        ("tandem_training_mean_reward",): 0.2,
        ("tandem_training_kl",): 0.3,
        ("tandem_training_grad_norm",): 0.4,
        ("tandem_training_updates_per_second",): 0.5,
        ("mlx_parallm_rl_trajectories_collected",): 1,
        ("mlx_parallm_rl_training_loss",): 0.1,
        ("mlx_parallm_rl_updates_per_second",): 0.5,
        ("mlx_parallm_lora_swaps_total",): 14,
        ("mlx_parallm_checkpoint_saves_total",): 8,
    }
    learning.name = "policy"
    other = SimpleNamespace(**{**vars(learning), "name": "coder", "swaps": 15})
    of_engine = {key: found.pop(key) for key in list(found) if key[0].endswith("_device_seconds_total")}
    both = scraped(learning, other)
    assert len(of_engine) == 2 and of_engine.items() <= both.items(), "the engine's own have no label"
    expected = {
        (name, adapter, *rest): value for (name, *rest), value in found.items() for adapter in ("policy", "coder")
    }
    swaps = {(name, "coder"): 15.0 for name in ("tandem_training_swaps_total", "mlx_parallm_lora_swaps_total")}
    assert both == of_engine | expected | swaps
