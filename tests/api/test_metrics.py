"""`/metrics` as dashboards read it: vLLM's names, labels, bounds and meanings, over the life of requests."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem.engine.messages import Cancel, Failed, Heartbeat, Occupancy, Output, Preempted, Started, Submit
from mlx_tandem.generation import metrics
from mlx_tandem.types import Delta, DraftCounts, DraftMinute, EngineStats, SpeculationStats
from tests.api.scripted import INFO, Peer, scripted_server
from tests.serving import RunningServer
from tests.waiting import until

BOARD = [
    "histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{M}[I])))",
    "rate(vllm:e2e_request_latency_seconds_sum{M}[I]) / rate(vllm:e2e_request_latency_seconds_count{M}[I])",
    "rate(vllm:prompt_tokens_total{M}[I])",
    "rate(vllm:generation_tokens_total{M}[I])",
    "histogram_quantile(0.5, sum by(le) (rate(vllm:inter_token_latency_seconds_bucket{M}[I])))",
    "rate(vllm:inter_token_latency_seconds_sum{M}[I]) / rate(vllm:inter_token_latency_seconds_count{M}[I])",
    "vllm:num_requests_running{M}",
    "vllm:num_requests_waiting{M}",
    "histogram_quantile(0.9, sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{M}[I])))",
    "rate(vllm:time_to_first_token_seconds_sum{M}[I]) / rate(vllm:time_to_first_token_seconds_count{M}[I])",
    "vllm:kv_cache_usage_perc{M}",
    "sum by(le) (increase(vllm:request_prompt_tokens_bucket{M}[I]))",
    "sum by(le) (increase(vllm:request_generation_tokens_bucket{M}[I]))",
    "sum by(finished_reason) (increase(vllm:request_success_total{M}[I]))",
    "rate(vllm:request_queue_time_seconds_sum{M}[I])",
    "rate(vllm:request_prefill_time_seconds_sum{M}[I])",
    "rate(vllm:request_decode_time_seconds_sum{M}[I])",
    "rate(vllm:request_max_num_generation_tokens_sum{M}[I])",
    # Panels of earlier boards, and of those that came later.
    "histogram_quantile(0.95, sum by(le) (rate(vllm:time_per_output_token_seconds_bucket{M}[I])))",
    "vllm:gpu_cache_usage_perc{M}",
    "rate(vllm:prefix_cache_hits_total{M}[I]) / rate(vllm:prefix_cache_queries_total{M}[I])",
    "increase(vllm:num_preemptions_total{M}[I])",
    "sum by(reason) (vllm:num_requests_waiting_by_reason{M})",
    "sum by(le) (increase(vllm:iteration_tokens_total_bucket{M}[I]))",
    "rate(vllm:request_inference_time_seconds_sum{M}[I])",
    "sum by(le) (increase(vllm:request_params_n_bucket{M}[I]))",
    "sum by(le) (increase(vllm:request_params_max_tokens_bucket{M}[I]))",
    "sum by(le) (increase(vllm:request_num_preemptions_bucket{M}[I]))",
    "vllm:cache_config_info{M}",
]
"""What the public Grafana board of vLLM queries; M stands for model_name="$model_name", I for the interval."""

VLLM_BOUNDS = {
    "time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
        *(80.0, 160.0, 640.0, 2560.0),
    ),
    "inter_token_latency_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    "request_queue_time_seconds": (
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
        *(960.0, 1920.0, 7680.0),
    ),
    "request_prompt_tokens": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
ALIKE = {
    "e2e_request_latency_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_queue_time_seconds",
    "request_decode_time_seconds": "request_queue_time_seconds",
    "request_inference_time_seconds": "request_queue_time_seconds",
    "request_generation_tokens": "request_prompt_tokens",
    "request_max_num_generation_tokens": "request_prompt_tokens",
    "request_params_max_tokens": "request_prompt_tokens",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(client: httpx.Client) -> Values:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def base(values: Values, name: str, model: str) -> float:
    """The series of `name` that has no other labels than the model's and the engine's."""
    return values["vllm:" + name, frozenset({("model_name", model), ("engine", "0")})]


@pytest.fixture(scope="module")
def fresh() -> Iterator[tuple[httpx.Client, Peer]]:
    """A server that has answered nothing yet."""
    with scripted_server() as (client, peer, _):
        yield client, peer


@pytest.mark.parametrize("expression", BOARD)
def test_no_panel_of_vllm_s_board_is_empty(fresh: tuple[httpx.Client, Peer], expression: str) -> None:
    """Every series that it queries for the base's name is there before the first request, so that rates have a
    beginning."""
    values = read(fresh[0])
    names = re.findall(r"(vllm:\w+)\{M", expression)
    assert names
    for name in names:
        labels = [dict(own) for found, own in values if found == name]
        assert any(own.get("model_name") == "base" for own in labels), f"{name} has no series"
        for wanted in re.findall(r"by ?\((\w+)\)", expression):
            assert all(wanted in own for own in labels), f"{name} has no label {wanted}"


@pytest.mark.parametrize("name", [*VLLM_BOUNDS, *ALIKE])
def test_histograms_have_vllm_s_bounds(fresh: tuple[httpx.Client, Peer], name: str) -> None:
    """And finer ones below, so that what says le="0.3" finds it."""
    bounds = {dict(own)["le"] for found, own in read(fresh[0]) if found == f"vllm:{name}_bucket"}
    assert {str(float(b)) for b in VLLM_BOUNDS[ALIKE.get(name, name)]} | {"+Inf"} <= bounds


def test_every_series_names_the_model_and_the_engine(fresh: tuple[httpx.Client, Peer]) -> None:
    """But for the one of adapters, which has vLLM's labels alone."""
    found = [(name, dict(own)) for name, own in read(fresh[0]) if name.startswith("vllm:")]
    labels = [own for name, own in found if name != "vllm:lora_requests_info"]
    assert all((own["model_name"], own["engine"]) == ("base", "0") for own in labels)


