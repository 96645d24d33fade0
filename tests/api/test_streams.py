"""HTTP over a scripted engine: what a client sees when things go wrong, and what the engine is told."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.engine.messages import Cancel, Failed, Output, Submit
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import Delta
from tests.api.scripted import Peer, scripted_server
from tests.streams import data_of
from tests.waiting import until

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
STREAM = BODY | {"stream": True}


def token(n: int) -> int:
    return 300 + n  # an ordinary token of the built-in vocabulary


def raw_post(client: httpx.Client, body: dict) -> socket.socket:
    """A request whose connection the test can end as it likes."""
    url = client.base_url
    data = json.dumps(body).encode()
    sock = socket.create_connection((url.host, url.port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return sock


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    sock.settimeout(20)
    answer = b""
    while mark not in answer:
        data = sock.recv(65536)
        assert data, answer
        answer += data
    return answer


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_is_cancelled(body, begun):
    with scripted_server() as (client, peer, _):
        sock = raw_post(client, body)
        request = peer.hear(Submit).request
        if begun:
            peer.say(Output([Delta(request.id, 0, (token(1),))]))
            if "stream" in body:
                read_until(sock, b"data: ")
        sock.close()
        assert peer.hear(Cancel) == Cancel(request.id)
        assert client.get("/health").json()["open_requests"] == 0


def ask(client: httpx.Client, body: dict, replies: list[httpx.Response]) -> threading.Thread:
    thread = threading.Thread(target=lambda: replies.append(client.post("/v1/chat/completions", json=body)))
    thread.start()
    return thread


def answered(client: httpx.Client, peer: Peer, body: dict, *say) -> httpx.Response:
    """The reply to `body`, after the engine has said what `say` makes of the request's id."""
    replies: list[httpx.Response] = []
    thread = ask(client, body, replies)
    request = peer.hear(Submit).request
    for make in say:
        peer.say(make(request.id))
    thread.join()
    return replies[0]


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_an_error_before_the_first_token_has_its_status(body):
    with scripted_server() as (client, peer, _):
        failed = answered(client, peer, body, lambda i: Failed(i, "numerical_error", "not finite"))
        assert failed.status_code == 503
        assert failed.headers["retry-after"] == "1"
        assert failed.json()["error"]["code"] == "numerical_error"
        wrong = answered(client, peer, body, lambda i: Failed(i, "x", "bad", "prompt", False))
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")


def test_an_error_in_the_middle_is_the_last_event():
    with scripted_server() as (client, peer, _):
        reply = answered(
            client,
            peer,
            STREAM,
            lambda i: Output([Delta(i, 0, (token(1),))]),
            lambda i: Failed(i, "step_failed", "the step failed"),
        )
        assert reply.status_code == 200
        events = [json.loads(data) for data in data_of(reply.text)]
        assert events[-1] == {
            "error": {"message": "the step failed", "type": "server_error", "param": None, "code": "step_failed"}
        }


