"""What a stream sends before the first token and while nothing is drawn, over a scripted engine that stays silent."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from mlx_tandem.engine.messages import Accepted, Cancel, Failed, Output, Submit
from mlx_tandem.types import Delta
from tests.api.plain import TOKENIZER
from tests.api.scripted import Peer, ScriptedEngine, scripted_server

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 20, "model": "base"},
    "/v1/responses": {"input": "hi", "model": "base"},
    "/api/chat": {"messages": HELLO, "model": "base"},
    "/api/generate": {"prompt": "hi", "model": "base"},
}
FIRST = {
    "/v1/completions": b": keep-alive\n\n",
    "/v1/chat/completions": b'"delta":{"role":"assistant","content":""}',
    "/v1/messages": b"event: message_start",
    "/v1/responses": b"event: response.in_progress",
}
"""A part of the events that come before the prompt is read."""

KEEPALIVE = dict.fromkeys(FIRST, b": keep-alive\n\n") | {"/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n'}

NAME = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


Served = tuple[httpx.Client, Peer, ScriptedEngine]


@pytest.fixture(scope="module")
def often() -> Iterator[Served]:
    """A server whose streams are never silent for long."""
    with scripted_server(tool_call_parser="hermes", stream_keepalive_s=0.01) as served:
        yield served


@pytest.fixture(scope="module")
def seldom() -> Iterator[Served]:
    """A server that fills no silence."""
    with scripted_server(stream_keepalive_s=1000.0) as served:
        yield served


@contextlib.contextmanager
def asked(
    client: httpx.Client, peer: Peer, path: str, *, accepts: bool = True, **fields: Any
) -> Iterator[tuple[httpx.Response, Iterator[bytes], int]]:
    """A stream of a request that the engine has accepted, its pieces, and the request's number."""
    ids: list[int] = []

    def accept() -> None:
        ids.append(peer.hear(Submit).request.id)
        if accepts:
            peer.say(Accepted(ids[0]))

    accepting = threading.Thread(target=accept)
    accepting.start()
    with client.stream("POST", path, json=BODIES[path] | {"stream": True} | fields) as reply:
        accepting.join()
        assert reply.status_code == 200
        yield reply, reply.iter_raw(), ids[0]


def until(pieces: Iterator[bytes], holds: Callable[[bytes], object]) -> bytes:
    """What came until it holds."""
    said = b""
    while not holds(said):
        said += next(pieces)
    return said


def drawn(request: int, text: str, finish: Any = None) -> Output:
    tokens = TOKENIZER.encode_plain(text)
    return Output([Delta(request, 0, tuple(tokens), finish=finish, cached=3)])


@pytest.mark.promise("C13")
@pytest.mark.parametrize("path", FIRST)
def test_the_first_event_comes_before_the_prompt_is_read(seldom: Served, path: str) -> None:
    """And nothing else does until something is drawn."""
    client, peer, _ = seldom
    with asked(client, peer, path) as (reply, pieces, request):
        said = until(pieces, lambda said: FIRST[path] in said)
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["x-accel-buffering"] == "no", "proxies pass each event on at once"
        peer.say(drawn(request, "one", "stop"))
        said += b"".join(pieces)
        assert said.count(FIRST[path]) == 1
        assert b"one" in said


@pytest.mark.promise("C13")
@pytest.mark.parametrize("path", FIRST)
def test_a_stream_is_kept_alive_while_nothing_is_drawn(often: Served, seldom: Served, path: str) -> None:
    """Before the first token and after it; what it says is what it says without."""

    def text(said: bytes) -> list[bytes]:
        return [event for event in said.split(b"\n\n") if event + b"\n\n" != KEEPALIVE[path]]

    client, peer, _ = often
    with asked(client, peer, path) as (_, pieces, request):
        said = until(pieces, lambda said: said.count(KEEPALIVE[path]) >= 3)
        peer.say(drawn(request, "one two"))
        more = until(pieces, lambda said: said.count(KEEPALIVE[path]) >= 3)
        assert b"one two" in more
        peer.say(drawn(request, " three", "stop"))
        said += more + b"".join(pieces)
        kinds = [event.split(b"\n")[0] for event in text(said)]
    client, peer, _ = seldom
    with asked(client, peer, path) as (_, pieces, request):
        peer.say(drawn(request, "one two"))
        alone = until(pieces, lambda said: b"one two" in said)
        peer.say(drawn(request, " three", "stop"))
        alone += b"".join(pieces)
    if path in ("/v1/messages", "/v1/responses"):
        assert kinds == [event.split(b"\n")[0] for event in text(alone)]
    assert len(text(said)) == len(text(alone))


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_lines_of_json_begin_with_their_headers_alone(often: Served, path: str) -> None:
    """Every line is a piece of the answer. The others of this server get their keep-alives meanwhile."""
    client, peer, _ = often
    with (
        asked(client, peer, path) as (reply, pieces, request),
        httpx.Client(base_url=client.base_url, timeout=20) as other,
    ):
        assert reply.headers["content-type"] == "application/x-ndjson"
        with asked(other, peer, "/v1/completions") as (_, comments, beside):
            until(comments, lambda said: said.count(b": keep-alive") >= 5)
            peer.say(drawn(beside, "x", "stop"))
            b"".join(comments)
        peer.say(drawn(request, "one", "stop"))
        lines = [json.loads(line) for line in b"".join(pieces).splitlines()]
        assert [line["done"] for line in lines] == [False, True]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_is_kept_alive_while_a_call_is_held_back(often: Served, path: str) -> None:
    """The parser cannot say anything of a call whose name has not ended."""
    tools: list[Any] = [NAME]
    if path == "/v1/messages":
        tools = [{"name": "look", "input_schema": NAME["function"]["parameters"]}]
    elif path == "/v1/responses":
        tools = [{"type": "function", **NAME["function"]}]
    client, peer, _ = often
    with asked(client, peer, path, tools=tools) as (_, pieces, request):
        peer.say(drawn(request, 'Yes.<tool_call>{"name": "lo'))
        until(pieces, lambda said: b"Yes." in said)
        held = until(pieces, lambda said: said.count(KEEPALIVE[path]) >= 3)
        assert b"lo" not in held
        peer.say(drawn(request, 'ok", "arguments": {"at": "it"}}</tool_call>', "stop"))
        assert b'"look"' in b"".join(pieces)


