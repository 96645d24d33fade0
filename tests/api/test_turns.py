"""Conversations as agents send them, in all dialects, under a template that takes few orders of turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from mlx_tandem import demo
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import Delta
from tests.api.scripted import INFO, Peer, scripted_server
from tests.unit.generation.family_templates import ALTERNATING

CUT = '{"city": "Os'
PROMPT = (
    "[SYSTEM]Be kind.\n\nBe brief.[/SYSTEM][INST]Hi.\n\nWeather?[/INST]"
    '[call weather {"city": "Os"}][call now {}]<|im_end|>[RESULT]rain[/RESULT]'
    "[RESULT]noon\n\n<system>\nHurry.\n</system>[/RESULT]"
)
"""The prompt of every one of these requests."""


def openai_calls() -> list[dict[str, Any]]:
    given = (("c1", "weather", CUT), ("c2", "now", "null"))
    return [{"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in given]


CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": openai_calls()},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "developer", "content": "Hurry."},
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi.\n"},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"INVALID_JSON": CUT}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": None},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c2", "content": "noon"},
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
        ],
    },
    {"role": "system", "content": "Hurry."},
]
ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
    {"role": "user", "content": "Weather?"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": CUT},
    {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
    {"type": "function_call_output", "call_id": "c2", "output": "noon"},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"role": "system", "content": "Hurry."},
]
OLLAMA = [
    *CHAT[:4],
    {
        "role": "assistant",
        "tool_calls": [
            {"function": {"name": "weather", "arguments": {"INVALID_JSON": CUT}}},
            {"function": {"name": "now", "arguments": None}},
        ],
    },
    {"role": "tool", "tool_name": "now", "content": "noon"},
    {"role": "tool", "tool_name": "weather", "content": "rain"},
    {"role": "developer", "content": "Hurry."},
]
REQUESTS = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"model": "base", "max_tokens": 4, "system": "Be kind.\n", "messages": MESSAGES},
    "/v1/responses": {"model": "base", "instructions": "Be kind.\n", "input": ITEMS},
    "/api/chat": {"model": "base", "messages": OLLAMA},
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, Peer]]:
    info = msgspec.structs.replace(INFO, max_model_len=1024)
    with scripted_server(info, chat_template=ALTERNATING) as (client, peer, _):
        yield client, peer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", list(REQUESTS))
def test_what_agents_send_is_the_same_prompt_in_every_dialect(
    served: tuple[httpx.Client, Peer], path: str, stream: bool
) -> None:
    client, peer = served
    replies: list[httpx.Response] = []
    body = REQUESTS[path] | {"stream": stream}
    thread = threading.Thread(target=lambda: replies.append(client.post(path, json=body)))
    thread.start()
    request = peer.hear(Submit).request
    tokenizer = Tokenizer.load(demo.MODEL_PATH)
    peer.say(Output([Delta(request.id, 0, tuple(tokenizer.encode("Rain.")[:1]), None, "stop")]))
    thread.join()
    assert replies[0].status_code == 200
    assert tokenizer.decode(request.prompt, show_special=True) == PROMPT
