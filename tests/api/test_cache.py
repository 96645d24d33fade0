"""The prefix cache over HTTP: what a reply, the counters and the metrics say of it, and that a name hides nothing."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem import demo
from tests.api.test_chat import events

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
