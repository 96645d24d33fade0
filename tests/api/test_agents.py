"""What coding agents send, over a scripted engine: the parts of recorded requests of Claude Code and Codex that differ
from what other clients send.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import Delta, Request
from tests.api.scripted import INFO, Peer, scripted_server

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
VERSION = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,advanced-tool-use-2025-11-20"}
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, Peer]]:
    with scripted_server(structs.replace(INFO, max_model_len=8192, num_blocks=2048)) as (client, peer, _):
        yield client, peer


def answered(
    served: tuple[httpx.Client, Peer], path: str, body: Any, said: str = "Yes."
) -> tuple[httpx.Response, Request]:
    """The reply of a model that says this, and what the engine was asked."""
    client, peer = served
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(client.post(path, json=body, headers=VERSION)))
    thread.start()
    request = peer.hear(Submit).request
    ids = TOKENIZER.encode_plain(said)
    for i, token in enumerate(ids):
        peer.say(Output([Delta(request.id, 0, (token,), None, "stop" if i == len(ids) - 1 else None)]))
    thread.join()
    return replies[0], request


def prompt(request: Request) -> str:
    """The prompt as text."""
    return TOKENIZER.decode(list(request.prompt), show_special=True)


BASH = {"name": "Bash", "description": "Runs a command.", "input_schema": {"type": "object", "properties": {}}}
FETCH = {
    "name": "WebFetch",
    "description": "Fetches a page.",
    "input_schema": {"type": "object"},
    "defer_loading": True,
}


def claude(*messages: Any, cch: str = "00000", tools: Any = (BASH,), **more: Any) -> dict[str, Any]:
    """A request of Claude Code."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.84c; cc_entrypoint=sdk-cli; cch={cch};"
    system = [
        {"type": "text", "text": billing},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ]
    return {
        "model": "base",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Look."}]}, *messages],
        "system": system,
        "tools": [*tools],
        "metadata": {"user_id": "{}"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **more,
    }


def used(name: str, *content: Any) -> list[dict[str, Any]]:
    """A call of a tool, and its result."""
    call = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [*content]}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def test_the_billing_header_of_claude_code_does_not_break_the_prefix(served: tuple[httpx.Client, Peer]) -> None:
    first, second = (answered(served, "/v1/messages", claude(cch=cch))[1] for cch in ("3a7f1", "c0ffe"))
    assert first.prompt == second.prompt
    assert "You are an agent." in prompt(first) and "billing" not in prompt(first)
    counted = served[0].post("/v1/messages/count_tokens", json={"messages": [], **without(claude())})
    assert counted.json()["input_tokens"] == len(first.prompt)


def without(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that a request for a number of tokens may have."""
    return {name: value for name, value in body.items() if name not in ("stream", "max_tokens", "metadata")}


def test_a_thread_is_refused_as_the_tool_runners_expect(served: tuple[httpx.Client, Peer]) -> None:
    """They then go on without one if they were told to; the test of the clients has the packages themselves."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        for path, body in (("/v1/messages", claude()), ("/v1/messages", {"messages": [], "max_tokens": 5})):
            reply = served[0].post(path, json=body | {"thread": thread}, headers=VERSION)
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    other = served[0].post("/v1/messages", json=claude(container="x"), headers=VERSION)
    assert "details" not in other.json()["error"]


def test_tools_that_anthropic_runs_are_left_out_and_named_in_a_header(served: tuple[httpx.Client, Peer]) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    ran = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "So."}]
    history = ({"role": "assistant", "content": ran}, {"role": "user", "content": "And?"})
    for stream in (False, True):
        body = claude(*history, tools=[search, BASH], stream=stream)
        reply, request = answered(served, "/v1/messages", body)
        assert reply.status_code == 200, reply.text
        skipped = "tools[0] web_search_20250305, messages[1].content[0] server_tool_use"
        assert reply.headers["x-tandem-skipped"] == skipped
        assert "Bash" in prompt(request) and "web_search" not in prompt(request)
    assert "x-tandem-skipped" not in answered(served, "/v1/messages", claude())[0].headers


def test_deferred_tools_and_references_to_them(served: tuple[httpx.Client, Peer]) -> None:
    reference = {"type": "tool_reference", "tool_name": "WebFetch"}
    _, request = answered(served, "/v1/messages", claude(*used("ToolSearch", reference), tools=[BASH, FETCH]))
    assert "Fetches a page." in prompt(request)
    assert "The tool WebFetch can be called now." in prompt(request)


