"""What models write, through a whole server and every dialect: a real model says it token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import scripted_model
from tests.scripted_model import Script
from tests.serving import RunningServer, serving
from tests.unit.generation.reading_tools import calls_of, text_of
from tests.unit.generation.tools.test_written_calls import BROKEN, OFFERED, STOP, WRITE, read
from tests.unit.generation.tools.writing import WRITERS, Call

CODE: Call = ("write", {"content": 'r = "</parameter>"\nx = "<think>"\nprint(1)\n', "path": "a.py"})
WRITTEN = WRITERS["qwen3_coder"]([CODE])
SAYS = {
    "one": WRITTEN,
    "two": f"I do both.\n{WRITERS['qwen3_coder']([WRITE, STOP])}",
    "thought": f"<think>\nI write it. END\n</think>\n\n{WRITTEN}",
    "unclosed": f"<think>\nI write it.\n{WRITTEN}",
    "open": WRITTEN.removesuffix("\n</parameter>\n</function>\n</tool_call>"),
    "json": WRITERS["hermes"]([CODE, STOP]),
    "mention": "A call begins with <tool_call> and <function=write>, and a thought with <think>.",
    "broken": f"{BROKEN['qwen3_coder']} END or not",
    "literals": "<tool_call><function=write><parameter=tags>['a', True, None,]</parameter></function></tool_call>",
}
THOUGHTS = {"thought": "I write it. END", "unclosed": "I write it."}
SIGNS = "<tool_call>\n<function=example> <think></think>"


@pytest.fixture(scope="module")
def says(scripted_folder: Callable[[Script], Path]) -> Iterator[RunningServer]:
    special = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    with serving(
        scripted_model.config(scripted_folder(Script(SAYS, signs=SIGNS, special=special, context=4096)))
    ) as up:
        yield up


def expected(key: str) -> tuple[str, str, list[Call]]:
    """The thought, the text and the calls, as the parser alone finds them."""
    text = SAYS[key]
    if key in THOUGHTS:
        text = WRITTEN
    found = read("qwen3_coder", text)
    return THOUGHTS.get(key, ""), text_of(found), calls_of(found)


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            line = line.removeprefix("data: ") if line.startswith("data: ") else line if path[1:4] == "api" else ""
            if line and line != "[DONE]":
                yield json.loads(line)


def asked(key: str, **fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [{"role": "user", "content": key}], "temperature": 0} | fields


def by_chat(client: httpx.Client, key: str, stream: bool) -> tuple[str, str, list[Call]]:
    body = asked(key, tools=OFFERED, max_tokens=2000)
    if not stream:
        reply = client.post("/v1/chat/completions", json=body).json()
        message = reply["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert (reply["choices"][0]["finish_reason"] == "tool_calls") == bool(calls)
        thought, text = message.get("reasoning_content") or "", message["content"] or ""
        return thought, text, [(call["name"], json.loads(call["arguments"])) for call in calls]
    thought, text, named = "", "", dict[int, list[str]]()
    for event in events(client, "/v1/chat/completions", body):
        for choice in event["choices"]:
            delta = choice["delta"]
            thought += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                one = named.setdefault(call["index"], ["", ""])
                one[0] += call["function"].get("name") or ""
                one[1] += call["function"].get("arguments") or ""
    return thought, text, [(name, json.loads(arguments)) for name, arguments in named.values()]


def by_messages(client: httpx.Client, key: str, stream: bool) -> tuple[str, str, list[Call]]:
    tools = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"] | {"type": "object"}}
        for one in OFFERED
    ]
    body = asked(key, tools=tools, max_tokens=2000)
    if not stream:
        blocks = client.post("/v1/messages", json=body).json()["content"]
        return (
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        )
    made: list[list[str]] = []
    for event in events(client, "/v1/messages", body):
        if event["type"] == "content_block_start":
            made.append([event["content_block"]["type"], event["content_block"].get("name", ""), ""])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            made[-1][2] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
    return (
        "".join(text for kind, _, text in made if kind == "thinking"),
        "".join(text for kind, _, text in made if kind == "text"),
        [(name, json.loads(text or "{}")) for kind, name, text in made if kind == "tool_use"],
    )


def by_responses(client: httpx.Client, key: str, stream: bool) -> tuple[str, str, list[Call]]:
    tools = [{"type": "function", "strict": False} | one["function"] for one in OFFERED]
    body = {"input": key, "tools": tools, "temperature": 0, "max_output_tokens": 2000, "store": False}
    if stream:
        output = [event for event in events(client, "/v1/responses", body) if event["type"] == "response.completed"]
        items = output[-1]["response"]["output"]
    else:
        items = client.post("/v1/responses", json=body).json()["output"]
    parts = [part for item in items if item["type"] in ("reasoning", "message") for part in item["content"]]
    return (
        "".join(part["text"] for part in parts if part["type"] == "reasoning_text"),
        "".join(part["text"] for part in parts if part["type"] == "output_text"),
        [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"],
    )


def by_ollama(client: httpx.Client, key: str, stream: bool) -> tuple[str, str, list[Call]]:
    body = asked(key, tools=OFFERED, options={"num_predict": 2000, "temperature": 0}, think=True)
    del body["temperature"]
    if stream:
        messages = [event["message"] for event in events(client, "/api/chat", body)]
    else:
        messages = [client.post("/api/chat", json=body | {"stream": False}).json()["message"]]
    return (
        "".join(message.get("thinking") or "" for message in messages),
        "".join(message.get("content") or "" for message in messages),
        [(c["function"]["name"], c["function"]["arguments"]) for m in messages for c in m.get("tool_calls") or ()],
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [by_chat, by_messages, by_responses, by_ollama])
@pytest.mark.parametrize("key", SAYS)
def test_a_text_comes_out_right(says: RunningServer, key: str, ask: Any, stream: bool) -> None:
    assert ask(says.client, key, stream) == expected(key)


def test_stop_strings_end_the_content_and_not_a_thought_or_a_call(says: RunningServer) -> None:
    for key in ("thought", "one"):
        reply = says.client.post("/v1/chat/completions", json=asked(key, tools=OFFERED, stop=["END", "print"])).json()
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
    reply = says.client.post("/v1/chat/completions", json=asked("broken", tools=OFFERED, stop=["END"])).json()
    assert reply["choices"][0]["message"]["content"] == BROKEN["qwen3_coder"] + " "


def test_a_limit_of_tokens_leaves_the_arguments_as_they_came(says: RunningServer) -> None:
    body = asked("one", tools=OFFERED, max_tokens=20)
    choice = says.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert json.dumps(CODE[1]).startswith(call["function"]["arguments"]) and "content" in call["function"]["arguments"]
