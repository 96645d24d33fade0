"""Signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import msgspec
import pytest
from msgspec import structs

from tests.api.learns import collect, learning_config
from tests.serving import ROOT, RunningServer, demo_config, serving
from tests.stored import sizes
from tests.streams import until_token
from tests.waiting import until

pytestmark = pytest.mark.restarts

CANARY = "canary-7d1f"
DRAIN = 150.0
"""Seconds in which even a busy machine ends a stream."""


def stream(server: RunningServer, tokens: int, begun: threading.Event, result: list[str]) -> None:
    # Greedy: a drawn token may be a part of a character, which makes no event of its own.
    body = {"prompt": CANARY, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["user"] = CANARY
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        result.append(until_token(lines))
        begun.set()
        result.extend(lines)


def start(server: RunningServer, tokens: int) -> tuple[threading.Thread, list[str]]:
    begun = threading.Event()
    result: list[str] = []
    thread = threading.Thread(target=stream, args=(server, tokens, begun, result))
    thread.start()
    assert begun.wait(30)
    return thread, result


@pytest.mark.promise("FLT-45")
def test_sigterm_finishes_what_runs_and_refuses_the_rest():
    """Connections are answered until the last stream has ended, new ones, too: a liveness probe opens one for each
    question, and one that is refused would kill the server in mid-drain."""
    with serving(demo_config(drain_seconds=DRAIN)) as server:
        server.client.get("/health")  # an open connection
        engine = server.engine_pid()
        thread, lines = start(server, 600)
        os.kill(engine, signal.SIGSTOP)  # what runs is not through before the rest is refused
        try:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.client.get("/readyz").status_code != 200)
            refused = server.chat("hi")
            for _ in range(3):
                assert httpx.get(f"{server.url}/livez").status_code == 200
                for path in ("/readyz", "/health"):
                    probe = httpx.get(server.url + path)
                    assert (probe.status_code, probe.json()["status"]) == (503, "shutting_down")
            for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
                on_a_new_one = httpx.post(f"{server.url}/v1/completions", json=body)
                assert on_a_new_one.status_code == 503
                assert on_a_new_one.json()["error"]["code"] == "engine_unavailable"
                assert on_a_new_one.headers["retry-after"] == "5"
        finally:
            os.kill(engine, signal.SIGCONT)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the server is shutting down"
        assert refused.headers["retry-after"] == "5"
        assert refused.headers["connection"] == "close"
        thread.join()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert len([line for line in lines if line]) == 600 + 2
        assert server.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/livez")


def test_the_rewards_of_finished_answers_are_computed_and_kept(tmp_path):
    config = learning_config(tmp_path, scoring_function="contains", reward_timeout_s=60.0)
    config = structs.replace(config, server=structs.replace(config.server, drain_seconds=DRAIN))
    with serving(config) as server:
        collect(server, scoring_function=None)  # a reply does not wait for a reward that the request does not ask for
        until(lambda: server.client.get("/v1/training/status").json()["trajectories_collected"] == 4)
        worker = server.child_pid("mlx_tandem.training.rewards.worker")
        os.kill(worker, signal.SIGSTOP)
        try:
            collect(server, "Sort down: 1 2", scoring_function=None)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.client.get("/readyz").status_code != 200)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a server that did not wait for it has ended it
                os.kill(worker, signal.SIGCONT)
        assert server.process.wait(60) == 0
    assert len(sizes(tmp_path / "checkpoints")) == 8


@pytest.mark.promise("FLT-46", "FLT-47", "FLT-58")
def test_a_stream_longer_than_the_limit_gets_a_typed_error():
    """SIGHUP drains as SIGTERM does, and a SIGPIPE does nothing."""
    with serving(demo_config(drain_seconds=0.2)) as server:
        thread, lines = start(server, 1000)
        for pid in (server.process.pid, server.engine_pid()):
            os.kill(pid, signal.SIGPIPE)
        os.kill(server.engine_pid(), signal.SIGHUP)  # a terminal that closes sends it to all of its processes
        assert server.client.get("/health").json()["status"] == "ok"
        server.process.send_signal(signal.SIGHUP)
        thread.join()
        last = json.loads([line for line in lines if line][-1][6:])
        assert last["error"]["code"] == "engine_unavailable"
        assert server.process.wait(20) == 0


@pytest.mark.promise("FLT-47")
def test_a_second_signal_stops_at_once():
    """The stream would go on for as long as the drain may take, since its engine stands still."""
    with serving(demo_config(drain_seconds=DRAIN)) as server:
        thread, lines = start(server, 1000)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        until(lambda: server.client.get("/readyz").status_code != 200)
        server.process.send_signal(signal.SIGTERM)
        try:
            assert server.process.wait(20) == 0
            with pytest.raises(ProcessLookupError):  # an engine that hangs is not left behind
                os.kill(engine, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        thread.join()
        assert "data: [DONE]" not in lines


@pytest.mark.promise("H2")
def test_logs_are_json_lines_without_prompts():
    """Whatever a client writes, and however the server ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.program", msgspec.json.encode(demo_config()).decode()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().split()[1])
    evil = CANARY + "\n{}\x1b[31m\u2028%s\0"
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for body in (
            {"messages": [{"role": "user", "content": evil}], "max_tokens": 1},
            {"messages": [{"role": "user", "content": evil}], "max_tokens": 1, "stream": True, "user": evil},
            {"messages": evil},
            {"messages": [{"role": evil, "content": evil}]},
            {"messages": [{"role": "user", "content": "x"}], "model": evil},
            {"messages": [{"role": "user", "content": "x"}], evil: 1},
        ):
            client.post("/v1/chat/completions", json=body)
        client.post("/v1/chat/completions", content=evil, headers={"content-type": "application/json"})
        client.post("/v1/adapters", json={"name": evil, "path": evil})
        client.get(f"/v1/models/{CANARY}")
        client.get(f"/{CANARY}", headers={"x-evil": CANARY})
        assert CANARY not in client.get("/metrics").text
        assert CANARY not in client.get("/v1/engine/metrics").text
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert CANARY not in log
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert {"adapter loaded", "draining"} <= {e["event"] for e in events}
    assert all({"time", "level", "logger", "event"} <= e.keys() for e in events)
