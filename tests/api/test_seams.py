"""What comes later is a new file: a parser and a dialect from outside of the package, served by the real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.routes import ROUTES
from mlx_tandem.engine.messages import Failed, Output, Submit
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.server.app import create_app
from mlx_tandem.types import Delta
from tests.api.scripted import Peer, scripted_server
from tests.toys.dialect.routes import ROUTES as TOY
from tests.toys.parser import ToyParser

ROOT = Path(__file__).resolve().parents[2]


class ParsingFront(ServerFront):
    """A front whose model thinks and calls tools in the toy format."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.parser = ToyParser


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[httpx.Client, Peer]]:
    """A server with the toy dialect and the toy parser."""
    monkeypatch.setattr("mlx_tandem.server.serve.create_app", partial(create_app, routes=(*ROUTES, *TOY)))
    monkeypatch.setattr("tests.api.scripted.ServerFront", ParsingFront)
    with scripted_server() as (client, peer, _):
        yield client, peer


def answered(
    client: httpx.Client, peer: Peer, path: str, body: object, text: str, fails: bool = False
) -> httpx.Response:
    """The reply to a request to which the model says `text`, token by token; with `fails`, its step fails then."""
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(client.post(path, json=body)))
    thread.start()
    request = peer.hear(Submit).request
    ids = Tokenizer.load(demo.MODEL_PATH).encode_plain(text)
    for i, token in enumerate(ids):
        ends = i == len(ids) - 1 and not fails
        peer.say(Output([Delta(request.id, 0, (token,), None, "stop" if ends else None)]))
    if fails:
        peer.say(Failed(request.id, "step_failed", "the step failed"))
    thread.join()
    return replies[0]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SAID = "<think>two sums</think>So [add:1, 2][add:3]"
CALLS = [("add", "1, 2"), ("add", "3")]


def test_a_parser_of_one_file_is_heard_in_a_whole_chat(served: tuple[httpx.Client, Peer]) -> None:
    reply = answered(*served, "/v1/chat/completions", CHAT, SAID).json()["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    message = reply["message"]
    assert (message["content"], message["reasoning_content"]) == ("So ", "two sums")
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == CALLS


def test_a_parser_of_one_file_is_heard_in_a_streamed_chat(served: tuple[httpx.Client, Peer]) -> None:
    response = answered(*served, "/v1/chat/completions", CHAT | {"stream": True}, SAID)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(d.get("content", "") for d in deltas) == "So "
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "two sums"
    calls: list[tuple[str, str]] = []
    for call in [call for d in deltas for call in d.get("tool_calls", ())]:
        if "id" in call:
            assert call["index"] == len(calls) and call["type"] == "function"
            calls.append((call["function"]["name"], ""))
        else:
            name, arguments = calls[call["index"]]
            calls[call["index"]] = name, arguments + call["function"]["arguments"]
    assert calls == CALLS
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_text_completions_have_no_parser(served: tuple[httpx.Client, Peer]) -> None:
    reply = answered(*served, "/v1/completions", {"prompt": "x"}, SAID)
    assert reply.json()["choices"][0]["text"] == SAID


def test_a_dialect_of_two_files_answers_whole_and_streamed(served: tuple[httpx.Client, Peer]) -> None:
    whole = answered(*served, "/toy", {"after": "x"}, "one two.")
    assert (whole.status_code, whole.text) == (200, "0 said one two.\n")
    streamed = answered(*served, "/toy", {"after": "x", "stream": True}, "one.")
    lines = streamed.text.splitlines()
    assert "".join(line.removeprefix("0 says ") for line in lines if "says" in line) == "one."
    assert lines[-2:] == ["0 ends by stop", f"{len(Tokenizer.load(demo.MODEL_PATH).encode_plain('one.'))} tokens"]


def test_errors_of_a_dialect_are_in_its_own_words(served: tuple[httpx.Client, Peer]) -> None:
    client, peer = served
    wrong = client.post("/toy", json={"after": 5})
    assert (wrong.status_code, wrong.text) == (400, "wrong: invalid_type in after\n")
    broken = answered(client, peer, "/toy", {"after": "x", "stream": True}, "one", fails=True)
    assert broken.text.splitlines()[-1] == "wrong: step_failed in None"
    elsewhere = client.post("/v1/chat/completions", json={"messages": 5})
    assert elsewhere.json()["error"]["param"] == "messages", "others keep theirs"


def test_a_dialect_is_described_like_any_other(served: tuple[httpx.Client, Peer]) -> None:
    client, _ = served
    document = client.get("/openapi.json").json()
    assert document["paths"]["/toy"]["post"]["requestBody"]["required"]
    assert set(document["components"]["schemas"]["ToyBody"]["properties"]) == {"after", "stream"}


NEW_PARAMETER = {
    "limits.py": ('    "min_p": Range(0.0, 1.0),\n', '    "toy": Range(0.0, 1.0),\n'),
    "types.py": ("    xtc_kept: tuple[int, ...] = ()", "    toy: float = 0.25  #"),
    "generation/sampling.py": (
        '    min_p: Annotated[float, bounds("min_p")] | None = None\n',
        '    toy: Annotated[float, bounds("toy")] | None = None\n',
    ),
}
"""All that a sampling parameter needs on its way to the engine: a line in each of these files, before or behind one
that is there. The sampler that draws with it is the fourth file."""

TRY_IT = """
import threading
from tests.api.scripted import scripted_server
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.types import Delta

with scripted_server() as (client, peer, _):
    drawn = []
    def chat(**fields):
        return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]} | fields)
    for fields in ({}, {"toy": 0.5}, {"toy": None}):
        thread = threading.Thread(target=chat, kwargs=fields)
        thread.start()
        request = peer.hear(Submit).request
        drawn.append(request.params.toy)
        peer.say(Output([Delta(request.id, 0, (300,), None, "stop")]))
        thread.join()
    print(drawn, chat(toy=7).json()["error"]["message"], chat(toy="x").json()["error"]["message"], sep="; ")
"""


def test_a_sampling_parameter_is_a_line_in_three_files_and_the_sampler(tmp_path: Path) -> None:
    """Tried on a copy of the package that has one more."""
    package = tmp_path / "mlx_tandem"
    shutil.copytree(ROOT / "mlx_tandem", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (there, new) in NEW_PARAMETER.items():
        file = package / name
        text = file.read_text(encoding="utf-8")
        assert text.count(there) == 1, f"{name} has another line now"
        both = f"{there}{new}" if there.endswith("\n") else f"{new}\n{there}"
        file.write_text(text.replace(there, both), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-c", TRY_IT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    words = "[0.25, 0.5, 0.25]; toy must be a number between 0 and 1; toy must be a number"
    assert run.stdout.strip() == words, run.stderr
