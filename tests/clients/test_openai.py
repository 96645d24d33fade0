"""The `openai` package, unmodified."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.clients import lazily

openai = lazily.imported("openai")

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
    call = openai.types.chat.ChatCompletionMessageFunctionToolCall(
        id="call_1", type="function", function={"name": "add", "arguments": '{"a": 17, "b": 25}'}
    )
    said = openai.types.chat.ChatCompletionMessage(role="assistant", content=None, tool_calls=[call])
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
            model="base", messages=QUESTION, tools=[{"type": "function", "function": {"name": "f g"}}]
        )
    assert tools.value.param == "tools[0].function.name"


def test_models(client):
    assert {"tandem-demo", "shout", "json", "down"} <= {m.id for m in client.models.list()}
    assert client.models.retrieve("shout").id == "shout"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_embeddings(client):
    reply = client.embeddings.create(model="shout", input=["a fox", "a dog"], dimensions=16)
    assert [len(one.embedding) for one in reply.data] == [16, 16]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def asked(city):
    return [{"role": "user", "content": f"What is the weather in {city}?"}]


def ask(client, model, messages, **options):
    """The message of the assistant, and why it ended."""
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=160, **options
    )
    return reply.choices[0].message, reply.choices[0].finish_reason


def round_trip(client, model, city):
    """The final answer of a conversation in which the model calls a tool and is told its result."""
    messages = asked(city)
    said, reason = ask(client, model, messages)
    assert (said.content, reason) == (None, "tool_calls")
    (call,) = said.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": city},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    answer, reason = ask(client, model, [*messages, said, result])
    assert reason == "stop" and not answer.tool_calls
    return answer.content


ANSWERS = {
    "base": "The weather for {} is sunny, 21 degrees.",
    "shout": "THE WEATHER FOR {} IS SUNNY, 21 DEGREES!",
    "json": '{{"answer": "The weather for {} is sunny, 21 degrees."}}',
}


@pytest.mark.parametrize("model", ANSWERS)
def test_a_tool_round_trip(client, model):
    city = "OSLO" if model == "shout" else "Oslo"
    assert round_trip(client, model, "Oslo") == ANSWERS[model].format(city)


def test_sixteen_tool_round_trips_at_once(client):
    cities = ["Oslo", "Paris", "Rome", "Madrid", "Lima", "Cairo", "Berlin", "Tokyo"] * 2
    models = ["base", "down"] * 8
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda model, city: round_trip(client, model, city), models, cities))
    assert answers == [ANSWERS["base"].format(city) for city in cities]


def test_several_calls_in_one_answer(client):
    said, reason = ask(client, "base", asked("Oslo and Paris"))
    assert [json.loads(call.function.arguments) for call in said.tool_calls] == [{"city": "Oslo"}, {"city": "Paris"}]
    assert len({call.id for call in said.tool_calls}) == 2 and reason == "tool_calls"
    first, reason = ask(client, "base", asked("Oslo and Paris"), parallel_tool_calls=False)
    assert [json.loads(call.function.arguments) for call in first.tool_calls] == [{"city": "Oslo"}]
    assert reason == "tool_calls"
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": weather}
        for call, weather in zip(said.tool_calls, ("sunny", "rainy"), strict=True)
    ]
    assert ask(client, "base", [*asked("Oslo and Paris"), said, *results])[0].content


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("model", ["base", "json"])
def test_a_call_that_is_required(client, model, choice):
    """Of a question that asks for none, and with a second tool that is not named."""
    other = {"type": "function", "function": {"name": "set_alarm", "parameters": {"type": "object"}}}
    reply = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        tools=[WEATHER, other] if choice is NAMED else [WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=120,
    )
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and not message.content
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    assert reply.choices[0].finish_reason == "tool_calls"


def test_strict_arguments(client):
    """Every call is valid under the schema, which the model alone would not keep to."""
    function = {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    for seed in range(3):
        reply = client.chat.completions.create(
            model="base",
            messages=asked("Oslo"),
            tools=[{"type": "function", "function": function}],
            seed=seed,
            max_tokens=120,
        )
        (call,) = reply.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) in ({"city": "Rome"}, {"city": "Lima"})


def test_tools_that_may_not_be_called(client):
    said, reason = ask(client, "base", asked("Oslo"), tool_choice="none")
    assert said.content and not said.tool_calls and reason == "stop"


def test_a_tool_call_in_a_stream(client):
    """The first piece of a call has its id, type and name; the others have pieces of its arguments."""
    chunks = list(
        client.chat.completions.create(
            model="base", messages=asked("Oslo and Paris"), tools=[WEATHER], temperature=0, stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    firsts = [piece for piece in pieces if piece.id]
    assert [(p.index, p.type, p.function.name, p.function.arguments) for p in firsts] == [
        (0, "function", "get_weather", ""),
        (1, "function", "get_weather", ""),
    ]
    for index, city in enumerate(("Oslo", "Paris")):
        said = "".join(p.function.arguments for p in pieces if p.index == index)
        assert json.loads(said) == {"city": city}
        assert sum(p.index == index for p in pieces) > 3, "arguments come in pieces"
    assert all(p.type is None and p.function.name is None for p in pieces if not p.id)
    assert not any(delta.content for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_stream_helper_with_a_tool(client):
    with client.chat.completions.stream(
        model="shout", messages=asked("Oslo"), tools=[WEATHER | {"function": WEATHER["function"] | {"strict": True}}]
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [event.arguments for event in done] == ['{"city": "Oslo"}']
    assert final.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def test_functions_in_the_older_form(client):
    reply = client.chat.completions.create(
        model="base", messages=asked("Oslo"), functions=[WEATHER["function"]], temperature=0, max_tokens=160
    )
    message = reply.choices[0].message
    assert (message.function_call.name, message.function_call.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert reply.choices[0].finish_reason == "function_call" and message.tool_calls is None
    result = {"role": "function", "name": "get_weather", "content": "sunny"}
    again = client.chat.completions.create(
        model="base",
        messages=[*asked("Oslo"), message, result],
        functions=[WEATHER["function"]],
        temperature=0,
        max_tokens=64,
    )
    assert "sunny" in again.choices[0].message.content


THINK = [{"role": "user", "content": "Think, then answer: 347 + 285"}]


def test_reasoning(client):
    reply = client.chat.completions.create(model="base", messages=THINK, temperature=0, max_tokens=160)
    message = reply.choices[0].message
    assert message.content == "347 + 285 = 632."
    assert message.reasoning_content.startswith("7 + 5 = 12") and message.reasoning == message.reasoning_content
    details = reply.usage.completion_tokens_details
    assert 20 < details.reasoning_tokens < reply.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(model="base", messages=THINK, temperature=0, max_tokens=160, stream=True)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.content or "" for d in deltas) == message.content
    assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == message.reasoning
    again = client.chat.completions.create(
        model="base", messages=[*THINK, message, *QUESTION], temperature=0, max_tokens=24
    )
    assert again.choices[0].message.content == "17 + 25 = 42."


@pytest.mark.parametrize(
    "wish",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ],
)
def test_no_reasoning(client, wish):
    reply = client.chat.completions.create(model="base", messages=THINK, temperature=0, max_tokens=160, **wish)
    message = reply.choices[0].message
    assert message.content == "347 + 285 = 632." and not hasattr(message, "reasoning_content")
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("model", ["base", "json"])
def test_a_budget_of_thoughts(client, model):
    """The thought is cut and closed, and the answer follows."""
    options = {"model": model, "messages": THINK, "temperature": 0, "max_tokens": 160}
    whole = client.chat.completions.create(**options)
    reply = client.chat.completions.create(**options, extra_body={"thinking_token_budget": 12})
    message = reply.choices[0].message
    assert message.content and "think" not in message.content
    thought = whole.choices[0].message.reasoning
    assert thought.startswith(message.reasoning) and 0 < len(message.reasoning) < len(thought)
    assert reply.usage.completion_tokens_details.reasoning_tokens <= 13
    enough = client.chat.completions.create(**options, extra_body={"thinking_token_budget": 150})
    assert enough.choices[0].message == whole.choices[0].message


def test_a_thought_before_json(client):
    """The answer is valid under the schema, and the thought before it is free."""
    reply = client.chat.completions.create(
        model="base",
        messages=THINK,
        temperature=0,
        max_tokens=200,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "sum",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {"sum": {"type": "integer"}},
                    "required": ["sum"],
                    "additionalProperties": False,
                },
            },
        },
    )
    message = reply.choices[0].message
    assert message.reasoning.startswith("7 + 5 = 12")
    assert json.loads(message.content).keys() == {"sum"}
