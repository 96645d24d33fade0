"""Chats with a model that has no chat template, as base models have none."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.engine.messages import Cancel, Output, Submit
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import Delta
from tests.api.scripted import Peer, scripted_server

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(demo.MODEL_PATH, made, ignore=shutil.ignore_patterns("chat_template.jinja"))
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[httpx.Client, Peer]]:
    with scripted_server(model=folder, stream_keepalive_s=0.05) as (client, peer, _):  # a stream begins at once
        yield client, peer


def answered(peer: Peer, text: str) -> str:
    """Let the engine say `text` until it is told to stop; the prompt to which it is the answer."""
    request = peer.hear(Submit).request
    for token in TOKENIZER.encode(text):
        peer.say(Output([Delta(request.id, 0, (token,), None, None)]))
    assert peer.hear(Cancel).request == request.id
    return TOKENIZER.decode(list(request.prompt), show_special=True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_turns_have_their_roles_and_an_answer_ends_where_the_next_turn_would_begin(
    served: tuple[httpx.Client, Peer], path: str
) -> None:
    client, peer = served
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Who is there?"},
    ]
    body = {"model": "base", "stream": True, "input" if path == "/v1/responses" else "messages": turns}
    if path == "/v1/messages":
        body["max_tokens"] = 50
    with client.stream("POST", path, json=body) as response:
        prompt = answered(peer, " Nobody.\n\nUser: and now?")
        said = response.read().decode()
    assert prompt == "User: Hello\n\nAssistant: Hi<|im_end|>\n\nUser: Who is there?\n\nAssistant:"
    assert response.is_success
    assert "Nobody." in said or all(piece in said for piece in ("N", "ob"))
    assert "User" not in said and "and now" not in said


def test_stops_of_the_request_count_too(served: tuple[httpx.Client, Peer]) -> None:
    client, peer = served
    body = {"messages": [{"role": "user", "content": "Hello"}], "stop": "###", "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        answered(peer, "Yes ### no")
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == "Yes "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_tools_need_a_template_that_knows_them(served: tuple[httpx.Client, Peer]) -> None:
    client, _ = served
    tools = [{"type": "function", "function": {"name": "f"}}]
    reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "tools": tools})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


def test_it_is_said_at_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for model, said in ((folder, 1), (demo.MODEL_PATH, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), scripted_server(model=model):
            pass
        warnings = [r for r in caplog.records if r.getMessage().startswith("this model has no chat template")]
        assert [r.levelno for r in warnings] == [logging.WARNING] * said
