"""What a model thinks of its prompt: `prompt_logprobs` and `echo`, against a plain forward in this process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_adapters, load_model

from mlx_tandem import Engine, demo
from mlx_tandem.generation.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
STORY = "Once there was a naïve fox"
LONG = np.random.default_rng(3).integers(3, 1000, 400).tolist()
TOLERANCE = 1e-4


@cache
def _model(adapter: str | None):
    model, _ = load_model(demo.MODEL_PATH)
    model.set_dtype(mx.float32)  # as the server does on a CPU
    return model if adapter is None else load_adapters(model, str(demo.ADAPTER_PATHS[adapter]))


def plain(ids: list[int], adapter: str | None = None) -> np.ndarray:
    """[tokens, vocabulary]: the logprobs of the token after each."""
    logits = _model(adapter)(mx.array([ids]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, -1, keepdims=True))


def assert_true(said: list, ids: list[int], k: int, adapter: str | None = None) -> None:
    """`said`: vLLM's list."""
    exact = plain(ids, adapter)
    assert said[0] is None
    assert len(said) == len(ids)
    for own, token, lp in zip(said[1:], ids[1:], exact, strict=False):
        assert next(iter(own)) == str(token)
        ranks = sorted(entry["rank"] for entry in own.values())
        assert set(range(1, k + 1)) <= set(ranks)
        assert len(own) == k + (own[str(token)]["rank"] > k)
        for key, entry in own.items():
            value = lp[int(key)]
            assert abs(entry["logprob"] - value) < TOLERANCE
            assert (lp > value + 1e-5).sum() < entry["rank"] <= (lp > value - 1e-5).sum()  # itself among them
            assert entry["decoded_token"] == TOKENIZER.token_text(int(key))


@pytest.mark.parametrize("adapter", [None, "shout"])
@pytest.mark.parametrize("k", [0, 3, 20])
def test_they_are_those_of_a_plain_forward(server, adapter, k):
    ids = TOKENIZER.encode(STORY)
    choice = server.complete(STORY, prompt_logprobs=k, model=adapter).json()["choices"][0]
    assert_true(choice["prompt_logprobs"], ids, k, adapter)
    assert choice["logprobs"] is None


def test_long_prompts_beside_streams_and_one_another(server):
    """Chunked and batched, with adapters and without."""

    def ask(i: int):
        if i % 3 == 0:
            return server.complete("Once", max_tokens=100, ignore_eos=True).json()
        adapter = (None, "shout")[i % 2]
        return server.complete(LONG[i * 7 :], max_tokens=3, prompt_logprobs=1, model=adapter).json()

    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(ask, range(6)))
    for i, reply in enumerate(replies):
        if i % 3:
            assert_true(reply["choices"][0]["prompt_logprobs"], LONG[i * 7 :], 1, (None, "shout")[i % 2])


