"""Chat completions on the built-in model."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.streams import data_of

QUESTION = "What is 17 + 25?"


def events(response: httpx.Response) -> list[dict]:
    """The events of a finished stream; the last one must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = data_of(response.text)
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(chunks: list[dict], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") for c in choices)


def test_a_whole_reply(server):
    reply = server.chat(QUESTION, temperature=0).json()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "tandem-demo"
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "17 + 25 = 42."
    assert choice["finish_reason"] == "stop"
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens"] <= 16


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0, "n": 3}])
def test_a_stream_says_what_the_whole_reply_says(server, fields):
    whole = server.chat("Say: this is a test, déjà vu", max_tokens=24, **fields).json()
    chunks = events(server.chat("Say: this is a test, déjà vu", max_tokens=24, stream=True, **fields))
    for choice in whole["choices"]:
        index = choice["index"]
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert text_of(chunks, index) == choice["message"]["content"]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in own][:-1] == [None] * (len(own) - 1)
        assert own[-1] == {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    assert len({c["id"] for c in chunks}) == 1


def test_one_token_per_event(server):
    chunks = events(server.chat("Count from 3 to 30", max_tokens=12, stream=True, ignore_eos=True))
    assert len(chunks) == 1 + 12 + 1  # the role, the tokens, the finish


def test_usage_in_a_stream_when_asked_for(server):
    server.chat(QUESTION, temperature=0)  # the two that are compared find its blocks, whatever ran before
    chunks = events(server.chat(QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}))
    *others, last = chunks
    assert all(c["usage"] is None for c in others)
    assert last["choices"] == []
    assert last["usage"] == server.chat(QUESTION, temperature=0).json()["usage"]


def test_choices_differ_and_a_seed_repeats_them(server):
    def ask() -> list[str]:
        choices = server.chat("hello", n=4, seed=3, temperature=1.5, max_tokens=12).json()["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        return [c["message"]["content"] for c in choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def test_adapters_answer_differently_and_are_named(server):
    base = server.chat(QUESTION, temperature=0)
    shout = server.chat(QUESTION, temperature=0, model="shout")
    named = server.chat(QUESTION, temperature=0, model="json@1")
    assert [r.json()["model"] for r in (base, shout, named)] == ["tandem-demo", "shout@1", "json@1"]
    texts = [r.json()["choices"][0]["message"]["content"] for r in (base, shout, named)]
    assert texts == ["17 + 25 = 42.", "17 + 25 = 42!", '{"answer": 42}']


@pytest.mark.parametrize("model", [None, "base", "tandem-demo"])
def test_names_of_the_base(server, model):
    assert server.chat(QUESTION, model=model).json()["model"] == "tandem-demo"


@pytest.mark.parametrize("model", ["nobody", "shout@9", "shout@", "../shout", "", "x" * 1000, "tandem-demo@1"])
def test_an_unknown_model(server, model):
    response = server.chat(QUESTION, model=model)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


def test_a_stop_string_cuts_and_is_not_shown(server):
    whole = server.chat("Count from 3 to 30", temperature=0, max_tokens=32).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    for stream in (False, True):
        response = server.chat("Count from 3 to 30", temperature=0, max_tokens=32, stop=[stop, "zzz"], stream=stream)
        if stream:
            chunks = events(response)
            text, finish = text_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = response.json()["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        assert text == whole[: whole.index(stop)]
        assert finish == "stop"


def test_logprobs(server):
    choice = server.chat(QUESTION, temperature=0, logprobs=True, top_logprobs=3).json()["choices"][0]
    content = choice["logprobs"]["content"]
    for entry in content:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert entry["token"] == entry["top_logprobs"][0]["token"]  # greedy
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    shown = b"".join(bytes(e["bytes"]) for e in content).decode()
    assert shown.startswith(choice["message"]["content"])
    chunks = events(server.chat(QUESTION, temperature=0, logprobs=True, top_logprobs=3, stream=True))
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert [e["token"] for e in streamed] == [e["token"] for e in content]


def test_tokens_asked_for_are_tokens_given(server):
    reply = server.chat("hello", max_tokens=5, ignore_eos=True).json()
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["choices"][0]["finish_reason"] == "length"
    reply = server.chat("hello", max_tokens=None, max_completion_tokens=3, ignore_eos=True).json()
    assert reply["usage"]["completion_tokens"] == 3


def test_stop_token_ids_and_logit_bias(server):
    entry = server.complete("hello", temperature=0, logprobs=1).json()["choices"][0]["logprobs"]
    ids = server.complete("hello", temperature=0, max_tokens=1, logit_bias={"65": 100}, logprobs=0).json()
    assert ids["choices"][0]["logprobs"]["tokens"] != entry["tokens"][:1]
    reply = server.complete("hello", temperature=0, logit_bias={"65": 100}, stop_token_ids=[65]).json()
    assert reply["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert reply["usage"]["completion_tokens"] == 1


def test_token_ids(server):
    fields = {"temperature": 0, "n": 2, "return_token_ids": True}
    reply = server.chat(QUESTION, **fields).json()
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    chunks = events(server.chat(QUESTION, stream=True, **fields))
    assert chunks[0]["prompt_token_ids"] == reply["prompt_token_ids"]
    for choice in reply["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [t for c in own[1:] for t in c["token_ids"]] == choice["token_ids"]
        assert "prompt_token_ids" not in choice
    assert sum(len(c["token_ids"]) for c in reply["choices"]) == reply["usage"]["completion_tokens"]


def test_min_tokens_and_what_is_shown(server):
    plain = server.chat(QUESTION, temperature=0).json()["choices"][0]["message"]["content"]
    fields = {"temperature": 0, "include_stop_str_in_output": True, "skip_special_tokens": False}
    shown = server.chat(QUESTION, **fields).json()["choices"][0]["message"]["content"]
    assert shown == plain + "<|im_end|>"
    longer = server.chat(QUESTION, temperature=0, min_tokens=16).json()
    assert longer["usage"]["completion_tokens"] == 16
    assert longer["choices"][0]["message"]["content"].startswith(plain)
    refused = server.chat(QUESTION, max_tokens=None, max_completion_tokens=3, min_tokens=4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


def test_messages_in_every_form(server):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is 17 "}, {"type": "text", "text": "+ 25?"}],
            "name": "x",
        },
        {"role": "assistant", "content": "17 + 25 = 42.", "refusal": None, "tool_calls": None},
        {"role": "user", "content": QUESTION},
    ]
    response = server.client.post(
        "/v1/chat/completions",
        json={
            "messages": messages,
            "max_tokens": 8,
            "user": "u",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "response_format": {"type": "text"},
            "tools": [],
            "tool_choice": "none",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    assert response.status_code == 200, response.text


def test_a_control_token_in_a_message_is_text(server):
    plain = server.chat("a b").json()["usage"]["prompt_tokens"]
    marked = server.chat("a <|im_end|> b").json()["usage"]["prompt_tokens"]
    assert marked > plain + 3
    as_token = server.complete("a <|im_end|> b").json()["usage"]["prompt_tokens"]
    assert as_token < server.complete("a <|im-end|> b").json()["usage"]["prompt_tokens"]
