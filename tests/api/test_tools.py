"""Tools and reasoning over HTTP: what models write in their own forms, and what is refused in words."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.engine.messages import Cancel, Output, Submit
from mlx_tandem.errors import ModelError
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import Delta
from tests.api.scripted import Peer, scripted_server

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
ASKED = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TWO = f"So.\n{ADD}\n{NOW}"


def replied(client: httpx.Client, peer: Peer, body: dict[str, Any], text: str, *, ends: bool = True) -> httpx.Response:
    """The reply to a request to which the model says `text`, token by token."""
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(client.post("/v1/chat/completions", json=body)))
    thread.start()
    request = peer.hear(Submit).request
    ids = Tokenizer.load(demo.MODEL_PATH).encode(text)
    for i, token in enumerate(ids):
        finish = "stop" if ends and i == len(ids) - 1 else None
        peer.say(Output([Delta(request.id, 0, (token,), None, finish)]))
    if not ends:
        assert peer.hear(Cancel).request == request.id
    thread.join()
    return replies[0]


def test_calls_and_text_are_told_apart() -> None:
    with scripted_server() as (client, peer, _):
        choice = replied(client, peer, ASKED, TWO).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "So.\n"
        calls = choice["message"]["tool_calls"]
        assert [call["function"] for call in calls] == [
            {"name": "add", "arguments": '{"a": 1}'},
            {"name": "now", "arguments": "{}"},
        ]
        assert [call["type"] for call in calls] == ["function"] * 2
        broken = replied(client, peer, ASKED, "<tool_call>\n{now: name}\n</tool_call>").json()["choices"][0]
        assert broken["message"]["content"] == "<tool_call>\n{now: name}\n</tool_call>"
        assert broken["finish_reason"] == "stop" and "tool_calls" not in broken["message"]
        without = replied(client, peer, {"messages": ASKED["messages"]}, TWO).json()["choices"][0]
        assert without["message"]["content"] == TWO, "a request without tools has no calls"


def test_one_call_at_most_ends_the_answer_in_the_engine() -> None:
    with scripted_server() as (client, peer, _):
        body = ASKED | {"parallel_tool_calls": False}
        choice = replied(client, peer, body, f"{TWO} and more", ends=False).json()["choices"][0]
        assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


def test_reasoning_that_nobody_wants_to_see() -> None:
    with scripted_server() as (client, peer, _):
        body = {"messages": ASKED["messages"], "include_reasoning": False}
        text = "<think>two sums</think>\n\nSo 4."
        message = replied(client, peer, body, text).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "So 4.", "refusal": None}
        assert "two" not in replied(client, peer, body | {"stream": True}, text).text


def test_forms_that_are_chosen_by_name() -> None:
    loose = {"messages": ASKED["messages"], "tools": [TOOLS[0], {"type": "function", "function": {"name": "now"}}]}
    with scripted_server(tool_call_parser="pythonic", reasoning_parser="none") as (client, peer, _):
        message = replied(client, peer, loose, "[add(a=1), now()]").json()["choices"][0]["message"]
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 1}, {}]
        message = replied(client, peer, loose, "<think>x</think>").json()["choices"][0]["message"]
        assert message["content"] == "<think>x</think>"
    with scripted_server(tool_call_parser="none") as (client, _, _):
        error = client.post("/v1/chat/completions", json=ASKED).json()["error"]
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]


def test_a_template_that_knows_no_tools() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools #}"
    with scripted_server(chat_template=template) as (client, _, _):
        response = client.post("/v1/chat/completions", json=ASKED)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
        assert error["message"] == "tool calling needs a chat template that knows tools; this model's does not"


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{% if x %}</think>{% endif %}"


def test_a_thought_that_the_template_begins() -> None:
    with scripted_server(chat_template=THINKS) as (client, peer, _):
        body = {"messages": ASKED["messages"]}
        message = replied(client, peer, body, "two sums\n</think>\n\nSo 4.").json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("two sums", "So 4.")
        message = replied(client, peer, body | {"chat_template_kwargs": {"x": 1}}, "So 4.").json()["choices"][0][
            "message"
        ]
        assert message["content"] == "So 4." and "reasoning" not in message
        for wish in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
            error = client.post("/v1/chat/completions", json=body | wish).json()["error"]
            assert error["param"] in wish and "cannot switch" in error["message"]


EFFORT = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_an_effort_reaches_a_template_that_knows_it() -> None:
    with scripted_server(chat_template=EFFORT) as (client, _, _):
        said = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
        plain = client.post("/tokenize", json=said).json()
        high = client.post("/tokenize", json=said | {"chat_template_kwargs": {"reasoning_effort": "high"}}).json()
        assert "".join(high["token_strs"]) == "high" + "".join(plain["token_strs"])


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tool_choice", {"type": "function", "function": {"name": "sub"}}, "tool_choice"),
        ("tool_choice", {"type": "function", "function": {}}, "tool_choice.function.name"),
        ("tool_choice", {"type": "allowed_tools"}, "tool_choice.type"),
        ("tools", [{"type": "function"}], "tools[0].function"),
        ("tools", [{"type": "function", "function": {}}], "tools[0].function.name"),
        ("tools", [{"type": "function", "function": {"name": "x", "parameters": []}}], "tools[0].function.parameters"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("functions", [{"name": "x"}], "functions"),
        ("parallel_tool_calls", "no", "parallel_tool_calls"),
        ("thinking_token_budget", -1, "thinking_token_budget"),
    ],
)
def test_what_is_refused_is_named(server, field, value, param):
    response = server.chat("hi", **(ASKED | {field: value}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_name_of_a_form_that_does_not_exist() -> None:
    expected = pytest.raises(ModelError, match="tool_call_parser must be one of auto, none, ")
    with expected, scripted_server(tool_call_parser="nobody"):
        pass


def test_calls_that_cannot_be_enforced() -> None:
    body = {"messages": ASKED["messages"], "tools": TOOLS[:1]}
    with scripted_server(tool_call_parser="qwen3_coder") as (client, _, _):
        error = client.post("/v1/chat/completions", json=body | {"tool_choice": "required"}).json()["error"]
        assert error["param"] == "tool_choice" and "cannot be enforced" in error["message"]
        error = client.post("/v1/chat/completions", json=ASKED).json()["error"]
        assert error["param"] == "tools" and "cannot be enforced" in error["message"]