ERRORS: dict[str, Callable[[bytes], str]] = {
    "/v1/completions": lambda last: str(json.loads(last.removeprefix(b"data: "))["error"]["message"]),
    "/v1/chat/completions": lambda last: str(json.loads(last.removeprefix(b"data: "))["error"]["message"]),
    "/v1/messages": lambda last: str(json.loads(last.split(b"data: ")[1])["error"]["message"]),
    "/v1/responses": lambda last: str(json.loads(last.split(b"data: ")[1])["response"]["error"]["message"]),
    "/api/chat": lambda last: str(json.loads(last)["error"]),
    "/api/generate": lambda last: str(json.loads(last)["error"]),
}


def last_of(path: str, said: bytes) -> bytes:
    """The last event of a stream."""
    return said.strip().split(b"\n" if path.startswith("/api") else b"\n\n")[-1]


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_after_the_acceptance_is_the_last_event(seldom: Served, path: str) -> None:
    client, peer, _ = seldom
    with asked(client, peer, path) as (_, pieces, request):
        peer.say(Failed(request, "step_failed", "the step failed"))
        assert "the step failed" in ERRORS[path](last_of(path, b"".join(pieces)))


@pytest.mark.parametrize("path", ["/v1/completions", "/api/chat"])
def test_the_death_of_the_engine_while_it_reads_is_the_last_event(path: str) -> None:
    with scripted_server() as (client, peer, _), asked(client, peer, path) as (_, pieces, _):
        peer.die()
        assert "engine" in ERRORS[path](last_of(path, b"".join(pieces)))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("code", "retryable", "status"), [("invalid_value", False, 400), ("step_failed", True, 503)])
def test_a_refusal_of_the_engine_is_a_status(
    seldom: Served, path: str, code: str, retryable: bool, status: int
) -> None:
    """The engine does not accept the request."""
    client, peer, _ = seldom
    refusing = threading.Thread(
        target=lambda: peer.say(Failed(peer.hear(Submit).request.id, code, "no", None, retryable))
    )
    refusing.start()
    refused = client.post(path, json=BODIES[path] | {"stream": True})
    refusing.join()
    assert refused.status_code == status, refused.text


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_takes_long_to_accept_a_request_is_not_waited_for(often: Served, path: str) -> None:
    """An adapter may have to be read. A refusal is the last event then."""
    client, peer, _ = often
    with asked(client, peer, path, accepts=False) as (_, pieces, request):
        peer.say(Failed(request, "invalid_value", "not as it should be", "prompt", False))
        assert b"not as it should be" in b"".join(pieces)


def test_without_a_limit_nothing_fills_a_stream() -> None:
    with (
        scripted_server(stream_keepalive_s=0.0) as (client, peer, _),
        asked(client, peer, "/v1/chat/completions") as (_, pieces, request),
    ):
        peer.say(drawn(request, "one", "stop"))
        assert b"keep-alive" not in b"".join(pieces)


def test_a_submission_of_several_prompts_is_accepted_as_a_whole(seldom: Served) -> None:
    """The second is refused after the first was accepted: this is a status still."""
    client, peer, _ = seldom

    def refuse() -> None:
        peer.say(Accepted(peer.hear(Submit).request.id))
        peer.say(Failed(peer.hear(Submit).request.id, "invalid_value", "no", "prompt", False))
        peer.hear(Cancel)

    refusing = threading.Thread(target=refuse)
    refusing.start()
    assert client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": True}).status_code == 400
    refusing.join()


def test_the_usage_at_the_end_says_what_was_cached(seldom: Served) -> None:
    """Of a message, whose first event comes before anybody knows it."""
    client, peer, _ = seldom
    with asked(client, peer, "/v1/messages") as (_, pieces, request):
        peer.say(drawn(request, "one", "stop"))
        events = [json.loads(event.split(b"data: ")[1]) for event in b"".join(pieces).split(b"\n\n") if event]
    (begun,) = (event["message"]["usage"] for event in events if event["type"] == "message_start")
    (ended,) = (event["usage"] for event in events if event["type"] == "message_delta")
    assert (begun["cache_read_input_tokens"], ended["cache_read_input_tokens"]) == (0, 3)
    assert begun["input_tokens"] == ended["input_tokens"] + 3
