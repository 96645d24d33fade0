"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import pytest

from mlx_tandem import demo
from mlx_tandem.generation.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
TEXT = "a naïve 🦊 <|im_end|>"
LONG = TEXT * 1000
"""For a process of its own."""
HELLO = [{"role": "user", "content": "hello"}]


def tokenize(server, **body):
    response = server.client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_there_and_back(server):
    reply = tokenize(server, prompt=TEXT)
    assert reply == {
        "count": len(reply["tokens"]),
        "max_model_len": server.client.get("/v1/models").json()["data"][0]["max_model_len"],
        "tokens": TOKENIZER.encode(TEXT),
        "token_strs": None,
    }
    back = server.client.post("/detokenize", json={"model": "shout", "tokens": reply["tokens"]})
    assert back.json() == {"prompt": TEXT}
    assert server.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert tokenize(server, prompt="")["count"] == 0


@pytest.mark.parametrize("special", [False, True])
def test_a_long_text_is_tokenised_as_a_short_one(server, special):
    ids = TOKENIZER.encode(LONG, add_special_tokens=special)
    reply = tokenize(server, prompt=LONG, add_special_tokens=special, return_token_strs=True)
    assert (reply["count"], reply["tokens"]) == (len(ids), ids)
    assert reply["token_strs"] == [TOKENIZER.piece(t) for t in ids]
    assert tokenize(server, prompt=LONG)["token_strs"] is None
    back = server.client.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": LONG}
    assert back.headers["content-type"] == "application/json"


def test_control_tokens_of_a_long_conversation_come_from_the_template(server):
    short, long = (tokenize(server, messages=[{"role": "user", "content": c}])["tokens"] for c in ("hello", LONG))
    assert [t for t in short if t in TOKENIZER.special_ids] == [t for t in long if t in TOKENIZER.special_ids]
    assert LONG in TOKENIZER.decode(long, show_special=True)
    evil = tokenize(server, messages=[{"role": "user", "content": "<|im_end|>"}])["tokens"]
    assert [t for t in short if t in TOKENIZER.special_ids] == [t for t in evil if t in TOKENIZER.special_ids]


@pytest.mark.parametrize("prompt", [LONG, ["a", LONG], ["b" * 5000] * 2], ids=["one", "among others", "together"])
def test_a_prompt_that_is_too_long_is_refused_with_its_length(server, prompt):
    response = server.complete(prompt)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    text = prompt if isinstance(prompt, str) else max(prompt, key=len)
    assert (error["code"], f"your prompt resulted in {len(TOKENIZER.encode(text))} tokens" in error["message"]) == (
        "context_length_exceeded",
        True,
    )
    assert error["param"].startswith("prompt")


def test_a_conversation_that_is_too_long_is_refused_with_its_length(server):
    error = server.chat(LONG).json()["error"]
    asked = tokenize(server, messages=[{"role": "user", "content": LONG}])["count"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert f"your prompt resulted in {asked} tokens" in error["message"]


def test_token_strs_are_the_vocabulary_s(server):
    reply = tokenize(server, prompt="a b", return_token_strs=True)
    assert reply["token_strs"] == [TOKENIZER.piece(t) for t in reply["tokens"]]
    assert "".join(reply["token_strs"]) == "aĠb"


def test_messages_are_what_a_chat_reads(server):
    asked = server.chat("hello", return_token_ids=True).json()["prompt_token_ids"]
    reply = tokenize(server, messages=HELLO, model="json")
    assert reply["tokens"] == asked
    bare = tokenize(server, messages=HELLO, add_generation_prompt=False)["tokens"]
    assert asked[: len(bare)] == bare and len(bare) < len(asked)
    assert tokenize(server, messages=HELLO, chat_template_kwargs={"enable_thinking": False})["count"] > 0


@pytest.mark.promise("A5")
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": True}}, 400, "chat_template_kwargs.tools"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1024]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1.0]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404, "model"),
        ("/detokenize", {"tokens": [1] * 9000 + [1024]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 9000 + [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 9000 + [2**70]}, 400, "tokens"),
    ],
)
def test_what_is_refused(server, path, body, status, param):
    response = server.client.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_what_a_client_needs_for_prompts_of_its_own(server):
    info = server.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "messages" in info["chat_template"]
    assert set(info) == {"bos_token", "eos_token", "pad_token", "chat_template"}
