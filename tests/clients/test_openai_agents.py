"""The `openai-agents` package, unmodified."""

from __future__ import annotations

import asyncio

import pytest

from tests.clients import lazily
from tests.clients.weather import MANY, RESULT, is_answer, question

openai = lazily.imported("openai")
agents = lazily.imported("agents")


@pytest.fixture(scope="module", params=["chats", "responses"])
def run(server, request):
    """Runs a coroutine function of a function that makes models, whose connections are closed at the end."""
    agents.set_tracing_disabled(True)  # Traces would go to OpenAI.
    kind = {"chats": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[request.param]

    async def connected(work):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await work(lambda name: kind(name, openai_client=client))

    return lambda work: asyncio.run(connected(work))


def agent(model, called):
    """An agent with a tool, which keeps in `called` the cities that it is called with."""

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the weather for a city.

        Args:
            city: The city
        """
        called.append(city)
        return RESULT

    settings = agents.ModelSettings(temperature=0, max_tokens=96)
    return agents.Agent(name="helper", model=model, tools=[get_weather], model_settings=settings)


@pytest.mark.parametrize("name", ["base", "shout"])
def test_a_round_with_a_tool(run, name):
    called = []
    found = run(lambda model: agents.Runner.run(agent(model(name), called), question("Oslo")))
    assert called == ["Oslo"]
    assert is_answer(found.final_output, "Oslo")


def test_a_stream(run):
    async def read(model):
        running = agents.Runner.run_streamed(agent(model("base"), called), question("Rome"))
        pieces = [
            event.data.delta
            async for event in running.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return pieces, running.final_output

    called = []
    pieces, final = run(read)
    assert called == ["Rome"]
    assert len(pieces) > 3
    assert "".join(pieces) == final
    assert is_answer(final, "Rome")


def test_a_second_turn(run):
    async def turns(model):
        made = agent(model("base"), called)
        first = await agents.Runner.run(made, question("Oslo"))
        again = [*first.to_input_list(), {"role": "user", "content": question("Paris")}]
        return await agents.Runner.run(made, again)

    called = []
    found = run(turns)
    assert called == ["Oslo", "Paris"]
    assert is_answer(found.final_output, "Paris")


def test_sixteen_rounds_at_once(run):
    async def rounds(model):
        called = [[] for _ in MANY]
        asked = [
            agents.Runner.run(agent(model(name), seen), question(city))
            for (city, name), seen in zip(MANY, called, strict=True)
        ]
        return zip(MANY, called, await asyncio.gather(*asked), strict=True)

    for (city, _), called, found in run(rounds):
        assert called == [city]
        assert is_answer(found.final_output, city)
