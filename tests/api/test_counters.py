"""Counters agree with each other and with what has just happened: read right after an answer, they have all of it.

The engine's own reports are farther apart than these tests are long, so nothing comes by waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from mlx_tandem import demo
from mlx_tandem.config import SpeculationConfig
from tests.serving import RunningServer, demo_config, serving

REPEATED = "Say this again, word for word: one two three, one two three, one two three, one two three. "


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    base, drafts = demo_config(), SpeculationConfig("draft", str(demo.DRAFT_PATH), num_tokens=3, dynamic=False)
    with serving(replace(base, engine=replace(base.engine, heartbeat_seconds=20.0, speculation=drafts))) as running:
        yield running


def scraped(server: RunningServer) -> dict[str, float]:
    """The sum of each family of /metrics over its series."""
    found: dict[str, float] = {}
    for line in server.client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def get(server: RunningServer, path: str) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get(path).json()
    return found


def drafts(server: RunningServer) -> dict[str, Any]:
    return get(server, "/v1/spec_decode/metrics")


@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": ["e"]}, {"n": 3, "temperature": 1.0}, {"model": "shout"}, {"stream": True}],
    ids=["whole", "a stop string", "three choices", "an adapter", "a stream"],
)
def test_what_is_read_right_after_an_answer_has_all_of_it(server: RunningServer, fields: dict[str, Any]) -> None:
    before = get(server, "/v1/engine/metrics")
    reply = server.complete(REPEATED, **{"model": "tandem-demo", "max_tokens": 12, "ignore_eos": True} | fields)
    assert reply.status_code == 200
    after, families, health = get(server, "/v1/engine/metrics"), scraped(server), get(server, "/health")
    engine = after["engine"]
    assert engine["running"] == engine["waiting"] == after["open_requests"] == health["open_requests"] == 0
    assert families["vllm:num_requests_running"] == families["active_sequences"] == 0
    assert families["tandem_open_requests"] == families["queued_requests"] == 0
    # A step that was in flight when a stop string ended the answer may be counted between two reads.
    assert before["engine"]["steps"] < engine["steps"] <= families["tandem_steps_total"]
    if "stop" not in fields:  # such a step gives its blocks back when it has landed
        assert engine["used_blocks"] == families["used_blocks"] == get(server, "/v1/cache/stats")["used_blocks"]
    assert get(server, "/debug/metrics")["batches_processed"] >= families["tandem_steps_total"]
    assert after["requests_completed"] == before["requests_completed"] + 1
    assert engine["prompt_tokens"] == after["prompt_tokens"] == families["vllm:prompt_tokens_total"]
    assert after["generated_tokens"] == families["vllm:generation_tokens_total"] > before["generated_tokens"]
    assert engine["generated_tokens"] >= after["generated_tokens"], "it may draw tokens behind a stop string"


def test_an_adapter_that_was_just_used_is_resident(server: RunningServer) -> None:
    assert server.complete("x", model="shout").status_code == 200
    assert get(server, "/v1/adapters/shout")["resident"]
    assert get(server, "/v1/adapters")["resident"] >= 1


def test_drafts_are_counted_where_they_come_from(server: RunningServer) -> None:
    """Copies are not the draft model's; the sums of all views are the same."""
    body = {"model": "tandem-demo", "messages": [{"role": "user", "content": "Count from 1 to 30."}], "temperature": 0}
    body |= {"max_tokens": 40, "ignore_eos": True}
    free = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    body["prediction"] = {"type": "content", "content": free[: len(free) // 2] + "!!" + free}
    before = drafts(server)
    details = server.client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens_details"]
    assert server.complete(REPEATED * 2, model="tandem-demo", temperature=0, max_tokens=40).status_code == 200
    after, families = drafts(server), scraped(server)
    copied, none = after["modes"]["prediction"], {"num_draft_tokens": 0, "num_accepted_tokens": 0}
    was = before["modes"].get("prediction", none)
    said = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert copied["num_draft_tokens"] - was["num_draft_tokens"] == sum(said) > 0
    assert copied["num_accepted_tokens"] - was["num_accepted_tokens"] == said[0]
    assert {"draft", "prediction"} <= after["modes"].keys() <= {"draft", "prediction", "ngram"}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        total = sum(own[name] for own in after["modes"].values())
        assert after[name] == total == families[f"vllm:spec_decode_{name}_total"] > before[name]
    for mode, own in after["modes"].items():
        assert families_of(server, mode) == (own["num_draft_tokens"], own["num_accepted_tokens"])
        assert after["mode_distribution"][mode] == own["num_drafts"]
        assert 0 <= own["acceptance_rate_ema"] <= 1
    assert after["mode_distribution"]["none"] > 0


def families_of(server: RunningServer, mode: str) -> tuple[float, ...]:
    """The drafts of one source and those that were accepted, of /metrics."""
    text = server.client.get("/metrics").text
    names = ("tandem_drafts_total", "tandem_accepted_drafts_total")
    return tuple(float(text.split(f'\n{name}{{source="{mode}"}} ')[1].split("\n")[0]) for name in names)


def test_the_minutes_and_the_present_number_of_drafts(server: RunningServer) -> None:
    assert server.complete(REPEATED, model="tandem-demo", max_tokens=12, temperature=0).status_code == 200
    found = drafts(server)
    assert 0 < found["controller"]["k"] <= found["controller"]["num_speculative_tokens"] == 3
    assert 0 < found["acceptance_rate_ema"] <= 1
    minutes = found["over_time"]
    assert [m["minutes_ago"] for m in minutes] == sorted({m["minutes_ago"] for m in minutes}, reverse=True)
    for mode, rows in found["mode_distribution"].items():
        assert sum(m["mode_distribution"].get(mode, 0) for m in minutes) == rows, "the server is younger than they are"
    assert sum(m["num_accepted_tokens"] for m in minutes) == found["num_accepted_tokens"]
