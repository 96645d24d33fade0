"""The prefix cache over HTTP: what a reply, the counters and the metrics say of it, and that a name hides nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem import demo
from tests.api.learns import learning_config, trajectories
from tests.api.test_chat import events
from tests.serving import RunningServer, serving

LONG = "Sort these numbers: " + " ".join(str(n * 37 % 100) for n in range(40))


def cached(reply: dict) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_reply_says_what_of_its_prompt_was_there(server):
    question = f"{LONG} once"
    cold = server.chat(question, temperature=0).json()
    known = cached(cold)
    assert known < 32, "no more than how every chat begins"
    hit = server.chat(question, temperature=0).json()
    prompt = hit["usage"]["prompt_tokens"]
    assert prompt - 24 < cached(hit) < prompt
    assert hit["choices"][0]["message"] == cold["choices"][0]["message"]
    streamed = events(server.chat(question, temperature=0, stream=True, stream_options={"include_usage": True}, n=2))
    assert cached(streamed[-1]) == cached(hit)
    both = server.complete([LONG, LONG, "never seen"], temperature=0).json()
    again = server.complete([LONG, LONG, "never seen"], temperature=0).json()
    assert cached(both) < cached(again) < again["usage"]["prompt_tokens"]


def test_counters_and_metrics_agree(server):
    for _ in range(2):
        server.chat(f"{LONG} twice", temperature=0)
    stats: dict = {}
    while not stats.get("hit_tokens"):  # they come with the engine's next sign of life
        stats = server.client.get("/v1/cache/stats").json()
    assert stats["enabled"] is True
    assert stats["queried_tokens"] > stats["hit_tokens"]
    assert stats["hit_rate"] == round(stats["hit_tokens"] / stats["queried_tokens"], 4)
    assert 0 < stats["cached_blocks"] <= stats["blocks"]
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values["vllm:prefix_cache_hits_total"] >= stats["hit_tokens"]
    assert values["vllm:prefix_cache_queries_total"] >= stats["queried_tokens"]
    assert values["cache_hit_rate"] > 0


def test_an_adapter_that_is_loaded_again_under_its_name_answers_as_if_nothing_was_there(server):
    def ask(model: str) -> dict:
        return server.chat(f"{LONG} again", model=model, temperature=0).json()

    for path in ("shout", "down"):
        loaded = server.client.post("/v1/adapters", json={"name": "again", "path": str(demo.ADAPTER_PATHS[path])})
        assert loaded.status_code == 200, loaded.text
        first = ask("again")
        assert cached(first) == 0, "what was computed under another content was found"
        assert cached(ask("again")) > 0
        own = ask(path)
        assert cached(own) > 0, "the same content under another name"
        assert own["choices"][0]["message"] == first["choices"][0]["message"]
    server.client.delete("/v1/adapters/again")


@pytest.mark.promise("I8")
def test_a_version_that_is_published_while_its_prompt_is_cached_answers_as_a_server_without_a_cache(tmp_path: Path):
    config = learning_config(tmp_path, learning_rate=2e-2, guard_kl=50.0)

    def learn(server: RunningServer, name: str) -> None:
        body = {"trajectories": trajectories(), "wait": True, "checkpoint_name": name}
        report = server.client.post("/v1/training/update", json=body).json()["report"]
        assert report["outcome"] == "published"

    def ask(server: RunningServer, model: str) -> tuple[list[int], list[float], int]:
        """Tokens, their logprobs, and how much of the prompt was there."""
        fields = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
        reply = server.complete(LONG, model=model, **fields).json()
        (choice,) = reply["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], cached(reply)

    with serving(config) as server:
        learn(server, "old")
        before = ask(server, "policy")
        published, beside = threading.Event(), []

        def others() -> None:
            while not published.is_set():
                beside.append(ask(server, "old")[2])

        asking = threading.Thread(target=others)
        asking.start()  # the prompt's blocks are read while the next version is made
        learn(server, "new")
        first, hit = ask(server, "policy"), ask(server, "policy")
        published.set()
        asking.join()
        pinned = ask(server, "old")
    assert before[2] == first[2] == 0 and min(hit[2], pinned[2], *beside) > 0
    without = structs.replace(config.engine, cache=structs.replace(config.engine.cache, prefix_caching=False))
    with serving(structs.replace(config, engine=without)) as server:
        cold, cold_old = ask(server, "new"), ask(server, "old")
    assert cold[2] == 0 and cold[0] != cold_old[0], "the update changes what is said"
    for answer, alone in ((first, cold), (hit, cold), (before, cold_old), (pinned, cold_old)):
        assert answer[0] == alone[0]
        assert answer[1] == pytest.approx(alone[1], abs=1e-4)
