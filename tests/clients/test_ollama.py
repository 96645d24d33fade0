"""The `ollama` package, unmodified."""

from __future__ import annotations

import json

import pytest

from mlx_tandem.dialects.ollama.bodies import ChatBody, EmbedBody, EmbeddingsBody, GenerateBody, Options
from tests.clients import lazily

ollama = lazily.imported("ollama")

SUM = {"role": "user", "content": "What is 17 + 25?"}
WEATHER = {"role": "user", "content": "What is the weather in Oslo?"}
THINK = {"role": "user", "content": "Think, then answer: 347 + 285"}
GREEDY = {"temperature": 0, "num_predict": 96}


@pytest.fixture(scope="module")
def client(server):
    with ollama.Client(host=server.url) as made:
        yield made


def get_weather(city: str) -> str:
    """
    Get the weather for a city.

    Args:
        city: The city
    """
    return "sunny, 21 degrees"


def test_a_chat(client):
    reply = client.chat(model="base", messages=[SUM], options=GREEDY)
    assert (reply.message.role, reply.message.content, reply.model) == ("assistant", "17 + 25 = 42.", "tandem-demo")
    assert (reply.done, reply.done_reason, reply.eval_count) == (True, "stop", 12)
    assert reply.total_duration >= reply.prompt_eval_duration + reply.eval_duration > reply.eval_duration > 0
    again = [SUM, reply.message, {"role": "user", "content": "What is 1 + 2?"}]
    reply = client.chat(model="shout:latest", messages=again, options=GREEDY, keep_alive="5m")
    assert (reply.message.content, reply.model) == ("1 + 2 = 3!", "shout@1")


def test_a_stream(client):
    parts = list(client.chat(model="base", messages=[SUM], options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == "17 + 25 = 42."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].prompt_eval_count > 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_with_a_tool(client, stream):
    def message(messages):
        found = client.chat(model="base", messages=messages, tools=[get_weather], options=GREEDY, stream=stream)
        if not stream:
            return found.message
        parts = list(found)
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        text = "".join(part.message.content for part in parts)
        return ollama.Message(role="assistant", content=text, tool_calls=calls or None)

    called = message([WEATHER])
    (call,) = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_name": call.function.name, "content": get_weather(**call.function.arguments)}
    assert message([WEATHER, called, result]).content == "The weather for Oslo is sunny, 21 degrees."


def test_formats(client):
    ask = {"role": "user", "content": "As JSON: Ana is 34 and lives in Oslo."}
    person = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "city": {"enum": ["Oslo", "Rome"]}},
        "required": ["age", "city"],
        "additionalProperties": False,
    }
    reply = client.chat(model="base", messages=[ask], format=person, options=GREEDY)
    found = json.loads(reply.message.content)
    assert found.keys() == {"age", "city"} and isinstance(found["age"], int) and found["city"] in ("Oslo", "Rome")
    reply = client.generate(model="base", prompt=ask["content"], format="json", options=GREEDY)
    assert json.loads(reply.response) == {"name": "Ana", "age": 34, "city": "Oslo"}
    with pytest.raises(ollama.ResponseError, match="format"):
        client.chat(model="base", messages=[ask], format={"type": "nonsense"}, options=GREEDY)