def test_finish_reasons_are_there_from_the_start(fresh: tuple[httpx.Client, Peer]) -> None:
    reasons = {dict(own)["finished_reason"] for found, own in read(fresh[0]) if found == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}


def test_settings_of_the_cache(fresh: tuple[httpx.Client, Peer]) -> None:
    (own,) = [dict(own) for found, own in read(fresh[0]) if found == "vllm:cache_config_info"]
    assert own == {
        "model_name": "base",
        "engine": "0",
        "block_size": "16",
        "cache_dtype": "float32",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.6",
        "kv_cache_size_tokens": str(16 * (INFO.num_blocks - 1)),
        "num_gpu_blocks": str(INFO.num_blocks - 1),
        "num_gpu_blocks_override": "None",
        "sliding_window": "None",
    }


def test_who_waits_waits_for_room_or_for_an_adapter() -> None:
    with scripted_server() as (client, peer, _):
        peer.say(Occupancy(3, 5, 10, 54, 2))
        while not base(values := read(client), "num_requests_waiting", "base"):
            pass
        waiting = {
            dict(own)["reason"]: v for (n, own), v in values.items() if n == "vllm:num_requests_waiting_by_reason"
        }
        assert waiting == {"capacity": 3, "deferred": 2}
        assert base(values, "num_requests_waiting", "base") == sum(waiting.values())


# --- what is observed of a request ---------------------------------------------------------------------------------


def grown(before: Values, after: Values, model: str) -> Callable[[str], float]:
    return lambda name: base(after, name, model) - base(before, name, model)


def ask(client: httpx.Client, peer: Peer, **fields: Any) -> tuple[threading.Thread, Any]:
    """A request of two prompts that is open, and the engine's ends of it."""
    body = {"prompt": [[300, 301, 302], [300]], "n": 2, "max_tokens": 7} | fields
    thread = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
    thread.start()
    return thread, [peer.hear(Submit).request for _ in body["prompt"]]


def test_times_of_a_request() -> None:
    """Queue until its first row is planned, prefill until its first token, decode until its last: by the engine's word
    and the front's clock, which are one clock."""
    with scripted_server() as (client, peer, _):
        before = read(client)
        came = time.monotonic()
        thread, (first, second) = ask(client, peer)
        started = time.monotonic()
        peer.say(Started(second.id, started), Started(first.id, started + 500))
        peer.say(Output([Delta(first.id, 0, (310,))]))
        last = [Delta(r.id, c, (311,) * (1 + c), None, "length") for r in (first, second) for c in range(2)]
        peer.say(Preempted(first.id), Preempted(second.id), Preempted(999), Output(last))
        thread.join()
        done = time.monotonic()
        after = read(client)
        delta = grown(before, after, "base")
        for name in ("queue", "prefill", "decode", "inference"):
            assert delta(f"request_{name}_time_seconds_count") == 1
        queue, prefill = delta("request_queue_time_seconds_sum"), delta("request_prefill_time_seconds_sum")
        decode, inference = delta("request_decode_time_seconds_sum"), delta("request_inference_time_seconds_sum")
        assert 0 < queue <= started - came, "the first of its prompts counts, whatever is said of the others"
        assert queue + prefill == pytest.approx(delta("time_to_first_token_seconds_sum"))
        assert inference == pytest.approx(prefill + decode)
        assert queue + inference <= delta("e2e_request_latency_seconds_sum") <= done - came
        assert (delta("request_prompt_tokens_count"), delta("request_prompt_tokens_sum")) == (2, 4)
        assert (delta("request_generation_tokens_count"), delta("request_generation_tokens_sum")) == (4, 7)
        assert delta("request_max_num_generation_tokens_sum") == 2
        assert (delta("request_params_max_tokens_count"), delta("request_params_max_tokens_sum")) == (1, 7)
        assert (delta("request_params_n_count"), delta("request_params_n_sum")) == (1, 2)
        assert (delta("request_num_preemptions_count"), delta("request_num_preemptions_sum")) == (1, 2)


