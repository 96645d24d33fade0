"""The model server protocol of the Kubernetes Gateway API Inference Extension, as its endpoint picker reads it.

The names, types and labels are those of docs/proposals/003-model-server-protocol in
kubernetes-sigs/gateway-api-inference-extension.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem.engine.messages import AdapterLoaded, KnowAdapter, LoadAdapter, Occupancy, Output, Started, Submit
from mlx_tandem.server import vllm_metrics
from mlx_tandem.types import Delta
from tests.api.scripted import ADAPTER, INFO, Peer, scripted_server
from tests.serving import ADAPTER_ROOT, RunningServer
from tests.streams import until_token
from tests.waiting import until

GAUGES = {
    "TotalQueuedRequests": "vllm:num_requests_waiting",
    "TotalRunningRequests": "vllm:num_requests_running",
    "KVCacheUtilization": "vllm:kv_cache_usage_perc",
    "KVCacheUtilization of older pickers": "vllm:gpu_cache_usage_perc",
}
"""The required metrics, each of which is a gauge with one series."""

LORA = "vllm:lora_requests_info"


def scraped(client: httpx.Client, name: str) -> list[tuple[str, dict[str, str], float]]:
    """The (type, labels, value) of every series of a metric."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return [(f.type, dict(s.labels), s.value) for f in families for s in f.samples if s.name == name]


def adapters(client: httpx.Client) -> tuple[set[str], set[str]]:
    """The running and the waiting adapters, split at commas without spaces, as a picker does."""
    ((_, labels, _),) = scraped(client, LORA)
    running, waiting = (
        {name.strip() for name in labels[f"{state}_lora_adapters"].split(",") if name.strip()}
        for state in ("running", "waiting")
    )
    return running, waiting


def test_required_gauges_follow_the_engine() -> None:
    with scripted_server() as (client, peer, _):
        assert {name: scraped(client, name)[0][2] for name in GAUGES.values()} == dict.fromkeys(GAUGES.values(), 0)
        peer.say(Occupancy(3, 5, 16, 48))
        until(lambda: scraped(client, "vllm:num_requests_waiting")[0][2])
        for name, value in zip(GAUGES.values(), (5, 3, 0.25, 0.25), strict=True):
            ((kind, _, found),) = scraped(client, name)
            assert (kind, found) == ("gauge", value)


def test_the_cache_is_described_for_the_prefix_picker() -> None:
    with scripted_server() as (client, _, _):
        ((kind, labels, value),) = scraped(client, "vllm:cache_config_info")
        assert (kind, value) == ("gauge", 1)
        assert (int(labels["block_size"]), int(labels["num_gpu_blocks"])) == (16, INFO.num_blocks - 1)


def ask(client: httpx.Client, model: str) -> threading.Thread:
    body = {"model": model, "prompt": [300, 301], "max_tokens": 4}
    thread = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
    thread.start()
    return thread


def load(client: httpx.Client, peer: Peer, name: str, digest: str) -> None:
    body = {"lora_name": name, "lora_path": "shout"}
    thread = threading.Thread(target=client.post, args=("/v1/load_lora_adapter",), kwargs={"json": body})
    thread.start()
    peer.say(AdapterLoaded(peer.hear(LoadAdapter).call, structs.replace(ADAPTER, digest=digest)))
    peer.hear(KnowAdapter)
    thread.join()


def test_adapters_of_requests_run_or_wait() -> None:
    with scripted_server(settings={"adapter_root": str(ADAPTER_ROOT)}) as (client, peer, _):
        ((kind, labels, value),) = scraped(client, LORA)
        assert kind == "gauge" and set(labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        assert labels["max_lora"] == "16" and abs(time.time() - value) < 60
        for number, name in enumerate(("one", "two")):
            load(client, peer, name, str(number) * 64)
        assert adapters(client) == (set(), set()), "an adapter that no request uses"
        threads = [ask(client, name) for name in ("one", "two", "base")]
        requests = [peer.hear(Submit).request for _ in threads]
        until(lambda: adapters(client) == (set(), {"one", "two"}))
        (one,) = [r for r in requests if r.adapter is not None and r.adapter.name == "one"]
        peer.say(Started(one.id, time.monotonic()))
        until(lambda: adapters(client) == ({"one"}, {"two"}))
        peer.say(*(Started(r.id, time.monotonic()) for r in requests))
        until(lambda: adapters(client) == ({"one", "two"}, set()))
        peer.say(Output([Delta(r.id, 0, (311,), None, "stop") for r in requests]))
        for thread in threads:
            thread.join()
        assert adapters(client) == (set(), set())
        assert scraped(client, LORA)[0][2] >= value


def test_a_label_names_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(settings={"adapter_root": str(ADAPTER_ROOT)}) as (client, peer, _), ExitStack() as stack:
        monkeypatch.setattr(vllm_metrics, "NAMED", 1)
        for number, name in enumerate(("one", "two")):
            load(client, peer, name, str(number) * 64)
        threads = [ask(client, name) for name in ("one", "two")]
        requests = [peer.hear(Submit).request for _ in threads]
        stack.callback(lambda: [thread.join() for thread in threads])
        until(lambda: adapters(client) == (set(), {"one"}))
        peer.say(Output([Delta(r.id, 0, (311,), None, "stop") for r in requests]))


def test_a_real_engine_says_which_adapter_runs(server: RunningServer) -> None:
    """While a stream of it is open; the base and adapters that nobody asks are not named. The engine stands still then,
    so that the stream does not end before the metrics are read."""
    body = {"model": "shout", "prompt": "Sort down: 3 1 2", "max_tokens": 900, "ignore_eos": True, "stream": True}
    engine = server.engine_pid()
    with server.client.stream("POST", "/v1/completions", json=body) as reply:
        until_token(reply.iter_lines())
        os.kill(engine, signal.SIGSTOP)
        try:
            with httpx.Client(base_url=server.url) as other:
                assert adapters(other) == ({"shout"}, set())
        finally:
            os.kill(engine, signal.SIGCONT)
    until(lambda: adapters(server.client) == (set(), set()))
