"""How many series `/metrics` has, whatever names come and go, and that no counter of it ever decreases."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem import demo
from mlx_tandem.adapters.aliases import Aliases
from mlx_tandem.adapters.registry import Registry
from mlx_tandem.config import Arm, Config, EngineConfig, ModelConfig
from mlx_tandem.generation.metrics import OTHER, Metrics
from mlx_tandem.server.prometheus import LABELLED_MODELS, render
from mlx_tandem.training.live.front import ServerFront
from mlx_tandem.types import AdapterInfo

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


@settings(max_examples=60, deadline=None)
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
