"""Requests that take too long, clients that take nothing, and a shutdown in the middle of it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading

import httpx
import msgspec
import pytest

from mlx_tandem.config import Config, SchedulerConfig
from mlx_tandem.engine.messages import Accepted, Cancel, Failed, Output, Submit
from mlx_tandem.types import Delta
from tests.api.scripted import INFO, scripted_server
from tests.serving import RunningServer, demo_config, serving
from tests.streams import until_token
from tests.waiting import until

BODY = {"prompt": [300], "max_tokens": 200}
STREAM = BODY | {"stream": True}

PATIENCE = 2.0
"""Seconds of a limit that what comes at once keeps, however busy the machine is."""

LONG = {"prompt": [[300]] * 16, "max_tokens": 1000, "priority": -1}
"""Its prompts have the one seat one after the other: many times as long as a waiting request is patient."""


def one_seat(**server: object) -> Config:
    config = demo_config(**server)
    scheduler = SchedulerConfig(max_num_seqs=1)
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, scheduler=scheduler))


def post(client: httpx.Client, body: dict[str, object], replies: list[httpx.Response]) -> threading.Thread:
    thread = threading.Thread(target=lambda: replies.append(client.post("/v1/completions", json=body)))
    thread.start()
    return thread


def error_of(reply: httpx.Response) -> tuple[str, str]:
    text = reply.text.splitlines()[-2 if reply.status_code == 200 else -1].removeprefix("data: ")
    error = json.loads(text)["error"]
    return error["type"], error["code"]


@pytest.mark.parametrize("setting", ["request_timeout", "first_token_timeout"])
@pytest.mark.parametrize("body", [BODY, STREAM])
def test_a_request_that_gets_no_token_ends_at_its_deadline(setting, body):
    with scripted_server(**{f"{setting}_s": 0.2}) as (client, peer, _):
        replies: list[httpx.Response] = []
        thread = post(client, body, replies)
        request = peer.hear(Submit).request
        assert peer.hear(Cancel) == Cancel(request.id)
        thread.join()
        assert replies[0].status_code == 504
        assert error_of(replies[0]) == ("timeout_error", setting)
        assert client.get("/health").json()["open_requests"] == 0


def test_a_stream_whose_prompt_is_being_read_ends_with_an_event():
    """Its reply has begun when the engine accepted it."""
    with scripted_server(first_token_timeout_s=0.2) as (client, peer, _):
        replies: list[httpx.Response] = []
        thread = post(client, STREAM, replies)
        request = peer.hear(Submit).request
        peer.say(Accepted(request.id))
        assert peer.hear(Cancel) == Cancel(request.id)
        thread.join()
        assert replies[0].status_code == 200
        assert error_of(replies[0]) == ("timeout_error", "first_token_timeout")


def test_a_stream_that_has_begun_ends_with_an_event():
    with scripted_server(request_timeout_s=PATIENCE) as (client, peer, _):
        replies: list[httpx.Response] = []
        thread = post(client, STREAM, replies)
        request = peer.hear(Submit).request
        peer.say(Output([Delta(request.id, 0, (301,))]))
        assert peer.hear(Cancel) == Cancel(request.id)
        thread.join()
        assert replies[0].status_code == 200
        assert error_of(replies[0]) == ("timeout_error", "request_timeout")
        assert "[DONE]" not in replies[0].text
        metrics = client.get("/metrics").text
        assert 'tandem_errors_total{code="request_timeout"} 1.0' in metrics
        assert 'tandem_error_replies_total{code="request_timeout"' not in metrics, "its reply has status 200"


def test_the_deadline_of_the_first_token_leaves_time_to_read_the_prompt():
    """A device that needs 40 s for the first prompt has not failed when the second one's time is over."""
    slow = msgspec.structs.replace(INFO, prompt_cost=(0.0, 256_000.0, 0.0, 0.0))  # a second for each token
    with scripted_server(slow, first_token_timeout_s=0.2) as (client, peer, _):
        long: list[httpx.Response] = []
        short: list[httpx.Response] = []
        first = post(client, {"prompt": [300] * 20, "max_tokens": 1, "stream": True}, long)
        waiting = peer.hear(Submit).request
        second = post(client, {"prompt": [300], "max_tokens": 1}, short)
        late = peer.hear(Submit).request
        assert peer.hear(Cancel) == Cancel(late.id)
        second.join()
        assert error_of(short[0]) == ("timeout_error", "first_token_timeout")
        peer.say(Output([Delta(waiting.id, 0, (301,), None, "length")]))
        first.join()
        assert long[0].text.strip().endswith("data: [DONE]")


