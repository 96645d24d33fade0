"""The `renderers` package, unmodified: the client of `/inference/v1/generate` that verifiers and prime-rl use."""

from __future__ import annotations

import asyncio

import pytest

from mlx_tandem import demo
from tests.clients import lazily

renderers = lazily.imported("renderers")
openai = lazily.imported("openai")

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def renderer():
    from renderers.base import load_tokenizer

    return renderers.create_renderer(load_tokenizer(str(demo.MODEL_PATH)))


def generated(server, renderer, **fields):
    """What `generate` returns for the question."""
    from renderers.client import generate

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            fields.setdefault("model", "tandem-demo")
            return await generate(client=client, renderer=renderer, messages=QUESTION, **fields)

    return asyncio.run(run())


def test_token_ids_with_logprobs(server, renderer):
    found = generated(server, renderer, sampling_params={"temperature": 0, "max_tokens": 24}, cache_salt="3")
    exact = server.chat(QUESTION[0]["content"], temperature=0, max_tokens=24, return_token_ids=True).json()
    assert found["prompt_ids"] == exact["prompt_token_ids"]
    assert found["completion_ids"] == exact["choices"][0]["token_ids"]
    assert len(found["completion_logprobs"]) == len(found["completion_ids"])
    assert all(p <= 0 for p in found["completion_logprobs"])
    assert (found["content"], found["finish_reason"]) == ("17 + 25 = 42.", "stop")
    assert found["usage"]["completion_tokens"] == len(found["completion_ids"])


def test_an_adapter(server, renderer):
    found = generated(server, renderer, model="shout", sampling_params={"temperature": 0, "max_tokens": 24})
    assert found["content"] == "17 + 25 = 42!"


def test_a_prompt_that_is_too_long_is_known_before_it_is_sent(server, renderer):
    with pytest.raises(renderers.OverlongPromptError) as raised:
        generated(server, renderer, prompt_ids=[3] * 2000)
    assert raised.value.max_prompt_len == server.client.get("/v1/models").json()["data"][0]["max_model_len"]


def test_errors_name_the_parameter(server, renderer):
    with pytest.raises(openai.BadRequestError) as raised:
        generated(server, renderer, sampling_params={"n": 999})
    assert raised.value.param == "sampling_params.n"