def test_every_choice_shows_its_own_prompt_s(server):
    prompts = [TOKENIZER.encode(STORY), TOKENIZER.encode("3 4 5 6"), [65]]
    reply = server.complete(prompts, n=2, prompt_logprobs=2, max_tokens=2).json()
    for i, choice in enumerate(reply["choices"]):
        assert_true(choice["prompt_logprobs"], prompts[i // 2], 2)


def test_a_chat_shows_them_beside_its_choices(server):
    reply = server.chat("hello", n=2, prompt_logprobs=0, return_token_ids=True).json()
    assert_true(reply["prompt_logprobs"], reply["prompt_token_ids"], 0)
    assert all("prompt_logprobs" not in c for c in reply["choices"])


def test_they_do_not_depend_on_how_tokens_are_drawn(server):
    ids = TOKENIZER.encode(STORY)
    fields = {
        "temperature": 0.3,
        "top_k": 1,
        "logit_bias": {"65": 50},
        "repetition_penalty": 2.0,
        "presence_penalty": 1,
    }
    assert_true(server.complete(ids, prompt_logprobs=1, **fields).json()["choices"][0]["prompt_logprobs"], ids, 1)


@pytest.mark.parametrize("prompt", [STORY, TOKENIZER.encode("<|im_start|>user\nhi")])
def test_echo(server, prompt):
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    text = prompt if isinstance(prompt, str) else "<|im_start|>user\nhi"
    alone = server.complete(prompt, temperature=0, logprobs=2).json()["choices"][0]
    choice = server.complete(prompt, temperature=0, logprobs=2, echo=True).json()["choices"][0]
    assert choice["text"] == text + alone["text"]
    scores, own = choice["logprobs"], alone["logprobs"]
    n = len(ids)
    assert scores["tokens"] == [TOKENIZER.token_text(i) for i in ids] + own["tokens"]
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    exact = plain(ids)
    assert scores["token_logprobs"][1:n] == pytest.approx(
        [lp[t] for lp, t in zip(exact, ids[1:], strict=False)], abs=TOLERANCE
    )
    for token, lp, top in zip(scores["tokens"][1:n], exact, scores["top_logprobs"][1:n], strict=False):
        assert max(top.values()) == pytest.approx(lp.max(), abs=TOLERANCE)
        assert token in top and 2 <= len(top) <= 3
    assert scores["token_logprobs"][n:] == pytest.approx(own["token_logprobs"], abs=TOLERANCE)
    # A token inside of a character has the character's offset.
    offsets = [len(TOKENIZER.decode(ids[:i], show_special=True).rstrip("\ufffd")) for i in range(n)]
    lengths = [len(t) for t in own["tokens"]]
    assert scores["text_offset"] == offsets + [len(text) + sum(lengths[:i]) for i in range(len(lengths))]
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("prompt", [STORY, [STORY, "3 4 5"]])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"logprobs": 0, "max_tokens": 0}, {"return_token_ids": True}])
def test_echo_in_a_stream_is_the_echo_of_a_whole_reply(server, prompt, fields):
    fields = {"temperature": 0, "n": 2, "echo": True} | fields
    whole = server.complete(prompt, **fields).json()["choices"]
    text = server.complete(prompt, stream=True, **fields).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for choice in whole:
        own = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert own[0]["text"] == (prompt if isinstance(prompt, str) else prompt[choice["index"] // 2])
        if choice["logprobs"] is not None:
            said = [c["logprobs"] for c in own if c["logprobs"]]
            assert [t for s in said for t in s["tokens"]] == choice["logprobs"]["tokens"]
            assert [t for s in said for t in s["text_offset"]] == choice["logprobs"]["text_offset"]
        if "token_ids" in choice:
            assert [t for c in own for t in c["token_ids"]] == choice["token_ids"]
            assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_scoring_alone_generates_nothing(server):
    ids = TOKENIZER.encode(STORY)
    reply = server.complete(STORY, max_tokens=0, echo=True, logprobs=1, stop_token_ids=list(range(64))).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (STORY, "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert reply["usage"]["completion_tokens"] == 0
    reply = server.complete(STORY, max_tokens=0, prompt_logprobs=2, return_token_ids=True).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [], ids)
    assert_true(choice["prompt_logprobs"], ids, 2)
    chat = server.chat("hello", max_tokens=0, prompt_logprobs=0).json()
    assert (chat["choices"][0]["message"]["content"], chat["usage"]["completion_tokens"]) == ("", 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": False, "echo": True}, "max_tokens"),
        ({"max_tokens": 0.0, "echo": True}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"echo": 1}, "echo"),
    ],
)
def test_what_is_refused(server, fields, param):
    response = server.complete("hi", **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_in_python():
    with Engine(num_blocks=65, max_model_len=256, max_num_seqs=4) as engine:
        ids = TOKENIZER.encode(STORY)
        first, second = engine.generate([ids, ids[:1]], max_tokens=0, prompt_logprobs=2)
        assert (first.text, first.token_ids, second.prompt_logprobs) == ("", (), ())
        exact = plain(ids)
        said = first.prompt_logprobs
        assert [lp.model for lp in said] == pytest.approx(
            [lp[t] for lp, t in zip(exact, ids[1:], strict=False)], abs=TOLERANCE
        )
        assert all(len(lp.top) == 2 and lp.rank >= 1 for lp in said)
        assert engine.generate(ids, max_tokens=1).prompt_logprobs is None


@pytest.mark.parametrize("adapter", [None, "shout"])
def test_perplexity(server, adapter):
    """MLX ParaLLM's route: the mean of a plain forward's logprobs, and its exponential."""
    ids = TOKENIZER.encode(STORY)
    reply = server.client.post("/v1/perplexity", json={"text": STORY} | ({"model": adapter} if adapter else {}))
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert set(body) == {"model", "token_count", "avg_nll", "ppl"}
    assert (body["model"], body["token_count"]) == ("shout@1" if adapter else "tandem-demo", len(ids) - 1)
    exact = -np.mean([lp[t] for lp, t in zip(plain(ids, adapter), ids[1:], strict=False)])
    assert body["avg_nll"] == pytest.approx(exact, abs=TOLERANCE)
    assert body["ppl"] == pytest.approx(np.exp(exact), rel=1e-3)


def test_perplexity_of_a_text_of_one_token(server):
    assert len(TOKENIZER.encode("a")) == 1
    body = server.client.post("/v1/perplexity", json={"model": "base", "text": "a"}).json()
    assert (body["token_count"], body["avg_nll"], body["ppl"]) == (0, 0.0, 1.0)


def test_perplexity_of_a_text_that_no_model_expects(server):
    """Numbers stay numbers, however unlikely the text is."""
    text = "".join(chr(33 + i * 37 % 90) for i in range(300))
    body = server.client.post("/v1/perplexity", json={"text": text}).json()
    assert body["token_count"] == len(TOKENIZER.encode(text)) - 1
    assert body["ppl"] == pytest.approx(np.exp(body["avg_nll"])) and np.isfinite(body["ppl"])


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "base"}, 400, "text"),
        ({"model": "base", "text": ""}, 400, "text"),
        ({"model": "base", "text": 3}, 400, "text"),
        ({"model": "base", "text": "x " * 3000}, 400, "text"),
        ({"model": "nobody", "text": "x"}, 404, "model"),
        ({"model": "base", "text": "x", "stream": True}, 400, "stream"),
    ],
)
def test_perplexity_that_is_refused(server, body, status, param):
    reply = server.client.post("/v1/perplexity", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
