"""The `pydantic-ai-slim` package with its extra `openai`, unmodified."""

from __future__ import annotations

import asyncio

import pydantic
import pytest

from tests.clients import lazily
from tests.clients.weather import MANY, RESULT, is_answer, question

openai = lazily.imported("openai")
pydantic_ai = lazily.imported("pydantic_ai")

GREEDY = {"temperature": 0, "max_tokens": 96}


@pytest.fixture(scope="module", params=["chats", "responses"])
def run(server, request):
    """Runs a coroutine function of a function that makes models, whose connections are closed at the end."""
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = {"chats": OpenAIChatModel, "responses": OpenAIResponsesModel}[request.param]

    async def connected(work):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await work(lambda name: kind(name, provider=OpenAIProvider(openai_client=client)))

    return lambda work: asyncio.run(connected(work))


def agent(model, called):
    """An agent with a tool, which keeps in `called` the cities that it is called with."""
    made = pydantic_ai.Agent(model, model_settings=GREEDY)

    @made.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather for a city.

        Args:
            city: The city
        """
        called.append(city)
        return RESULT

    return made


@pytest.mark.parametrize("name", ["base", "shout"])
def test_a_round_with_a_tool(run, name):
    called = []
    found = run(lambda model: agent(model(name), called).run(question("Oslo")))
    assert called == ["Oslo"]
    assert is_answer(found.output, "Oslo")
    assert found.usage.requests == 2
    assert found.usage.output_tokens > 0


def test_a_stream(run):
    async def read(model):
        async with agent(model("base"), called).run_stream(question("Rome")) as found:
            return [piece async for piece in found.stream_text(delta=True, debounce_by=None)]

    called = []
    pieces = run(read)
    assert called == ["Rome"]
    assert len(pieces) > 3
    assert is_answer("".join(pieces), "Rome")


def test_an_object(run):
    class Person(pydantic.BaseModel):
        name: str
        age: int
        city: str

    def ask(model):
        made = pydantic_ai.Agent(model("base"), output_type=pydantic_ai.NativeOutput(Person), model_settings=GREEDY)
        return made.run("As JSON: Ana is 34 and lives in Oslo.")

    assert run(ask).output == Person(name="Ana", age=34, city="Oslo")


def test_sixteen_rounds_at_once(run):
    async def rounds(model):
        called = [[] for _ in MANY]
        asked = [agent(model(name), seen).run(question(city)) for (city, name), seen in zip(MANY, called, strict=True)]
        return zip(MANY, called, await asyncio.gather(*asked), strict=True)

    for (city, _), called, found in run(rounds):
        assert called == [city]
        assert is_answer(found.output, city)
