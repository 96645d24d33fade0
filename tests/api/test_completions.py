"""Text completions: raw prompts, several at once."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.config import SchedulerConfig
from mlx_tandem.generation.tokenizer import Tokenizer
from tests.serving import demo_config, serving
from tests.streams import until_token
from tests.waiting import until

PROMPT = "<|im_start|>user\nWhat is 12 + 5?<|im_end|>\n<|im_start|>assistant\n"
TOKENIZER = Tokenizer.load(demo.MODEL_PATH)


def test_text_and_token_ids_are_the_same_prompt(server):
    by_text = server.complete(PROMPT, temperature=0, max_tokens=16).json()
    assert by_text["object"] == "text_completion"
    assert by_text["choices"][0]["text"].endswith("12 + 5 = 17.")
    assert by_text["choices"][0]["finish_reason"] == "stop"
    by_ids = server.complete(TOKENIZER.encode(PROMPT), temperature=0, max_tokens=16).json()
    assert by_ids["choices"] == by_text["choices"]
    usages = [reply["usage"] for reply in (by_text, by_ids)]
    assert usages[1].pop("prompt_tokens_details")["cached_tokens"] >= 16, "a block at least"
    del usages[0]["prompt_tokens_details"]
    assert usages[0] == usages[1]


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


@pytest.mark.promise("D5")
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


@pytest.mark.promise("D5")
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
    several = server.complete([[65], [65] * (room - 3)], max_tokens=None, ignore_eos=True)
    assert several.status_code == 200, several.text
    assert several.json()["usage"]["completion_tokens"] == 6, "the longest prompt decides for all"


# --- what ends a choice --------------------------------------------------------------------------------------------

EOS = TOKENIZER.special_tokens["<|im_end|>"]


def test_min_tokens_come_before_any_end(server):
    short = server.complete(PROMPT, temperature=0, max_tokens=16).json()
    ended_at = short["usage"]["completion_tokens"]
    assert short["choices"][0]["finish_reason"] == "stop"
    for least in (ended_at, ended_at + 5, 32):
        reply = server.complete(PROMPT, temperature=0, max_tokens=32, min_tokens=least, return_token_ids=True).json()
        (choice,) = reply["choices"]
        said = choice["token_ids"]
        assert len(said) > least or (len(said), choice["finish_reason"]) == (32, "length")
        assert EOS not in said[:least]
        assert said[: ended_at - 1] == TOKENIZER.encode(short["choices"][0]["text"])
    assert (
        server.complete(PROMPT, temperature=0, max_tokens=16, min_tokens=ended_at - 1).json()["choices"]
        == (short["choices"])
    )
    free = server.complete(PROMPT, temperature=0, max_tokens=32, ignore_eos=True, min_tokens=32, return_token_ids=True)
    assert EOS in free.json()["choices"][0]["token_ids"], "nothing is masked that would not end it"


def test_stop_strings_wait_for_min_tokens(server):
    ids = TOKENIZER.encode("3 4 5")
    plain = server.complete(ids, temperature=0, max_tokens=24, ignore_eos=True, return_token_ids=True).json()
    text, said = plain["choices"][0]["text"], plain["choices"][0]["token_ids"]
    stop = text[2]
    assert text.count(stop) > 2
    for least in (0, 1, 5, 10, 24):
        for stream in (False, True):
            fields = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "min_tokens": least, "stop": stop}
            reply = server.complete(ids, stream=stream, **fields)
            got = "".join(c["text"] for c in choices_of(reply)) if stream else reply.json()["choices"][0]["text"]
            spared = len(TOKENIZER.decode(said[:least]))
            end = text.find(stop, spared)
            assert got == (text if end < 0 else text[:end])


def choices_of(streamed):
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    return [c for e in events for c in e["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_it_can_be_shown(server, stream):
    def ask(**fields):
        reply = server.complete(PROMPT, temperature=0, max_tokens=16, stream=stream, **fields)
        if stream:
            return "".join(c["text"] for c in choices_of(reply))
        return reply.json()["choices"][0]["text"]

    whole = ask()
    assert whole.endswith("12 + 5 = 17.")
    assert ask(stop="= 1") == whole[: whole.index("= 1")]
    assert ask(stop="= 1", include_stop_str_in_output=True) == whole[: whole.index("= 1") + 3]
    assert ask(skip_special_tokens=False) == whole
    assert ask(include_stop_str_in_output=True) == whole
    assert ask(include_stop_str_in_output=True, skip_special_tokens=False) == whole + "<|im_end|>"
    assert ask(ignore_eos=True, skip_special_tokens=False).startswith(whole + "<|im_end|>")
    assert "<|im_end|>" not in ask(ignore_eos=True)
    last = TOKENIZER.encode(whole)[-1]
    assert ask(stop_token_ids=[last]) == whole[: -len(TOKENIZER.decode([last]))]
    assert ask(stop_token_ids=[last], include_stop_str_in_output=True) == whole
    assert ask(stop_token_ids=[last], ignore_eos=True, min_tokens=16) != whole


def test_token_ids(server):
    prompts = [TOKENIZER.encode(PROMPT), TOKENIZER.encode("3 4 5")]
    fields = {"temperature": 0, "n": 2, "return_token_ids": True, "stop": "7"}
    reply = server.complete(prompts, **fields).json()
    streamed = choices_of(server.complete(prompts, stream=True, **fields))
    for choice in reply["choices"]:
        assert choice["prompt_token_ids"] == prompts[choice["index"] // 2]
        assert TOKENIZER.decode(choice["token_ids"]).startswith(choice["text"])
        own = [c for c in streamed if c["index"] == choice["index"]]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [t for c in own for t in c["token_ids"]] == choice["token_ids"]
    given = sum(len(c["token_ids"]) for c in reply["choices"])
    assert given == reply["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"max_tokens": None, "min_tokens": 1_000_000}, "min_tokens"),
        ({"priority": 0.5}, "priority"),
        ({"priority": 10_000_000}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_fields_that_are_refused(server, fields, param):
    response = server.complete("hi", **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_whoever_matters_more_is_served_first():
    """There is one seat. While it is taken, three requests come, and the one that comes last matters most of them.

    Each answer is far too long to end before its stream is left.
    """
    config = demo_config()
    model = structs.replace(config.engine.model, max_model_len=0)
    engine = structs.replace(config.engine, model=model, scheduler=SchedulerConfig(max_num_seqs=1))
    with serving(structs.replace(config, engine=engine)) as small, ThreadPoolExecutor(4) as pool:
        begun: SimpleQueue[int] = SimpleQueue()
        leave = {priority: threading.Event() for priority in (-5, 3, 0, -1)}

        def ask(priority: int) -> None:
            body = {"prompt": "hi", "max_tokens": 8000, "ignore_eos": True, "stream": True, "priority": priority}
            with small.client.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()  # kept by name, since httpx closes the stream when it is collected
                until_token(lines)
                begun.put(priority if reply.status_code == 200 else reply.status_code)
                leave[priority].wait(180)

        order = []
        try:
            for waiting, priority in enumerate(leave):
                pool.submit(ask, priority)
                until(lambda n=waiting: small.client.get("/health").json()["open_requests"] > n)
                if not waiting:
                    order.append(begun.get(timeout=60))
            for _ in range(3):
                leave[order[-1]].set()
                order.append(begun.get(timeout=60))
        finally:
            for event in leave.values():
                event.set()
    assert order == [-5, -1, 0, 3]
