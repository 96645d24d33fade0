"""The `anthropic` package, unmodified."""

from __future__ import annotations

import asyncio

import pydantic
import pytest

from mlx_tandem.dialects.anthropic.bodies import MessagesBody, TokensBody
from tests.clients import lazily
from tests.clients.weather import is_answer

anthropic = lazily.imported("anthropic")

SUM = {"role": "user", "content": "What is 17 + 25?"}
WEATHER = {"role": "user", "content": "What is the weather in Oslo?"}
THINK = {"role": "user", "content": "Think, then answer: 347 + 285"}
TOOL = {
    "name": "get_weather",
    "description": "Get the weather for a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
}
GREEDY = {"max_tokens": 96, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_message(client):
    reply = client.messages.create(model="base", system="Be brief.", messages=[SUM], **GREEDY)
    assert [block.to_dict() for block in reply.content] == [{"type": "text", "text": "17 + 25 = 42."}]
    assert (reply.role, reply.model, reply.stop_reason) == ("assistant", "tandem-demo", "end_turn")
    usage = reply.usage
    counted = client.messages.count_tokens(model="base", system="Be brief.", messages=[SUM]).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    again = [SUM, reply.to_param(), {"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]}]
    reply = client.messages.create(model="shout", messages=again, **GREEDY)
    assert (reply.content[0].text, reply.model) == ("1 + 2 = 3!", "shout@1")


def test_an_answer_is_continued(client):
    begun = [SUM, {"role": "assistant", "content": "17 + "}]
    assert client.messages.create(model="base", messages=begun, **GREEDY).content[0].text == "25 = 42."


def test_a_stream(client):
    with client.messages.stream(model="base", messages=[SUM], **GREEDY) as stream:
        assert "".join(stream.text_stream) == "17 + 25 = 42."
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 12)
    names = [e.type for e in client.messages.create(model="base", messages=[SUM], stream=True, **GREEDY)]
    block = ["content_block_start", *["content_block_delta"] * names.count("content_block_delta"), "content_block_stop"]
    assert names == ["message_start", *block, "message_delta", "message_stop"]


def test_ends(client):
    count = {"role": "user", "content": "Count from 3 to 30"}
    short = client.messages.create(model="base", messages=[count], max_tokens=5)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 5)
    stopped = client.messages.create(model="base", messages=[count], stop_sequences=["9", "17"], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "9")
    assert stopped.content[0].text == "3 4 5 6 7 8 "
    none = client.messages.create(model="base", messages=[SUM], max_tokens=0)
    assert (none.content, none.stop_reason, none.usage.output_tokens) == ([], "max_tokens", 0)


def test_more_tokens_than_fit_may_be_asked_for(client):
    """Agents ask for more tokens than a small model's context has."""
    asked = client.messages.create(model="base", messages=[SUM], max_tokens=20_000, extra_body={"temperature": 0})
    assert (asked.content[0].text, asked.stop_reason) == ("17 + 25 = 42.", "end_turn")


@pytest.mark.parametrize("model", ["base", "shout"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_round_with_a_tool(client, model, stream):
    def message(messages):
        asked = {"model": model, "messages": messages, "tools": [TOOL], **GREEDY}
        if not stream:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            return events.get_final_message()

    called = message([WEATHER])
    (call,) = called.content
    assert (called.stop_reason, call.type, call.name, call.input) == (
        "tool_use",
        "tool_use",
        "get_weather",
        {"city": "Oslo"},
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny, 21 degrees"}]}
    answer = message([WEATHER, called.to_param(), {"role": "user", "content": [result]}])
    assert answer.content[0].text.lower().rstrip(".!") == "the weather for oslo is sunny, 21 degrees"
    assert answer.stop_reason == "end_turn"


def test_many_rounds_at_once(server):
    async def rounds():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:

            async def one(city, model):
                ask = {"role": "user", "content": f"What is the weather in {city}?"}
                options = {"model": model, "tools": [TOOL], **GREEDY}
                called = await client.messages.create(messages=[ask], **options)
                (call,) = called.content
                result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
                back = [ask, called.to_param(), {"role": "user", "content": [result]}]
                return call.input, (await client.messages.create(messages=back, **options)).content[0].text

            cities = ["Oslo", "Paris", "Rome", "Tokyo"]
            return await asyncio.gather(*(one(c, m) for c in cities for m in ("base", "shout", "down", "base")))

    for i, (asked, text) in enumerate(asyncio.run(rounds())):
        city = ["Oslo", "Paris", "Rome", "Tokyo"][i // 4]
        assert asked == {"city": city}
        assert text.lower().rstrip(".!") == f"the weather for {city.lower()} is sunny, 21 degrees"


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(client, stream):
    """It asks for a thread first, which this server does not keep."""
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather for a city."""
        cities.append(city)
        return "sunny, 21 degrees"

    asked = {"model": "shout", "messages": [WEATHER], "tools": [get_weather], **GREEDY}
    runner = client.beta.messages.tool_runner(stream=stream, **asked)
    text = "".join(piece for reply in runner for piece in reply.text_stream) if stream else None
    last = runner.until_done()
    assert cities == ["Oslo"]
    assert is_answer(last.content[0].text, "Oslo")
    assert last.stop_reason == "end_turn"
    assert text in (None, last.content[0].text)


def test_a_thread(client):
    """This server keeps none, which the package takes as told."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.beta.messages.thread(model="base", **GREEDY).send(SUM)
    assert refused.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"
    thread = client.beta.messages.thread(
        model="shout", unsupported_request_behavior="continue_unthreaded", messages=[SUM], **GREEDY
    )
    assert thread.send().content[0].text == "17 + 25 = 42!"
    assert thread.send({"role": "user", "content": "What is 1 + 2?"}).content[0].text == "1 + 2 = 3!"
    assert len(thread.messages) == 4


def test_tools_that_are_not_offered(client):
    reply = client.messages.create(
        model="base", messages=[WEATHER], tools=[TOOL], tool_choice={"type": "none"}, **GREEDY
    )
    assert all(block.type == "text" for block in reply.content)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    reply = client.messages.create(model="base", messages=[WEATHER], tools=[TOOL], tool_choice=one, **GREEDY)
    assert [block.type for block in reply.content] == ["tool_use"]


def test_a_call_that_is_required(client):
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        reply = client.messages.create(model="base", messages=[SUM], tools=[TOOL], tool_choice=choice, **GREEDY)
        assert [(block.type, block.name) for block in reply.content] == [("tool_use", "get_weather")]
        assert isinstance(reply.content[0].input["city"], str)


def test_an_answer_under_a_schema(client):
    class Person(pydantic.BaseModel):
        name: str
        age: int

    ask = {"role": "user", "content": "As JSON: Ana is 34 and lives in Oslo."}
    reply = client.messages.parse(model="base", messages=[ask], output_format=Person, **GREEDY)
    assert isinstance(reply.parsed_output, Person)
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        wrong = {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}
        client.messages.create(model="base", messages=[ask], output_config=wrong, **GREEDY)


def test_thoughts(client):
    asked = {"model": "base", "messages": [THINK], **GREEDY}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    reply = client.messages.create(thinking=thinking, **asked)
    thought, text = reply.content
    assert thought.thinking == "7 + 5 = 12, carry 1. 4 + 8 + 1 = 13, carry 1. 3 + 2 + 1 = 6."
    assert text.text == "347 + 285 = 632."
    assert 30 < reply.usage.output_tokens_details.thinking_tokens < reply.usage.output_tokens
    with client.messages.stream(thinking={"type": "adaptive"}, **asked) as stream:
        assert [block.to_dict() for block in stream.get_final_message().content] == [thought.to_dict(), text.to_dict()]
    short = client.messages.create(thinking=thinking | {"budget_tokens": 9}, **asked)
    assert short.content[0].thinking != thought.thinking and short.content[1].text
    assert short.usage.output_tokens_details.thinking_tokens < 12
    hidden = client.messages.create(thinking=thinking | {"display": "omitted"}, **asked).content
    assert (hidden[0].thinking, hidden[0].signature) == ("", thought.signature)
    back = [THINK, reply.to_param(), SUM]
    assert client.messages.create(model="base", messages=back, **GREEDY).content[0].text == "17 + 25 = 42."


@pytest.mark.parametrize("more", [{}, {"thinking": {"type": "disabled"}}])
def test_no_thoughts_unless_they_are_asked_for(client, more):
    reply = client.messages.create(model="base", messages=[THINK], **GREEDY, **more)
    assert [block.type for block in reply.content] == ["text"]
    assert reply.usage.output_tokens_details.thinking_tokens == 0


def test_errors(client):
    with pytest.raises(anthropic.NotFoundError, match="'nobody' does not exist") as missing:
        client.messages.create(model="nobody", messages=[SUM], max_tokens=5)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="container"):
        client.messages.create(model="base", messages=[SUM], max_tokens=5, extra_body={"container": "c"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source"):
        image = {"type": "image", "source": {"type": "url", "url": "https://example.invalid/a.png"}}
        client.messages.create(model="base", messages=[{"role": "user", "content": [image]}], max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.name must be"):
        client.messages.create(model="base", messages=[SUM], max_tokens=5, tools=[TOOL | {"name": "a name"}])
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(model="base", messages=[SUM], max_tokens=5, stop_sequences=[""])


def test_models(client):
    listed = {m.id: m for m in client.models.list()}
    assert {"tandem-demo", "shout", "json", "down"} <= set(listed)
    found = client.models.retrieve("shout")
    assert (found.id, found.type, found.max_input_tokens) == ("shout", "model", 1024)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("nobody")
    assert missing.value.body["type"] == "error"


def test_openai_keeps_its_list_of_models(server):
    assert server.client.get("/v1/models").json()["object"] == "list"


def test_every_field_of_the_published_api_is_known():
    types, beta = anthropic.types, anthropic.types.beta
    for kind, published in (
        (MessagesBody, types.message_create_params.MessageCreateParamsStreaming),
        (MessagesBody, beta.message_create_params.MessageCreateParamsStreaming),
        (TokensBody, types.MessageCountTokensParams),
        (TokensBody, beta.message_count_tokens_params.MessageCountTokensParams),
    ):
        fields = set(published.__annotations__) - {"betas"}  # a header
        assert len(fields) > 8
        assert fields <= set(kind.__struct_fields__), kind