def test_thoughts(client):
    reply = client.chat(model="base", messages=[THINK], options=GREEDY, think=True)
    assert reply.message.thinking == "7 + 5 = 12, carry 1. 4 + 8 + 1 = 13, carry 1. 3 + 2 + 1 = 6."
    assert reply.message.content == "347 + 285 = 632."
    parts = list(client.chat(model="base", messages=[THINK], options=GREEDY, think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == reply.message.thinking
    assert "".join(part.message.content for part in parts) == reply.message.content
    off = client.chat(model="base", messages=[THINK], options=GREEDY, think=False)
    assert off.message.thinking is None
    again = client.chat(model="base", messages=[THINK, reply.message, SUM], options=GREEDY)
    assert again.message.content == "17 + 25 = 42."


def test_a_completion(client):
    reply = client.generate(model="base", prompt="What is 17 + 25?", system="Be brief.", options=GREEDY)
    assert (reply.response, reply.done_reason) == ("17 + 25 = 42.", "stop")
    parts = list(client.generate(model="base", prompt="What is 17 + 25?", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == "17 + 25 = 42."
    prompt = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n17 +"
    assert client.generate(model="base", prompt=prompt, raw=True, options=GREEDY).response == " 25 = 42."
    assert client.generate(model="base", prompt="Think, then answer: 347 + 285", options=GREEDY).thinking


def test_options(client):
    count = [{"role": "user", "content": "Count from 3 to 30"}]
    short = client.chat(model="base", messages=count, options={"num_predict": 4, "num_ctx": 4096, "mirostat": 0})
    assert (short.done_reason, short.eval_count) == ("length", 4)
    fits = client.chat(model="base", messages=[SUM], options={"temperature": 0, "num_predict": 5000})
    assert (fits.done_reason, fits.eval_count) == ("stop", 12)
    ended = client.chat(model="base", messages=count, options={"temperature": 0, "num_predict": -1, "stop": ["9"]})
    assert ended.message.content == "3 4 5 6 7 8 "
    for seed in (3, -1):
        drawn = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": seed, "num_predict": 8}
        assert client.chat(model="base", messages=count, options=drawn).eval_count <= 8
    penalised = GREEDY | {"repeat_penalty": 10, "repeat_last_n": -1, "num_predict": 30}
    plain = client.chat(model="base", messages=count, options=GREEDY | {"num_predict": 30}).message.content
    assert client.chat(model="base", messages=count, options=penalised).message.content != plain
    off = client.chat(model="base", messages=count, options=penalised | {"repeat_last_n": 0}).message.content
    assert off == plain


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"options": {"nonsense": 1}}, "options.nonsense"),
        ({"options": {"stop": [""]}}, "options.stop"),
        ({"options": {"repeat_last_n": 9, "presence_penalty": 1}}, "options.repeat_last_n"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_refusals(client, more, named):
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError) as found:
            list(client.chat(model="base", messages=[SUM], stream=stream, **more))
        assert found.value.status_code == 400
        assert named in str(found.value)


def test_other_refusals(client):
    with pytest.raises(ollama.ResponseError, match="'nobody' does not exist") as found:
        client.chat(model="nobody", messages=[SUM])
    assert found.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images"):
        client.chat(model="base", messages=[SUM | {"images": ["iVBORw0KGgo="]}])
    for more in ({"suffix": "x"}, {"template": "x"}, {"context": [1]}, {"images": ["iVBORw0KGgo="]}):
        with pytest.raises(ollama.ResponseError, match=next(iter(more))):
            client.generate(model="base", prompt="x", **more)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, stream):
    found = client.chat(model="base", messages=[SUM], stream=stream, logprobs=True, top_logprobs=2, options=GREEDY)
    lines = list(found) if stream else [found]
    told = [one for line in lines for one in line.logprobs or ()]
    assert "".join(one.token for one in told).startswith("17 + 25 = 42.")
    assert len(told) == lines[-1].eval_count
    assert all(len(one.top_logprobs) == 2 and one.logprob == one.top_logprobs[0].logprob for one in told)


def test_embeddings(client):
    texts = ["What is 17 + 25?", "The capital of France is Paris."]
    reply = client.embed(model="base", input=texts)
    one, other = reply.embeddings
    assert sum(x * x for x in one) == pytest.approx(1.0, abs=1e-4)
    assert reply.prompt_eval_count > 10
    assert client.embed(model="base:latest", input=texts[1]).embeddings[0] == pytest.approx(other, abs=2e-3)
    raw = client.embeddings(model="base", prompt=texts[0]).embedding
    length = sum(x * x for x in raw) ** 0.5
    assert abs(length - 1) > 0.1
    assert [x / length for x in raw] == pytest.approx(one, abs=2e-3)
    short = client.embed(model="shout", input=texts[0], dimensions=8).embeddings[0]
    assert len(short) == 8
    assert sum(x * x for x in short) == pytest.approx(1.0, abs=1e-4)
    assert client.embed(model="base", input="").embeddings == []


def test_a_text_to_embed_that_is_too_long(client):
    long = "fox " * 3000
    cut = client.embed(model="base", input=long)
    assert cut.prompt_eval_count == 1023
    with pytest.raises(ollama.ResponseError, match="tokens"):
        client.embed(model="base", input=long, truncate=False)
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        client.embed(model="base", input="x", dimensions=100_000)


def test_loading(client):
    for reply in (client.chat(model="base"), client.generate(model="shout")):
        assert (reply.done, reply.done_reason) == (True, "load")
    with pytest.raises(ollama.ResponseError, match="nobody"):
        client.generate(model="nobody")


def test_models(client):
    listed = {m.model: m for m in client.list().models}
    assert {"tandem-demo", "shout", "json", "down"} <= set(listed)
    assert listed["shout"].details.parent_model == "tandem-demo"
    assert listed["tandem-demo"].size > 1_000_000
    assert "tandem-demo" in {m.model for m in client.ps().models}
    shown = client.show("base")
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert shown.modelinfo["qwen3.context_length"] == 1024
    assert "im_start" in shown.template
    assert client.show("shout:latest").details.parent_model == "tandem-demo"
    with pytest.raises(ollama.ResponseError):
        client.show("nobody")


def test_curl_without_a_content_type(server):
    """The examples of Ollama's documentation leave the content type to curl."""
    body = '{"model": "base", "prompt": "What is 17 + 25?", "stream": false, "options": {"temperature": 0}}'
    sent = {"content": body, "headers": {"content-type": "application/x-www-form-urlencoded"}}
    reply = server.client.post("/api/generate", **sent)
    assert reply.json()["response"] == "17 + 25 = 42."
    assert server.client.get("/api/version").json()["version"] >= "0.12"


def test_every_field_of_the_published_api_is_known():
    from ollama import _types as types

    assert set(types.Options.model_fields) <= set(Options.__struct_fields__)
    assert set(types.ChatRequest.model_fields) <= set(ChatBody.__struct_fields__)
    assert set(types.GenerateRequest.model_fields) <= set(GenerateBody.__struct_fields__)
    assert set(types.EmbedRequest.model_fields) <= set(EmbedBody.__struct_fields__)
    assert set(types.EmbeddingsRequest.model_fields) <= set(EmbeddingsBody.__struct_fields__)