def test_the_death_of_the_engine_reaches_every_stream():
    with scripted_server() as (client, peer, engine):
        replies: list[httpx.Response] = []
        threads = [ask(client, body, replies) for body in (STREAM, STREAM, BODY)]
        for _ in threads:
            request = peer.hear(Submit).request
            peer.say(Output([Delta(request.id, 0, (token(1),))]))
        peer.die()
        for t in threads:
            t.join()
        assert sorted(r.status_code for r in replies if "data: " not in r.text) == [503]
        for reply in replies:
            assert "engine_died" in reply.text
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "restarting")
        refused = client.post("/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert refused.headers["retry-after"] == "5"
        assert client.get("/livez").status_code == 200
        second = engine.peer().ready()
        until(lambda: client.get("/readyz").status_code == 200)
        reply = answered(client, second, BODY, lambda i: Output([Delta(i, 0, (token(1),), None, "length")]))
        assert reply.status_code == 200


def test_a_queue_that_is_full_refuses():
    with scripted_server(max_queue_size=1) as (client, peer, _):
        replies: list[httpx.Response] = []
        thread = ask(client, BODY | {"n": 8}, replies)  # as many as the batch holds
        first = peer.hear(Submit).request
        full = client.post("/v1/chat/completions", json=BODY | {"n": 2})
        assert full.status_code == 429
        assert 1 <= int(full.headers["retry-after"]) <= 120
        assert full.json()["error"]["type"] == "rate_limit_error"
        other = answered(client, peer, BODY, lambda i: Output([Delta(i, 0, (token(1),), None, "stop")]))
        assert other.status_code == 200
        peer.say(Output([Delta(first.id, c, (token(1),), None, "stop") for c in range(8)]))
        thread.join()
        assert replies[0].status_code == 200
        assert client.get("/health").json()["open_requests"] == 0


def test_a_stop_string_cancels_its_choice_only():
    with scripted_server() as (client, peer, _):
        replies: list[httpx.Response] = []
        thread = ask(client, BODY | {"n": 2, "stop": ["A"]}, replies)
        request = peer.hear(Submit).request
        tokenizer = Tokenizer.load(demo.MODEL_PATH)
        (a,), (b,) = tokenizer.encode("A"), tokenizer.encode("B")
        peer.say(Output([Delta(request.id, 0, (b,)), Delta(request.id, 1, (b,))]))
        peer.say(Output([Delta(request.id, 0, (a,)), Delta(request.id, 1, (b,))]))
        assert peer.hear(Cancel) == Cancel(request.id, 0)
        peer.say(Output([Delta(request.id, 1, (2,), None, "stop")]))
        thread.join()
        choices = replies[0].json()["choices"]
        assert [(c["message"]["content"], c["finish_reason"]) for c in choices] == [("B", "stop"), ("BB", "stop")]
        assert replies[0].json()["usage"]["completion_tokens"] == 5


def test_a_reader_that_is_slow_gets_everything():
    """It reads nothing until all is generated: one event per token still, and the same text."""
    count = 3000
    with scripted_server() as (client, peer, _):
        sock = raw_post(client, STREAM | {"max_tokens": 200})
        request = peer.hear(Submit).request
        for n in range(count):
            peer.say(Output([Delta(request.id, 0, (token(n % 500),), None, None if n < count - 1 else "length")]))
        answer = read_until(sock, b"data: [DONE]")
        sock.close()
        assert answer.count(b'"delta":{"content":') == count


def test_a_reader_that_takes_nothing_is_given_up():
    with scripted_server(write_timeout_s=0.4) as (client, peer, _):
        sock = raw_post(client, STREAM)
        request = peer.hear(Submit).request
        told = threading.Thread(target=lambda: peer.hear(Cancel))
        told.start()
        while told.is_alive():
            peer.say(Output([Delta(request.id, 0, (token(n),)) for n in range(500)]))
        assert client.get("/health").json()["open_requests"] == 0
        sock.close()


def test_unexpected_errors_are_a_fixed_text(monkeypatch):
    with scripted_server() as (client, _, _):

        def broken(*_: object) -> None:
            raise RuntimeError("secret prompt text")

        monkeypatch.setattr("mlx_tandem.server.app.health", broken)
        response = client.get("/health")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in response.text


def test_defaults_of_the_model_folder(monkeypatch):
    monkeypatch.setattr("mlx_tandem.generation.front.sampling_defaults", lambda _: {"temperature": 0.25, "top_k": 7})
    done = lambda i: Output([Delta(i, 0, (token(1),), None, "stop")])  # noqa: E731
    with scripted_server(default_max_tokens=9) as (client, peer, _):
        replies: list[httpx.Response] = []
        thread = ask(client, {"messages": BODY["messages"]}, replies)
        request = peer.hear(Submit).request
        peer.say(done(request.id))
        thread.join()
        assert (request.params.temperature, request.params.top_k, request.params.max_tokens) == (0.25, 7, 9)
        thread = ask(client, BODY | {"temperature": 1, "top_k": -1}, replies)
        request = peer.hear(Submit).request
        peer.say(done(request.id))
        thread.join()
        assert (request.params.temperature, request.params.top_k) == (1.0, 0)
