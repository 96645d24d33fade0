"""An agent of the `langchain` package with two tools, over `langchain-openai`, unmodified."""

from __future__ import annotations

import asyncio

import pytest

from tests.clients import lazily
from tests.clients.weather import MANY, RESULT, is_answer, question

openai = lazily.imported("openai")


@pytest.fixture(scope="module", params=["chats", "responses"])
def agent(server, request):
    """Makes agents with two tools, which keep in `called` what they are called with."""
    # Here and not above: it takes seconds, and runs of other tests collect this module too.
    langchain = pytest.importorskip("langchain.agents", reason="the extra `clients` is not installed")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    # Of its own: other models with this address share theirs, and close it.
    plain, asynchronous = openai.DefaultHttpxClient(), openai.DefaultAsyncHttpxClient()
    model = ChatOpenAI(
        http_client=plain,
        http_async_client=asynchronous,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=96,
        max_retries=0,
        use_responses_api=request.param == "responses",
    )

    def made(name, called):
        @tool
        def get_weather(city: str) -> str:
            """Get the weather for a city."""
            called.append(("weather", city))
            return RESULT

        @tool
        def get_price(item: str) -> str:
            """Get the price for an item."""
            called.append(("price", item))
            return "12 euros"

        return langchain.create_agent(model.model_copy(update={"model_name": name}), [get_weather, get_price])

    made.close = asynchronous.aclose
    yield made
    plain.close()


def asked(text):
    return {"messages": [("user", text)]}


@pytest.mark.parametrize("name", ["base", "shout"])
def test_the_right_one_of_two_tools(agent, name):
    called = []
    made = agent(name, called)
    messages = made.invoke(asked(question("Oslo")))["messages"]
    assert called == [("weather", "Oslo")]
    assert is_answer(messages[-1].text, "Oslo")
    messages = made.invoke(asked("What is the price for Lamp?"))["messages"]
    assert called[1:] == [("price", "Lamp")]
    assert messages[-1].text.lower().rstrip(".!") == "the price for lamp is 12 euros"


def test_two_calls_in_one_answer(agent):
    called = []
    messages = agent("base", called).invoke(asked("What is the weather in Oslo and Rome?"))["messages"]
    assert sorted(called) == [("weather", "Oslo"), ("weather", "Rome")]
    assert [message.type for message in messages] == ["human", "ai", "tool", "tool", "ai"]


def test_a_stream(agent):
    called = []
    steps = list(agent("base", called).stream(asked(question("Rome")), stream_mode="messages"))
    text = "".join(message.text for message, _ in steps if message.type == "AIMessageChunk")
    assert called == [("weather", "Rome")]
    assert len(steps) > 5
    assert is_answer(text, "Rome")


def test_sixteen_rounds_at_once(agent):
    async def rounds():
        called = [[] for _ in MANY]
        runs = [
            agent(name, seen).ainvoke(asked(question(city))) for (city, name), seen in zip(MANY, called, strict=True)
        ]
        try:
            return zip(MANY, called, await asyncio.gather(*runs), strict=True)
        finally:
            await agent.close()

    for (city, _), called, found in asyncio.run(rounds()):
        assert called == [("weather", city)]
        assert is_answer(found["messages"][-1].text, city)
