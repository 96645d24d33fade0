"""Text completions: raw prompts, several at once."""

from __future__ import annotations

import json

import pytest

from mlx_tandem import demo
from mlx_tandem.text.tokenizer import Tokenizer

PROMPT = "<|im_start|>user\nWhat is 12 + 5?<|im_end|>\n<|im_start|>assistant\n"
TOKENIZER = Tokenizer.load(demo.MODEL_PATH)


def test_text_and_token_ids_are_the_same_prompt(server):
    by_text = server.complete(PROMPT, temperature=0, max_tokens=16).json()
    assert by_text["object"] == "text_completion"
    assert by_text["choices"][0]["text"].endswith("12 + 5 = 17.")
    assert by_text["choices"][0]["finish_reason"] == "stop"
    by_ids = server.complete(TOKENIZER.encode(PROMPT), temperature=0, max_tokens=16).json()
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"] == by_text["usage"]


def test_several_prompts_in_one_request(server):
    prompts = [PROMPT, TOKENIZER.encode("Once there was"), "3 4 5"]
    reply = server.complete(prompts, temperature=0, n=2).json()
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3, 4, 5]
    for i, prompt in enumerate(prompts):
        alone = server.complete(prompt, temperature=0).json()["choices"][0]["text"]
        assert reply["choices"][2 * i]["text"] == reply["choices"][2 * i + 1]["text"] == alone
    assert reply["usage"]["completion_tokens"] == sum(
        server.complete(p, temperature=0, n=2).json()["usage"]["completion_tokens"] for p in prompts
    )
    streamed = server.complete(prompts, temperature=0, n=2, stream=True)
    texts = [""] * 6
    for line in streamed.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in reply["choices"]]


def test_logprobs(server):
    choice = server.complete("3 4 5", temperature=0, logprobs=2).json()["choices"][0]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]).startswith(choice["text"])
    assert scores["text_offset"][0] == 0
    assert scores["text_offset"] == [len("".join(scores["tokens"][:i])) for i in range(len(scores["tokens"]))]
    for token, score, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert top[token] == score
        assert 2 <= len(top) <= 3


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([1, "a"], "prompt"),
        (["a", 1], "prompt[1]"),
        ([1, -1], "prompt"),
        ([1, 1024], "prompt"),
        ([1, 2**31], "prompt"),
        ([[1], [1024]], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, 1.0], "prompt[1]"),
        (None, "prompt"),
        (3, "prompt"),
        ({}, "prompt"),
        (["a"] * 65, "prompt"),
    ],
)
def test_prompts_that_are_refused(server, prompt, param):
    response = server.complete(prompt)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_the_context_is_respected(server):
    room = server.client.get("/v1/models").json()["data"][0]["max_model_len"]
    exact = server.complete([65] * (room - 4), max_tokens=4, ignore_eos=True)
    assert exact.status_code == 200, exact.text
    assert exact.json()["usage"]["completion_tokens"] == 4
    for ids, fields, param in (
        ([65] * room, {}, "prompt"),
        ([65] * (room + 1), {"max_tokens": None}, "prompt"),
        ([65] * (room - 4), {"max_tokens": 5}, "max_tokens"),
    ):
        response = server.complete(ids, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"] == param
    rest = server.complete([65] * (room - 3), max_tokens=None, ignore_eos=True)
    assert rest.json()["usage"]["completion_tokens"] == 3
