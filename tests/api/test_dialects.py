"""The dialects over a scripted engine: errors in the form of each, and ends that are hard to reach."""

from __future__ import annotations

import contextlib
import json
import re
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


def openai(body: Any) -> str:
    """What is wrong, as OpenAI's form says it."""
    return str(body["error"]["message"]) if "code" in body["error"] else ""


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/pull", ERROR["/api/chat"]),
        ("/api/tags/", ERROR["/api/chat"]),
        ("/api", ERROR["/api/chat"]),
        ("/v1/messages/batches", ERROR["/v1/messages"]),
        ("/apix", openai),
        ("/v1/messagesx", openai),
        ("/v1/nothing", openai),
        ("/", openai),
    ],
)
def test_unknown_routes_and_methods_have_the_form_of_their_prefix(
    keyed: httpx.Client, path: str, said: Callable[[Any], str]
) -> None:
    key = {"x-api-key": "sesame-sesame-sesame"}
    for method in ("GET", "POST", "PUT", "DELETE"):
        reply = keyed.request(method, path, headers=key)
        assert (reply.status_code, said(reply.json())) == (404, f"there is no {method} {path!r}")
    assert "API key" in said(keyed.get(path).json())


@pytest.mark.parametrize(
    ("path", "said"), [("/api/tags", ERROR["/api/chat"]), ("/v1/messages/count_tokens", ERROR["/v1/messages"])]
)
def test_wrong_methods_have_the_form_of_their_prefix(
    keyed: httpx.Client, path: str, said: Callable[[Any], str]
) -> None:
    reply = keyed.put(path, headers={"x-api-key": "sesame-sesame-sesame"})
    assert (reply.status_code, "does not take PUT" in said(reply.json())) == (405, True)


ALL: dict[str, dict[str, Any]] = BODIES | {
    "/v1/chat/completions": {"model": "base", "messages": HELLO},
    "/v1/completions": {"model": "base", "prompt": "hi"},
}


@pytest.mark.parametrize("path", [*ALL, "/v1/messages/count_tokens", "/api/embed", "/api/embeddings", "/v1/models/{}"])
def test_the_refusal_of_an_unknown_model_names_those_that_exist(keyed: httpx.Client, path: str) -> None:
    key = {"x-api-key": "sesame-sesame-sesame"}
    body = {name: value for name, value in BODIES["/v1/messages"].items() if name != "max_tokens"}
    body = ALL.get(path) or {"/v1/messages/count_tokens": body}.get(path) or {"model": "base", "prompt": "hi"}
    if path == "/api/embed":
        body = {"model": "base", "input": "hi"}
    if path.endswith("{}"):
        reply = keyed.get(path.format("nobody"), headers=key)
    else:
        reply = keyed.post(path, headers=key, json=body | {"model": "nobody"})
    said = reply.json()["error"]
    words = said if isinstance(said, str) else said["message"]
    assert reply.status_code == 404
    assert "Models here: 'base'. The model may be left out: then 'base' answers" in words


def test_a_refusal_lists_few_of_many_models() -> None:
    names = ("x" * 200, *(f"name-{i}" for i in range(20)))
    with scripted_server(served_model_names=names) as (client, _, _):
        words = client.post("/v1/completions", json={"model": "nobody", "prompt": "hi"}).json()["error"]["message"]
    assert "'name-6' and 14 more. The model" in words
    assert "x" * 141 not in words and "name-7" not in words


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages/count_tokens", "/api/embed", "/api/embeddings"])
def test_a_request_may_leave_the_model_out(path: str) -> None:
    """The base answers it."""
    with scripted_server() as (client, peer, _):
        if path == "/v1/messages/count_tokens":
            assert client.post(path, json={"messages": HELLO}).json()["input_tokens"] > 0
            return
        if path.startswith("/api/embed"):
            assert client.post(path, json={}).status_code == 200
            return
        body = {name: value for name, value in BODIES[path].items() if name != "model"} | {"stream": False}

        def ends(i: int) -> Output:
            return Output([Delta(i, 0, (token(1),), finish="stop")])

        reply = answered(client, peer, path, body, ends)
        assert (reply.status_code, reply.json()["model"]) == (200, "base")


LONG = "word " * 300
OVER: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "base", "messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
    "/v1/responses": {"model": "base", "input": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": [300] * 256},
    "/api/chat": {"model": "base", "messages": [{"role": "user", "content": LONG}]},
    "/api/generate": {"model": "base", "prompt": LONG},
}
"""Requests whose prompt does not fit. INFO's context has 256 tokens."""


@pytest.fixture(scope="module")
def small():
    with scripted_server() as (client, _, _):
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", OVER)
def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_the_dialect(
    small: httpx.Client, path: str, stream: bool
) -> None:
    reply = small.post(path, json=OVER[path] | {"stream": stream})
    error = reply.json()["error"]
    assert reply.status_code == 400
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        assert re.fullmatch(r"prompt is too long: (\d+) tokens > 255 maximum", error["message"])
        return
    words = error if isinstance(error, str) else error["message"]
    assert re.search(
        r"This model's maximum context length is 256 tokens\. However, your prompt resulted in \d+ ", words
    )
    if path.startswith("/v1"):
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"model": "base", "input": "hi", "max_output_tokens": 300}, "max_output_tokens"),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 300}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 300}, "max_tokens"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_in_the_same_words(
    small: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = small.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    found = re.match(
        r"This model's maximum context length is 256 tokens\. However, you requested (\d+) tokens "
        r"\((\d+) in the messages, 300 in the completion\)",
        error["message"],
    )
    assert found is not None and int(found[1]) == int(found[2]) + 300


def test_the_server_s_own_limits_are_told_as_such() -> None:
    with scripted_server(max_prompt_tokens=100, max_generation_tokens=20) as (client, _, _):
        body: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "a " * 150}]}
        long = client.post("/v1/messages", json=body | {"max_tokens": 5})
        assert long.json()["error"]["message"].endswith("> 100 maximum")
        error = client.post("/v1/completions", json={"prompt": [300], "max_tokens": 30}).json()["error"]
        assert error["message"] == "max_tokens is 30, and 20 are allowed here"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"])
def test_ollama_s_routes_take_json_as_octets(small: httpx.Client, path: str) -> None:
    """LiteLLM's asynchronous client sends it so. Nothing else takes it."""
    octets = {"content-type": "application/octet-stream"}
    assert small.post(path, content=b'{"model": "base"}', headers=octets).status_code == 200
    assert small.post(path, headers=octets).status_code == 400, "the body is missing"
    for other in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/training/stop"):
        assert small.post(other, content=b"{}", headers=octets).status_code == 415


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


@pytest.mark.promise("FLT-02")
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
