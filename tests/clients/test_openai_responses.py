"""The responses of the `openai` package, unmodified."""

from __future__ import annotations

import asyncio
import json

import pydantic
import pytest

from mlx_tandem.dialects.responses.bodies import ResponseBody
from tests.clients import lazily

openai = lazily.imported("openai")

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather for a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
    "strict": None,
}
GREEDY = {"temperature": 0, "max_output_tokens": 96}
SUM, WEATHER, THINK = "What is 17 + 25?", "What is the weather in Oslo?", "Think, then answer: 347 + 285"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response(client):
    reply = client.responses.create(model="base", instructions="Be brief.", input=SUM, metadata={"k": "v"}, **GREEDY)
    assert (reply.output_text, reply.status, reply.model) == ("17 + 25 = 42.", "completed", "tandem-demo")
    assert (reply.instructions, reply.metadata, reply.temperature) == ("Be brief.", {"k": "v"}, 0)
    usage = reply.usage
    assert (usage.output_tokens, usage.total_tokens) == (12, usage.input_tokens + 12)
    again = [{"role": "user", "content": SUM}, *reply.output, {"role": "user", "content": "What is 1 + 2?"}]
    reply = client.responses.create(model="shout", input=again, store=False, **GREEDY)
    assert (reply.output_text, reply.model, reply.store) == ("1 + 2 = 3!", "shout@1", False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_another_one(client, stream):
    def text(**asked):
        if not stream:
            return client.responses.create(model="base", **asked, **GREEDY)
        with client.responses.stream(model="base", **asked, **GREEDY) as events:
            return events.get_final_response()

    first = text(input=SUM)
    second = text(input="What is 1 + 2?", previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("1 + 2 = 3.", first.id)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(second.id).output_text == "1 + 2 = 3."
    last = text(input="What is 2 + 2?", previous_response_id=second.id)
    assert last.usage.input_tokens > second.usage.total_tokens, "the first turn is there, too"
    with pytest.raises(openai.BadRequestError) as wrong:
        parts = [{"type": "input_audio"}]
        text(input=[{"role": "user", "content": parts}], previous_response_id=second.id)
    assert wrong.value.param == "input[0].content[0].type", "items of earlier responses are not counted"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = text(input=[{"type": "item_reference", "id": second.output[0].id}, {"role": "user", "content": SUM}])
    assert third.output_text == "17 + 25 = 42."
    with pytest.raises(openai.NotFoundError) as gone:
        text(input="x", previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"


def test_a_stream(client):
    names = [event.type for event in client.responses.create(model="base", input=SUM, stream=True, **GREEDY)]
    deltas = names.count("response.output_text.delta")
    assert deltas > 5
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_an_answer_that_is_cut_off(client):
    reply = client.responses.create(model="base", input="Count from 3 to 30", temperature=0, max_output_tokens=4)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"


@pytest.mark.parametrize("model", ["base", "shout"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_round_with_a_tool(client, model, stored):
    options = {"model": model, "tools": [TOOL], "store": stored, **GREEDY}
    with client.responses.stream(input=WEATHER, **options) as events:
        called = events.get_final_response()
    (call,) = called.output
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", '{"city": "Oslo"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    if stored:
        answer = client.responses.create(input=[result], previous_response_id=called.id, **options)
    else:
        answer = client.responses.create(input=[{"role": "user", "content": WEATHER}, call, result], **options)
    assert answer.output_text.lower().rstrip(".!") == "the weather for oslo is sunny, 21 degrees"


def test_many_rounds_at_once(server):
    async def rounds():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(city, model):
                options = {"model": model, "tools": [TOOL], **GREEDY}
                called = await client.responses.create(input=f"What is the weather in {city}?", **options)
                (call,) = called.output
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
                answer = await client.responses.create(input=[result], previous_response_id=called.id, **options)
                return city, answer.output_text

            cities = ["Oslo", "Paris"]
            return await asyncio.gather(*(one(c, m) for c in cities for m in ("base", "shout", "down", "base")))

    for city, text in asyncio.run(rounds()):
        assert text.lower().rstrip(".!") == f"the weather for {city.lower()} is sunny, 21 degrees"


def test_a_call_that_is_required(client):
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        (call,) = client.responses.create(model="base", input=SUM, tools=[TOOL], tool_choice=choice, **GREEDY).output
        assert (call.type, call.name) == ("function_call", "get_weather")


def test_an_answer_under_a_schema(client):
    class Person(pydantic.BaseModel):
        name: str
        age: int

    ask = "As JSON: Ana is 34 and lives in Oslo."
    reply = client.responses.parse(model="base", input=ask, text_format=Person, **GREEDY)
    assert isinstance(reply.output_parsed, Person)
    assert reply.text.format.type == "json_schema"
    form = {"format": {"type": "json_object"}}
    assert json.loads(client.responses.create(model="base", input=ask, text=form, **GREEDY).output_text)["age"] == 34
    with pytest.raises(openai.BadRequestError) as wrong:
        form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}
        client.responses.create(model="base", input=ask, text=form, **GREEDY)
    assert wrong.value.param.startswith("text.format")


def test_thoughts(client):
    reply = client.responses.create(model="base", input=THINK, reasoning={"effort": "low", "summary": "auto"}, **GREEDY)
    thought, message = reply.output
    assert thought.content[0].text == "7 + 5 = 12, carry 1. 4 + 8 + 1 = 13, carry 1. 3 + 2 + 1 = 6."
    assert (reply.output_text, message.type) == ("347 + 285 = 632.", "message")
    assert 30 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens
    with client.responses.stream(model="base", input=THINK, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == final.output[0].content[0].text == thought.content[0].text
    again = client.responses.create(model="base", input=SUM, previous_response_id=reply.id, **GREEDY)
    assert again.output_text == "17 + 25 = 42."
    off = client.responses.create(model="base", input=THINK, reasoning={"effort": "none"}, **GREEDY)
    assert [item.type for item in off.output] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_logprobs(client, stream, asked):
    """Of the message's tokens and of those that end the thought before it, and not of the thought."""
    if stream:
        with client.responses.stream(model="base", input=THINK, **asked, **GREEDY) as events:
            deltas = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
            reply = events.get_final_response()
    else:
        reply = client.responses.create(model="base", input=THINK, **asked, **GREEDY)
    (part,) = reply.output[1].content
    assert "".join(one.token for one in part.logprobs).removeprefix("</think>").strip() == part.text
    assert all(len(one.top_logprobs) == asked.get("top_logprobs", 0) for one in part.logprobs)
    assert all(one.logprob <= 0 for one in part.logprobs)
    if stream:
        assert [one.token for one in deltas] == [one.token for one in part.logprobs]


@pytest.mark.parametrize("stream", [False, True])
def test_a_namespace(client, stream):
    """A group of functions, as Codex offers them: the call names its group."""
    group = {"type": "namespace", "name": "world", "description": "The world.", "tools": [TOOL]}
    options = {"model": "base", "input": WEATHER, "tools": [group], **GREEDY}
    if stream:
        with client.responses.stream(**options) as events:
            reply = events.get_final_response()
    else:
        reply = client.responses.create(**options)
    (call,) = reply.output
    assert (call.name, call.namespace, call.arguments) == ("get_weather", "world", '{"city": "Oslo"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    options["input"] = [{"role": "user", "content": WEATHER}, call, result]
    answer = client.responses.create(**options)
    assert answer.output_text == "The weather for Oslo is sunny, 21 degrees."


def test_what_is_wrong_in_a_namespace_is_named(client):
    for inner, param in (
        ({"type": "customs", "name": "x"}, "tools[1].tools[0].type"),
        (TOOL | {"name": "a b"}, "tools[1].tools[0].name"),
        (TOOL, "tools[1].tools[0].name"),
    ):
        group = {"type": "namespace", "name": "world", "description": "The world.", "tools": [inner]}
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="base", input=SUM, tools=[TOOL, group])
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{"type": "web_searches"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"text": {"format": {"type": "nonsense"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": ""}, None),
        ({"input": []}, "input"),
        ({"input": "word " * 3000}, "input"),
        ({"model": "nobody"}, "model"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ],
)
def test_refusals(client, asked, param):
    options = {"model": "base", "input": SUM, "max_output_tokens": 4} | asked
    if param is None:
        assert client.responses.create(**options).status
        return
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(**options)
    assert refused.value.param == param


def test_a_stored_response_is_streamed_again_and_its_input_listed(client):
    with client.responses.create(model="base", input=SUM, temperature=0, stream=True) as stream:
        first = list(stream)
    name = first[0].response.id
    with client.responses.retrieve(name, stream=True) as stream:
        assert list(stream) == first
    with client.responses.retrieve(name, stream=True, starting_after=3) as stream:
        assert list(stream) == first[4:]
    second = client.responses.create(model="base", input=SUM, previous_response_id=name)
    pages = client.responses.input_items.list(second.id, limit=1, order="asc")
    assert [item.content[0].text for item in pages] == [SUM, first[-1].response.output_text, SUM]


def test_a_custom_tool_is_offered_and_a_search_left_out(client):
    tools = [{"type": "custom", "name": "run", "format": {"type": "text"}}, {"type": "web_search"}]
    reply = client.responses.with_raw_response.create(model="base", input=SUM, tools=tools)
    assert reply.headers["x-tandem-skipped"] == "tools[1] web_search"
    assert [tool.type for tool in reply.parse().tools] == ["custom", "web_search"]


def test_every_field_of_the_published_api_is_known():
    published = openai.types.responses.response_create_params.ResponseCreateParamsStreaming
    fields = set(published.__annotations__)  # resolving what they are would take half a minute
    assert len(fields) > 25
    assert fields <= set(ResponseBody.__struct_fields__)
