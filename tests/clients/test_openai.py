"""The `openai` package, unmodified."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client):
    reply = client.chat.completions.create(model="tandem-demo", messages=QUESTION, temperature=0, max_tokens=24)
    assert reply.choices[0].message.content == "17 + 25 = 42."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = [*QUESTION, reply.choices[0].message, {"role": "user", "content": "What is 1 + 2?"}]
    reply = client.chat.completions.create(model="shout", messages=again, temperature=0, max_completion_tokens=24)
    assert reply.choices[0].message.content == "1 + 2 = 3!"


NEXT = {"role": "user", "content": "What is 1 + 2?"}


@pytest.mark.parametrize("form", ["object", "dump", "set", "json"])
def test_a_second_turn_with_what_came_back(client, form):
    """The message as the package gives it, with keys of other servers among it."""
    reply = client.chat.completions.create(model="shout", messages=QUESTION, temperature=0, max_tokens=24)
    message = reply.choices[0].message
    message.annotations = []
    back = {
        "object": lambda: message,
        "dump": lambda: message.model_dump(),
        "set": lambda: message.model_dump(exclude_unset=True) | {"reasoning_content": None, "id": reply.id},
        "json": lambda: json.loads(reply.to_json())["choices"][0]["message"],
    }[form]()
    again = client.chat.completions.create(
        model="shout", messages=[*QUESTION, back, NEXT], temperature=0, max_completion_tokens=24
    )
    assert again.choices[0].message.content == "1 + 2 = 3!"


def test_a_turn_of_tools_in_the_history(client):
    """As the package's own helper builds it out of another server's reply."""
    call = ChatCompletionMessageFunctionToolCall(
        id="call_1", type="function", function={"name": "add", "arguments": '{"a": 17, "b": 25}'}
    )
    said = ChatCompletionMessage(role="assistant", content=None, tool_calls=[call])
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    reply = client.chat.completions.create(
        model="base", messages=[*QUESTION, said, result], temperature=0, max_tokens=24
    )
    assert reply.choices[0].message.content


def test_parameters_that_change_nothing(client):
    plain = client.chat.completions.create(model="base", messages=QUESTION, temperature=0, max_tokens=24)
    reply = client.chat.completions.create(
        model="base",
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        functions=[],
        function_call="none",
        modalities=["text"],
        parallel_tool_calls=True,
        prediction=None,
        prompt_cache_key="k",
        reasoning_effort=None,
        response_format={"type": "text"},
        safety_identifier="u",
        service_tier="auto",
        store=False,
        verbosity="medium",
    )
    assert reply.choices[0].message.content == plain.choices[0].message.content
    assert reply.system_fingerprint == plain.system_fingerprint


def test_streaming_chat(client):
    stream = client.chat.completions.create(
        model="json", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == '{"answer": 42}'
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def test_usage_in_every_event(client):
    stream = client.chat.completions.create(
        model="json",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts) and counts[-1] > 3


def test_the_stream_helper(client):
    with client.chat.completions.stream(model="base", messages=QUESTION, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "17 + 25 = 42."


def test_completions(client):
    reply = client.completions.create(model="base", prompt=["3 4 5", "Once"], n=2, max_tokens=4, temperature=0)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    chunks = list(client.completions.create(model="base", prompt="3 4 5", max_tokens=4, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == reply.choices[0].text


def test_logprobs(client):
    reply = client.chat.completions.create(
        model="base", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    assert content[0].token == content[0].top_logprobs[0].token
    assert len(content[0].top_logprobs) == 2
    text = client.completions.create(model="base", prompt="3 4 5", max_tokens=3, logprobs=2, stop="9")
    assert 1 <= len(text.choices[0].logprobs.tokens) <= 3


def test_n(client):
    reply = client.chat.completions.create(model="base", messages=QUESTION, n=3, seed=1, max_tokens=8)
    assert [c.index for c in reply.choices] == [0, 1, 2]


def test_sampling_extensions(client):
    reply = client.chat.completions.create(
        model="base",
        messages=QUESTION,
        max_tokens=6,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    assert reply.usage.completion_tokens == 6


def test_errors(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="base", messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="base", messages=QUESTION, extra_body={"best_of": 3})
    assert unknown.value.param == "best_of"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model="base", messages=QUESTION, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param.startswith("tools")


def test_models(client):
    assert {"tandem-demo", "shout", "json", "down"} <= {m.id for m in client.models.list()}
    assert client.models.retrieve("shout").id == "shout"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
