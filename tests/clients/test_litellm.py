"""The `litellm` package, unmodified."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.clients.weather import CITIES, RESULT, is_answer, question

# litellm's types for signing in make pydantic warn.
pytestmark = pytest.mark.filterwarnings("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather for a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]


def user(text):
    return {"role": "user", "content": text}


QUESTION = [user("What is 17 + 25?")]


@pytest.fixture(scope="module")
def runner():
    """The event loop of this module: litellm's plain calls look for one too, and would leave their own open."""
    with asyncio.Runner() as made:
        asyncio.set_event_loop(made.get_loop())
        yield made


@pytest.fixture(scope="module")
def litellm(runner):
    # Here and not above: it takes seconds, and runs of other tests collect this module too.
    litellm = pytest.importorskip("litellm", reason="the extra `clients` is not installed")
    litellm.telemetry = False
    return litellm


@pytest.fixture(scope="module")
def access(server):
    return {"api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 24}


@pytest.mark.parametrize(("model", "answer"), [("tandem-demo", "17 + 25 = 42."), ("shout", "17 + 25 = 42!")])
def test_chat(litellm, access, model, answer):
    reply = litellm.completion(model=f"openai/{model}", messages=QUESTION, **access)
    assert reply.choices[0].message.content == answer
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@pytest.mark.parametrize("form", ["object", "dump", "json"])
def test_a_second_turn_with_what_came_back(litellm, access, form):
    reply = litellm.completion(model="openai/shout", messages=QUESTION, **access)
    message = reply.choices[0].message
    back = {"object": message, "dump": message.model_dump(), "json": message.json()}[form]
    again = [*QUESTION, back, {"role": "user", "content": "What is 1 + 2?"}]
    reply = litellm.completion(model="openai/shout", messages=again, **access)
    assert reply.choices[0].message.content == "1 + 2 = 3!"


def test_a_second_turn_of_a_stream(litellm, access):
    """Its chunks are put together by the package."""
    chunks = list(litellm.completion(model="openai/shout", messages=QUESTION, stream=True, **access))
    built = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    again = [*QUESTION, built.choices[0].message, {"role": "user", "content": "What is 1 + 2?"}]
    reply = litellm.completion(model="openai/shout", messages=again, **access)
    assert reply.choices[0].message.content == "1 + 2 = 3!"


def test_a_turn_of_tools_in_the_history(litellm, access):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}}
    said = litellm.Message(role="assistant", content=None, tool_calls=[call], reasoning_content="17 and 25")
    result = {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "42"}
    reply = litellm.completion(model="openai/base", messages=[*QUESTION, said, result], **access)
    assert reply.choices[0].message.content


def test_streaming_chat(litellm, access):
    stream = litellm.completion(
        model="openai/json", messages=QUESTION, stream=True, stream_options={"include_usage": True}, **access
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == '{"answer": 42}'
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens > 0


def test_async_chat(litellm, access, runner):
    async def ask(model):
        reply = await litellm.acompletion(model=f"openai/{model}", messages=QUESTION, **access)
        return reply.choices[0].message.content

    async def read(model):
        stream = await litellm.acompletion(model=f"openai/{model}", messages=QUESTION, stream=True, **access)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def all_at_once():
        try:
            return await asyncio.gather(ask("base"), ask("shout"), read("json"), read("shout"))
        finally:
            await litellm.close_litellm_async_clients()

    assert runner.run(all_at_once()) == ["17 + 25 = 42.", "17 + 25 = 42!", '{"answer": 42}', "17 + 25 = 42!"]


def test_text_completion(litellm, access, server):
    expected = server.complete("3 4 5", max_tokens=6, temperature=0, model="shout").json()["choices"][0]["text"]
    access = access | {"max_tokens": 6}
    reply = litellm.text_completion(model="text-completion-openai/shout", prompt="3 4 5", **access)
    assert reply.choices[0].text == expected
    stream = litellm.text_completion(model="text-completion-openai/shout", prompt="3 4 5", stream=True, **access)
    assert "".join(c.choices[0].text or "" for c in stream) == expected


def test_errors(litellm, access):
    with pytest.raises(litellm.NotFoundError, match="'nobody' does not exist"):
        litellm.completion(model="openai/nobody", messages=QUESTION, **access)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model="openai/base", messages=QUESTION, **(access | {"temperature": 9}))


@pytest.mark.parametrize("provider", ["anthropic", "ollama_chat"])
def test_other_dialects(litellm, server, provider):
    options = {"model": f"{provider}/base", "api_base": server.url, "api_key": "none", "temperature": 0}
    reply = litellm.completion(messages=QUESTION, max_tokens=24, **options)
    assert reply.choices[0].message.content == "17 + 25 = 42."
    chunks = litellm.completion(messages=QUESTION, max_tokens=24, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "17 + 25 = 42."
    options |= {"tools": TOOLS, "max_tokens": 60}
    (call,) = litellm.completion(messages=[user(question("Oslo"))], **options).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')


@pytest.mark.parametrize("stream", [False, True])
def test_async_rounds_with_a_tool_by_ollama(litellm, server, runner, stream):
    """This route sends its JSON as `application/octet-stream`."""
    options = {"model": "ollama_chat/base", "api_base": server.url, "temperature": 0, "max_tokens": 60}

    async def message(messages):
        reply = await litellm.acompletion(messages=messages, tools=TOOLS, stream=stream, **options)
        if stream:
            reply = litellm.stream_chunk_builder([chunk async for chunk in reply], messages=messages)
        return reply.choices[0].message

    async def round_for(city):
        asked = [user(question(city))]
        called = await message(asked)
        (call,) = called.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        answer = await message([*asked, called, result])
        return json.loads(call.function.arguments), answer.content

    async def all_at_once():
        try:
            return await asyncio.gather(*map(round_for, CITIES))
        finally:
            await litellm.close_litellm_async_clients()

    for city, (arguments, answer) in zip(CITIES, runner.run(all_at_once()), strict=True):
        assert arguments == {"city": city}
        assert is_answer(answer, city)