def test_an_engine_that_says_nothing_of_the_start_leaves_those_times_out() -> None:
    with scripted_server() as (client, peer, _):
        before = read(client)
        thread, (first, second) = ask(client, peer)
        peer.say(Output([Delta(r.id, c, (311,), None, "stop") for r in (first, second) for c in range(2)]))
        thread.join()
        delta = grown(before, read(client), "base")
        assert delta("request_decode_time_seconds_count") == delta("request_params_n_count") == 1
        for name in ("queue", "prefill", "inference"):
            assert delta(f"request_{name}_time_seconds_count") == 0


@pytest.mark.parametrize("how", ["failed", "left"])
def test_a_request_that_does_not_finish_is_in_none_of_them(how: str) -> None:
    with scripted_server() as (client, peer, _):
        before = read(client)
        if how == "failed":
            thread, (first, _) = ask(client, peer)
            peer.say(Started(first.id, time.monotonic()), Failed(first.id, "step_failed", "no"))
            thread.join()
        else:

            def read_one_piece_and_leave() -> None:
                body = {"prompt": [300], "max_tokens": 9, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as reply:
                    next(reply.iter_raw())

            thread = threading.Thread(target=read_one_piece_and_leave)
            thread.start()
            request = peer.hear(Submit).request
            peer.say(Started(request.id, time.monotonic()), Output([Delta(request.id, 0, (301,))]))
            thread.join()
            peer.hear(Cancel)
        until(lambda: not client.get("/v1/engine/metrics").json()["open_requests"])
        delta = grown(before, read(client), "base")
        assert not any(delta(f"{name}_count") for name in metrics.REQUESTS)
        assert client.get("/v1/engine/metrics").json()["requests_completed"] == 0


def test_a_real_engine_tells_its_times(server: RunningServer) -> None:
    """Chats, streams, stop strings and scoring, one after the other: nobody waits long, and all parts of the time are
    there."""
    before = read(server.client)
    server.chat("What is 3 + 4?", max_tokens=8, ignore_eos=True)
    server.chat("What is 3 + 4?", max_tokens=8, stream=True)
    server.complete("Once there was", stop="e", max_tokens=40, temperature=0)
    server.complete("Once there was", max_tokens=0, echo=True)
    server.complete(["Once", "there"], n=3, max_tokens=2, ignore_eos=True, model="shout")
    after = read(server.client)
    delta = grown(before, after, "tandem-demo")
    for name in ("queue", "prefill", "decode", "inference"):
        assert delta(f"request_{name}_time_seconds_count") == 5
    parts = sum(delta(f"request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode"))
    assert 0 < parts <= delta("e2e_request_latency_seconds_sum")
    assert delta("request_queue_time_seconds_sum") > 0
    assert delta("request_prefill_time_seconds_sum") > 0
    assert delta("request_decode_time_seconds_sum") > 0
    assert delta("request_params_n_sum") == 7
    assert delta("request_prompt_tokens_count") == 6
    assert delta("request_generation_tokens_count") == 10
    assert delta("request_num_preemptions_sum") == 0


STATS = EngineStats(
    steps=4,
    rows=9,
    prompt_tokens=100,
    prefix_hits=40,
    prefix_queries=100,
    generated_tokens=30,
    serving_ms=500.0,
    step_tokens=(1, 2, 0, 1) + (0,) * 10,
    step_tokens_sum=40,
    batch_fill=(2, 0, 0, 0, 0, 1, 0, 0, 0, 1),
    prompt_tokens_per_s=64.0,
    decode_tokens_per_s=8.0,
    speculation=SpeculationStats(
        "ngram",
        *(4, 20, 11, (4, 4, 3, 0), 0.625),
        sources=(DraftCounts("ngram", 3, 15, 8, 0.5), DraftCounts("prediction", 1, 5, 3, 0.6)),
        undrafted=9,
        minutes=(DraftMinute(2, (DraftCounts("ngram", 4, 20, 11, 0.6),), 9),),
        per_row=4.5,
        uses_drafts=True,
        tokens_per_s_with=90.04,
        tokens_per_s_without=60.0,
    ),
)


@pytest.fixture(scope="module")
def told() -> Iterator[httpx.Client]:
    """A server whose engine has told of four steps."""
    with scripted_server() as (client, peer, _):
        peer.say(Heartbeat(STATS), Occupancy(2, 3, 10, 54))
        until(lambda: client.get("/v1/engine/metrics").json()["engine"]["steps"])
        yield client


def test_steps_by_their_tokens(told: httpx.Client) -> None:
    values, name = read(told), "vllm:iteration_tokens_total"
    below = {dict(own)["le"]: v for (found, own), v in values.items() if found == name + "_bucket"}
    assert (below["1.0"], below["8.0"], below["16.0"], below["32.0"], below["+Inf"]) == (1, 3, 3, 4, 4)
    assert base(values, "iteration_tokens_total_sum", "base") == 40
    assert base(values, "iteration_tokens_total_count", "base") == 4


def test_drafts_under_vllm_s_names(told: httpx.Client) -> None:
    values = read(told)
    for name, count in (("drafts", 4), ("draft_tokens", 20), ("accepted_tokens", 11)):
        assert base(values, f"spec_decode_num_{name}_total", "base") == count
    places = {dict(own)["position"]: v for (name, own), v in values.items() if "_per_pos_total" in name}
    assert places == {"0": 4, "1": 4, "2": 3}


def test_drafts_as_mlx_lm_server_shows_them(told: httpx.Client) -> None:
    found = told.get("/v1/spec_decode/metrics").json()
    assert (found["acceptance_rate"], found["avg_accepted_tokens"]) == (0.55, 2.75)
    assert found["mode_distribution"] == {"ngram": 3, "prediction": 1, "none": 9}
    assert found["acceptance_rate_ema"] == 0.625 and found["controller"]["k"] == 4.5
    assert found["controller"]["uses_drafts"] and found["controller"]["tokens_per_s_with"] == 90.0


def test_no_drafts_before_the_first_heartbeat(fresh: tuple[httpx.Client, Peer]) -> None:
    found = fresh[0].get("/v1/spec_decode/metrics").json()
    assert (found["enabled"], found["mode"], found["num_drafts"]) == (False, "none", 0)


def test_debug_metrics_of_mlx_parallm(told: httpx.Client) -> None:
    assert told.get("/debug/metrics").json() == {
        "batches_processed": 4,
        "avg_batch_fill_pct": 100 * 9 / (4 * INFO.max_num_seqs),
        "batch_fill_hist": [2, 0, 0, 0, 0, 1, 0, 0, 0, 1],
        "queue_depth_last": 3,
        "stream_batches_processed": 4,
        "prompt_tps_avg": 120.0,
        "prompt_tps_last": 64.0,
        "decode_tps_avg": 60.0,
        "decode_tps_last": 8.0,
        "prompt_tokens_total": 100,
        "decode_tokens_total": 30,
    }


def test_debug_metrics_before_the_first_step(fresh: tuple[httpx.Client, Peer]) -> None:
    body = fresh[0].get("/debug/metrics").json()
    assert body.pop("batch_fill_hist") == [0] * 10
    assert set(body.values()) == {0}


# --- how many series there are -------------------------------------------------------------------------------------


def series(client: httpx.Client) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return set(read(client))


def test_nothing_that_a_client_says_becomes_a_label(fresh: tuple[httpx.Client, Peer]) -> None:
    """Names of models and adapters, users, request ids, fields and paths, all made up."""
    client, _ = fresh
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("POST", "/v1/completions", {"prompt": "x"}),
    ]

    def made_up(i: int) -> None:
        name = f"canary-{i}"
        for method, path, body in bodies:
            client.request(method, path, json=body | {"model": name, "user": name}, headers={"X-Request-Id": name})
            client.request(method, path, json=body | {"lora_adapter": name})
            client.request(method, path, json=body | {name: 1})
        client.get(f"/v1/models/{name}")
        client.get(f"/{name}")
        client.delete(f"/v1/adapters/{name}")
        client.post("/v1/adapters", json={"name": name, "path": name})
        client.post("/tokenize", json={"model": name, "prompt": "x"})

    made_up(0)
    before = series(client)
    for i in range(1, 150):
        made_up(i)
    assert series(client) == before
    assert "canary" not in client.get("/metrics").text
    assert "canary" not in json.dumps(client.get("/v1/engine/metrics").json())
