"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import pytest

from mlx_tandem import demo
from mlx_tandem.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
TEXT = "a naïve 🦊 <|im_end|>"
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
    long = "hello world " * 2000  # on another thread
    assert tokenize(server, prompt=long, add_special_tokens=False)["tokens"] == TOKENIZER.encode(long)


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