def test_the_deadline_of_the_first_token_ends_with_it():
    """The second request begins later and has come to its deadline: so has the first, which has a token."""
    with scripted_server(first_token_timeout_s=PATIENCE) as (client, peer, _):
        first: list[httpx.Response] = []
        second: list[httpx.Response] = []
        one = post(client, STREAM, first)
        begun = peer.hear(Submit).request
        peer.say(Output([Delta(begun.id, 0, (301,))]))
        two = post(client, STREAM, second)
        late = peer.hear(Submit).request
        assert peer.hear(Cancel) == Cancel(late.id)
        peer.say(Output([Delta(begun.id, 0, (302,), None, "length")]))
        one.join()
        two.join()
        assert first[0].text.strip().endswith("data: [DONE]")
        assert second[0].status_code == 504


def test_who_has_sent_a_part_of_the_next_request_keeps_its_answer():
    """The other connection has sent a part of a head later and is cut: so long may a head take to come."""
    with scripted_server(receive_timeout_s=PATIENCE) as (client, peer, _):
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address, timeout=20) as one, socket.create_connection(address, timeout=20) as two:
            data = json.dumps(BODY).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            one.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data + head[:9])
            request = peer.hear(Submit).request
            two.sendall(head[:9])
            assert two.recv(65536).startswith(b"HTTP/1.1 408")
            peer.say(Output([Delta(request.id, 0, (301,), None, "stop")]))
            answer = b""
            while more := one.recv(65536):
                answer += more
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"HTTP/1.1 408" in answer


def stream(server: RunningServer, body: dict[str, object]) -> contextlib.AbstractContextManager[httpx.Response]:
    return server.client.stream("POST", "/v1/completions", json=body | {"stream": True, "ignore_eos": True})


def compile_kernels(server: RunningServer) -> None:
    """A machine's first tokens of a kind wait for a compiler: longer than these tests' requests may."""
    until(lambda: server.complete([300], max_tokens=2, ignore_eos=True).status_code == 200)


def counters(server: RunningServer) -> dict[str, int]:
    return server.client.get("/v1/engine/metrics").json()["engine"]


@pytest.mark.promise("FLT-44")
def test_a_request_that_waits_until_its_deadline_costs_no_device_work():
    """Seen by the rows of steps that ran under an adapter: only the one that waits names one. Deadlines hold while the
    server drains, too."""
    with serving(one_seat(first_token_timeout_s=PATIENCE)) as server:
        compile_kernels(server)
        with stream(server, LONG) as running:
            assert running.status_code == 200
            lines = running.iter_lines()  # kept: its end would close the stream
            until_token(lines)
            waiting = server.complete("x", model="shout")
            assert error_of(waiting) == ("timeout_error", "first_token_timeout")
        until(lambda: (now := counters(server))["steps"] and not (now["running"] or now["waiting"]))
        assert counters(server)["lora_rows"] == 0
        while server.complete("x", model="shout").status_code != 200:  # reading the adapter counts, too
            pass
        until(lambda: counters(server)["lora_rows"])
        drain(server)


