"""The `instructor` package, unmodified."""

from __future__ import annotations

import asyncio

import pydantic
import pytest

from tests.clients import lazily
from tests.clients.weather import MANY, RESULT, is_answer, question

openai = lazily.imported("openai")
instructor = lazily.imported("instructor")

GREEDY = {"temperature": 0, "max_tokens": 96}
ANA = [{"role": "user", "content": "As JSON: Ana is 34 and lives in Oslo."}]


class Person(pydantic.BaseModel):
    name: str
    age: int


class get_weather(pydantic.BaseModel):  # the name of the function
    """Get the weather for a city."""

    city: str = pydantic.Field(description="The city")


@pytest.fixture(scope="module")
def made(server):
    """Makes completions of a mode."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as inner:
        yield lambda mode="TOOLS": instructor.from_openai(inner, mode=instructor.Mode[mode]).chat.completions


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "JSON"])
def test_an_object(made, mode):
    asked = made(mode)
    person = asked.create(model="base", messages=ANA, response_model=Person, max_retries=0, **GREEDY)
    assert (person.name, person.age) == ("Ana", 34)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT"])
def test_a_call_as_an_object(made, mode):
    messages = [{"role": "user", "content": question("Oslo")}]
    asked = made(mode)
    found = asked.create(model="base", messages=messages, response_model=get_weather, max_retries=0, **GREEDY)
    assert found.city == "Oslo"


def test_a_stream_of_partial_objects(made):
    messages = [{"role": "user", "content": question("Oslo")}]
    asked = made()
    found = list(asked.create_partial(model="base", messages=messages, response_model=get_weather, **GREEDY))
    cities = [part.city for part in found if part.city]
    assert cities[-1] == "Oslo"
    assert all("Oslo".startswith(city) for city in cities)


def test_another_try_after_a_value_that_was_refused(made):
    """The package sends the call, and as its result what was wrong with it."""
    refused = []

    class Asked(get_weather):
        @pydantic.field_validator("city")
        @classmethod
        def check(cls, city):
            if not refused:
                refused.append(city)
                raise ValueError("say it again")
            return city

    messages = [{"role": "user", "content": question("Oslo")}]
    asked = made()
    asked.create(model="base", messages=messages, response_model=Asked, max_retries=1, **GREEDY)
    assert refused == ["Oslo"]


@pytest.mark.parametrize("model", ["base", "shout"])
def test_a_round_with_a_tool(made, model):
    asked = made()
    messages = [{"role": "user", "content": question("Oslo")}]
    found, reply = asked.create_with_completion(model=model, messages=messages, response_model=get_weather, **GREEDY)
    assert found.city == "Oslo"
    assert is_answer(
        answer(asked.create(model=model, messages=back(messages, reply), response_model=None, **GREEDY)), "Oslo"
    )


def test_sixteen_rounds_at_once(server):
    async def rounds():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as inner:
            asked = instructor.from_openai(inner).chat.completions

            async def one(city, model):
                messages = [{"role": "user", "content": question(city)}]
                found, reply = await asked.create_with_completion(
                    model=model, messages=messages, response_model=get_weather, **GREEDY
                )
                final = await asked.create(model=model, messages=back(messages, reply), response_model=None, **GREEDY)
                return found.city, answer(final)

            return await asyncio.gather(*(one(city, model) for city, model in MANY))

    for (city, _), (called, text) in zip(MANY, asyncio.run(rounds()), strict=True):
        assert called == city
        assert is_answer(text, city)


def back(messages, reply):
    """The conversation with the call and its result."""
    message = reply.choices[0].message
    (call,) = message.tool_calls
    return [
        *messages,
        message.model_dump(exclude_unset=True),
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]


def answer(reply):
    return reply.choices[0].message.content
