"""The `langchain-openai` package, unmodified."""

from __future__ import annotations

import asyncio

import pytest

from tests.clients import lazily

openai = lazily.imported("openai")

QUESTION = "What is 17 + 25?"
ANSWERS = {"base": "17 + 25 = 42.", "shout": "17 + 25 = 42!", "json": '{"answer": 42}'}


@pytest.fixture(scope="module")
def shout(server):
    # Here and not above: it takes seconds, and runs of other tests collect this module too.
    langchain_openai = pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="shout", temperature=0, max_tokens=24, max_retries=0
    )


def test_invoke(shout):
    reply = shout.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert reply.content == ANSWERS["shout"]
    assert reply.response_metadata["finish_reason"] == "stop"
    assert reply.usage_metadata["total_tokens"] > reply.usage_metadata["output_tokens"] > 0
    again = [("human", QUESTION), reply, ("human", "What is 1 + 2?")]
    assert shout.invoke(again).content == "1 + 2 = 3!"


def test_turns_of_tools_and_of_streams_in_the_history(shout):
    from langchain_core.messages import AIMessage, ToolMessage

    call = {"name": "add", "args": {"a": 17, "b": 25}, "id": "call_1", "type": "tool_call"}
    said = AIMessage("", tool_calls=[call], additional_kwargs={"refusal": None}, name="helper")
    reply = shout.invoke([("human", QUESTION), said, ToolMessage("42", tool_call_id="call_1"), ("human", QUESTION)])
    assert reply.content
    whole = None
    for chunk in shout.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    again = [("human", QUESTION), whole, ("human", "What is 1 + 2?")]
    assert shout.invoke(again).content == "1 + 2 = 3!"


def test_stream(shout):
    chunks = list(shout.stream(QUESTION))
    assert len(chunks) > 2
    assert "".join(c.content for c in chunks) == ANSWERS["shout"]


def test_a_batch_of_different_adapters(shout):
    from langchain_core.runnables import RunnableParallel

    each = RunnableParallel({name: shout.bind(model=name) for name in ANSWERS})
    (replies,) = each.batch([QUESTION])
    assert {name: reply.content for name, reply in replies.items()} == ANSWERS
    questions = [f"What is {n} + 2?" for n in range(11, 15)]
    assert [r.content for r in shout.batch(questions)] == [f"{n} + 2 = {n + 2}!" for n in range(11, 15)]


def test_async(shout):
    async def read():
        return "".join([c.content async for c in shout.bind(model="json").astream(QUESTION)])

    async def both():
        try:
            return await asyncio.gather(shout.ainvoke(QUESTION), read())
        finally:
            await shout.root_async_client.close()

    reply, streamed = asyncio.run(both())
    assert reply.content == ANSWERS["shout"]
    assert streamed == ANSWERS["json"]


def test_logprobs(shout):
    reply = shout.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = reply.response_metadata["logprobs"]["content"]
    assert [len(c["top_logprobs"]) for c in content] == [2] * len(content)


def test_errors(shout):
    with pytest.raises(openai.NotFoundError) as missing:
        shout.bind(model="nobody").invoke(QUESTION)
    assert missing.value.code == "model_not_found"