def drain(server: RunningServer) -> None:
    """End the server while a request waits, which then ends at its deadline."""
    with httpx.Client(base_url=server.url, timeout=60) as other, httpx.Client(base_url=server.url) as probe:
        replies: list[httpx.Response] = []
        with stream(server, LONG) as first:
            assert first.status_code == 200
            lines = first.iter_lines()
            until_token(lines)
            waiting = post(other, BODY, replies)
            until(lambda: replies or probe.get("/health").json()["open_requests"] == 2)
            server.process.send_signal(signal.SIGTERM)
            waiting.join()
        assert error_of(replies[0]) == ("timeout_error", "first_token_timeout")
        assert server.process.wait(20) == 0


def test_sigterm_while_requests_wait():
    """Those that wait get their turn."""
    with serving(one_seat()) as server, httpx.Client(base_url=server.url, timeout=60) as other:
        replies: list[httpx.Response] = []
        with stream(server, BODY | {"max_tokens": 1000}) as first:
            lines = first.iter_lines()  # kept: its end would close the stream
            until_token(lines)
            waiting = [post(other, BODY | {"max_tokens": 5, "ignore_eos": True}, replies) for _ in range(3)]
            with httpx.Client(base_url=server.url) as probe:
                until(lambda: probe.get("/health").json()["open_requests"] == 4)
                server.process.send_signal(signal.SIGTERM)
                until(lambda: probe.get("/readyz").status_code != 200)
        for thread in waiting:
            thread.join()
        assert [r.status_code for r in replies] == [200, 200, 200]
        assert {r.json()["usage"]["completion_tokens"] for r in replies} == {5}
        assert server.process.wait(20) == 0


@pytest.mark.promise("FLT-42")
def test_a_reader_that_takes_nothing_is_cut_and_its_blocks_are_freed():
    """More is generated than the sockets' buffers hold; the answer stays unread."""
    with serving(demo_config(write_timeout_s=0.3)) as server:
        body = BODY | {"stream": True, "ignore_eos": True, "n": 16, "max_tokens": 900, "logprobs": 20}
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            data = json.dumps(body).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            until(lambda: counters(server)["used_blocks"])
            until(lambda: not server.client.get("/health").json()["open_requests"])
            until(lambda: not counters(server)["used_blocks"])
            assert counters(server)["generated_tokens"] < 16 * 900
        metrics = server.client.get("/v1/engine/metrics").json()
        assert metrics["finished"]["abort"] == 16
        assert server.chat("What is 12 + 5?", temperature=0).json()["choices"][0]["finish_reason"] == "stop"


def test_a_client_that_leaves_is_no_error_of_the_arm_that_answered_it():
    """A request that fails is one."""
    with scripted_server() as (client, peer, _):

        def arm() -> dict[str, int]:
            found: dict[str, int] = client.get("/v1/aliases/a").json()["arms"][0]
            return found

        assert client.put("/v1/aliases/a", json={"arms": [{"adapter": "base", "weight": 1}]}).status_code == 200
        begun: list[int] = []

        def begin() -> None:
            begun.append(peer.hear(Submit).request.id)
            peer.say(Output([Delta(begun[0], 0, (301,))]))

        thread = threading.Thread(target=begin)
        thread.start()
        with client.stream("POST", "/v1/completions", json=STREAM | {"model": "a"}) as reply:
            assert reply.status_code == 200
        thread.join()
        assert peer.hear(Cancel) == Cancel(begun[0])
        until(lambda: not arm()["open"])
        assert (arm()["requests"], arm()["generated_tokens"], arm()["errors"]) == (1, 1, 0)
        ended = 'vllm:request_success_total{engine="0",finished_reason="%s",model_name="base"} %s'
        metrics = client.get("/metrics").text
        assert all(ended % each in metrics for each in (("abort", "1.0"), ("error", "0.0"))), metrics
        replies: list[httpx.Response] = []
        thread = post(client, BODY | {"model": "a"}, replies)
        peer.say(Failed(peer.hear(Submit).request.id, "adapter_changed", "it is gone", "model", False))
        thread.join()
        assert replies[0].status_code >= 400
        assert (arm()["requests"], arm()["errors"]) == (2, 1)