def test_an_image_of_a_result_is_words_to_a_model_without_eyes(served: tuple[httpx.Client, Peer]) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    reply, request = answered(served, "/v1/messages", claude(*used("Read", image)))
    assert reply.status_code == 200, reply.text
    assert "this model cannot see" in prompt(request)
    own = claude({"role": "user", "content": [image]})
    assert served[0].post("/v1/messages", json=own, headers=VERSION).status_code == 400, "one of the user is refused"


RUN = {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}


def codex(
    *items: Any, tools: Any = (RUN, PATCH, {"type": "web_search", "external_web_access": True})
) -> dict[str, Any]:
    """A request of Codex."""
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]}
    return {
        "model": "base",
        "stream": True,
        "input": [{"type": "message", "role": "developer", "content": "You are an agent."}, said, *items],
        "tools": [*tools],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "context": "all_turns", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-turn-metadata": "{}"},
    }


def test_tools_that_openai_runs_are_left_out_and_named_in_a_header(served: tuple[httpx.Client, Peer]) -> None:
    ran = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
    reply, request = answered(served, "/v1/responses", codex(ran))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tandem-skipped"] == "tools[2] web_search, input[2] web_search_call"
    assert "exec_command" in prompt(request) and "web_search" not in prompt(request)


def called(reply: httpx.Response) -> list[dict[str, Any]]:
    """The items of a streamed response."""
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    items: list[dict[str, Any]] = events[-1]["response"]["output"]
    return items


def test_a_custom_tool_is_called_with_a_text(served: tuple[httpx.Client, Peer]) -> None:
    said = json.dumps({"name": "apply_patch", "arguments": {"input": "*** Begin\n+é"}})
    reply, _ = answered(served, "/v1/responses", codex(), f"<tool_call>\n{said}\n</tool_call>")
    (item,) = called(reply)
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+é")
    assert item["id"].startswith("ctc_") and "response.custom_tool_call_input.done" in reply.text
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "patched"}
    _, request = answered(served, "/v1/responses", codex(item, result))
    assert "*** Begin" in prompt(request) and "patched" in prompt(request)


def test_tools_among_the_items_are_offered(served: tuple[httpx.Client, Peer]) -> None:
    """Codex sends them so to models that it knows."""
    group = {"type": "namespace", "name": "functions", "tools": [PATCH, RUN, {"type": "local_shell"}]}
    added = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [group]}
    said = json.dumps({"name": "exec_command", "arguments": {}})
    reply, request = answered(served, "/v1/responses", codex(added, tools=()), f"<tool_call>\n{said}\n</tool_call>")
    (item,) = called(reply)
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "exec_command", "functions")
    assert "apply_patch" in prompt(request)
    assert reply.headers["x-tandem-skipped"] == "input[2].tools[0].tools[2] local_shell"


def test_an_image_of_an_output_is_words_to_a_model_without_eyes(served: tuple[httpx.Client, Peer]) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "view_image", "arguments": "{}"}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "high"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [image]}
    _, request = answered(served, "/v1/responses", codex(call, output))
    assert "this model cannot see" in prompt(request)


def test_fields_of_chats_that_responses_have_too(served: tuple[httpx.Client, Peer]) -> None:
    body = {"input": "hi", "repetition_penalty": 1.5, "chat_template_kwargs": {"enable_thinking": False}}
    _, request = answered(served, "/v1/responses", body)
    assert request.params.repetition_penalty == 1.5
    chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": False}}
    assert answered(served, "/v1/chat/completions", chat)[1].prompt == request.prompt
    for field, value, param in (
        ("repetition_penalty", 11, "repetition_penalty"),
        ("repetition_penalty", "a", "repetition_penalty"),
        ("chat_template_kwargs", {"messages": 1}, "chat_template_kwargs.messages"),
        ("chat_template_kwargs", {"enable_thinking": 1}, "chat_template_kwargs.enable_thinking"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
    ):
        for path, least in (("/v1/responses", {"input": "hi"}), ("/v1/chat/completions", chat)):
            reply = served[0].post(path, json=least | {field: value})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
