"""The dialects over a scripted engine: errors in the form of each, and ends that are hard to reach."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from mlx_tandem.engine.messages import Failed, Output, Submit
from mlx_tandem.types import Delta, FinishReason
from tests.api.scripted import Peer, scripted_server

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "base", "messages": HELLO, "max_tokens": 200},
    "/v1/responses": {"model": "base", "input": "hi"},
    "/api/chat": {"model": "base", "messages": HELLO},
    "/api/generate": {"model": "base", "prompt": "hi"},
}
ERROR: dict[str, Callable[[Any], str]] = {
    "/v1/messages": lambda body: body["error"]["message"] if body["type"] == "error" else "",
    "/v1/responses": lambda body: body.get("response", body)["error"]["message"],
    "/api/chat": lambda body: body["error"],
    "/api/generate": lambda body: body["error"],
}
"""What is wrong, as each form of errors says it."""


def token(n: int) -> int:
    return 300 + n  # an ordinary token of the built-in vocabulary


@contextlib.contextmanager
def begun(client: httpx.Client, peer: Peer, path: str) -> Iterator[tuple[httpx.Response, int]]:
    """A stream whose first token the engine has drawn, and the number of the request."""
    ids: list[int] = []

    def draw() -> None:
        ids.append(peer.hear(Submit).request.id)
        peer.say(Output([Delta(ids[0], 0, (token(1),))]))

    drawing = threading.Thread(target=draw)
    drawing.start()
    with client.stream("POST", path, json=BODIES[path] | {"stream": True}) as reply:
        drawing.join()
        yield reply, ids[0]


@pytest.fixture(scope="module")
def keyed():
    with scripted_server(api_key="sesame-sesame-sesame") as (client, _, _):
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_errors_have_the_form_of_the_path(keyed: httpx.Client, path: str) -> None:
    said = ERROR[path]
    assert "API key" in said(keyed.post(path, json=BODIES[path]).json())
    key = {"x-api-key": "sesame-sesame-sesame"}
    for reply, status, words in (
        (keyed.get(path, headers=key), 405, "does not take GET"),
        (keyed.post(path, headers=key | {"content-type": "text/plain"}, content=b"{}"), 415, "application/json"),
        (keyed.post(path, headers=key, json={"nonsense": 1}), 400, ""),
        (keyed.post(path, headers=key, json=BODIES[path] | {"nonsense": 1}), 400, "nonsense is not a parameter"),
        (keyed.post(path, headers=key, json=BODIES[path] | {"model": "nobody"}), 404, "'nobody' does not exist"),
    ):
        assert reply.status_code == status, reply.text
        assert words in said(reply.json())


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_dies_during_a_stream_ends_it_with_an_error(path: str) -> None:
    with scripted_server() as (client, peer, _), begun(client, peer, path) as (reply, _):
        lines = reply.iter_lines()
        first = next(lines)
        peer.die()
        rest = [first, *lines]
        last = next(line for line in reversed(rest) if line).removeprefix("data: ")
        assert ERROR[path](json.loads(last))


def answered(client: httpx.Client, peer: Peer, path: str, body: Any, *answers: Callable[[int], Any]) -> httpx.Response:
    """The reply to a request that the engine answers with these messages, in one frame."""
    found: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: found.append(client.post(path, json=body)))
    asking.start()
    request = peer.hear(Submit).request.id
    peer.say(*(answer(request) for answer in answers))
    asking.join()
    return found[0]


@pytest.mark.parametrize("path", BODIES)
def test_a_failed_request_is_an_error_with_a_status(path: str) -> None:
    with scripted_server() as (client, peer, _):
        body = BODIES[path] | {"stream": False}
        failed = answered(client, peer, path, body, lambda i: Failed(i, "step_failed", "the step failed"))
        assert (failed.status_code, ERROR[path](failed.json())) == (503, "the step failed")
        wrong = answered(client, peer, path, body, lambda i: Failed(i, "x", "bad", "prompt", False))
        assert (wrong.status_code, ERROR[path](wrong.json()).removeprefix("prompt: ")) == (400, "bad")


@pytest.mark.parametrize(
    ("asked", "reason"), [(20_000, "model_context_window_exceeded"), (100, "max_tokens"), (1, "max_tokens")]
)
def test_the_end_of_the_context_is_not_the_end_that_was_asked_for(asked: int, reason: str) -> None:
    with scripted_server() as (client, peer, _):
        body = BODIES["/v1/messages"] | {"max_tokens": asked}

        def ends(i: int) -> Output:
            return Output([Delta(i, 0, (token(1),), finish="length")])

        assert answered(client, peer, "/v1/messages", body, ends).json()["stop_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
def test_durations_are_those_of_the_engine(stream: bool) -> None:
    """Even if the front reads all tokens at once."""
    with scripted_server() as (client, peer, _):

        def ask(*seconds: float) -> dict[str, Any]:
            """The end of the reply to a request whose tokens the engine makes at these times from now on."""
            now = time.monotonic()

            def message(i: int) -> Callable[[int], Output]:
                finish: FinishReason | None = "stop" if i == len(seconds) - 1 else None
                return lambda request: Output([Delta(request, 0, (token(i),), finish=finish)], now + seconds[i])

            messages = [message(i) for i in range(len(seconds))]
            body = BODIES["/api/chat"] | {"stream": stream}
            last: dict[str, Any] = json.loads(
                answered(client, peer, "/api/chat", body, *messages).text.splitlines()[-1]
            )
            return last

        last = ask(100, 101, 102.5)
        assert last["eval_duration"] == pytest.approx(2.5e9, abs=100)
        assert 5e10 < last["prompt_eval_duration"] <= 1e11
        assert ask(100)["eval_duration"] == 1, "clients divide the number of tokens by it"


def test_durations_of_a_stream() -> None:
    with scripted_server() as (client, peer, _), begun(client, peer, "/api/chat") as (reply, request):
        lines = reply.iter_lines()
        assert reply.headers["content-type"] == "application/x-ndjson"
        assert not json.loads(next(lines))["done"]
        peer.say(Output([Delta(request, 0, (token(2),), finish="stop")]))
        *_, last = map(json.loads, lines)
        assert last["done"] and last["eval_count"] == 2
        assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"]
        assert min(last["prompt_eval_duration"], last["eval_duration"]) > 0
