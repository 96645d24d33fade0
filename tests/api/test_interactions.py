"""Every pair of values of every two features of a request, in crowded batches: each answers as by plain evaluation.

The features are crossed so that any two values that can be asked for together are together in at least one request.
All requests run beside one another, whole and streamed, chat and completion, under several adapters; their tokens,
logprobs, ends, texts and usage are then checked one sequence at a time against `tests/api/plain.py`, and must be the
same when a request runs alone.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tests.api.learns import learning_config
from tests.api.plain import LOGPROB_TOLERANCE, TOKENIZER, Sampled, check_end, check_tokens, log_softmax, logits_of
from tests.serving import RunningServer, serving

STORY = "Once there was a naïve fox"
QUESTION = "Repeat: one two three four five"
E = TOKENIZER.encode(" e")[0]
COMMON = TOKENIZER.encode("e")[0]

FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "route": {"chat": {}, "completion": {}, "two prompts": {}},
    "stream": {"whole": {}, "streamed": {"stream": True, "stream_options": {"include_usage": True}}},
    "model": {"base": {"model": "base"}, "lora": {"model": "shout"}, "trained": {"model": "policy"}},
    "swap": {"none": {}, "pin": {"swap_policy": "pin"}, "follow": {"swap_policy": "inflight_keep"}},
    "n": {"one": {}, "four": {"n": 4}},
    "draw": {
        "greedy": {"temperature": 0},
        "plain": {"temperature": 1.0},
        "hot": {"temperature": 2.0, "min_p": 0.02},
        "cold": {"temperature": 0.3, "top_p": 0.5},
        "top_k": {"top_k": 3, "top_p": 0.9},
        "only one": {"temperature": 1.5, "top_k": 1},
        "least top_p": {"top_p": 1e-6},
    },
    "seed": {"small": {"seed": 3}, "negative": {"seed": -(2**63)}, "large": {"seed": 2**63 - 1}},
    "penalty": {
        "none": {},
        "repetition": {"repetition_penalty": 1.3},
        "strong repetition": {"repetition_penalty": 10.0},
        "presence and frequency": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        "reward": {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.5},
    },
    "bias": {
        "none": {},
        "banned": {"logit_bias": {str(COMMON): -100, str(E): -100}},
        "favoured": {"logit_bias": {str(COMMON): 8.0}},
        "forced": {"logit_bias": {str(E): 100}},
    },
    "logprobs": {"none": {}, "own": {"logprobs": 0}, "five": {"logprobs": 5}, "most": {"logprobs": 20}},
    "prompt": {"none": {}, "own": {"prompt_logprobs": 0}, "three": {"prompt_logprobs": 3}},
    "echo": {"no": {}, "echo": {"echo": True}},
    "stop": {
        "none": {},
        "string": {"stop": "e"},
        "strings": {"stop": [" th", "zzz", "\n"]},
        "ids": {"stop_token_ids": [COMMON]},
        "shown": {"stop": "o", "include_stop_str_in_output": True},
    },
    "eos": {"ends": {}, "ignored": {"ignore_eos": True, "skip_special_tokens": False}},
    "least": {"none": {}, "some": {"min_tokens": 5}, "all": {"min_tokens": 12}},
    "length": {"long": {"max_tokens": 12}, "one": {"max_tokens": 1}},
    "priority": {"usual": {}, "late": {"priority": 5}},
}
Case = dict[str, str]


def fits(case: Case) -> bool:
    """Whether these values, of some or all features, can be asked for together."""
    chat, streamed = case.get("route") == "chat", case.get("stream") == "streamed"
    return not (
        (chat and case.get("echo") == "echo")
        or (streamed and case.get("prompt", "none") != "none")
        or (case.get("swap") == "follow" and case.get("model", "trained") != "trained")
        or (case.get("length") == "one" and case.get("least", "none") != "none")
    )


def crossed(seed: int = 0) -> list[Case]:
    """Cases in which every pair of values that fit is there, made greedily: each takes in as many new pairs as the
    best of a few tries does."""
    rng = random.Random(seed)
    left = {
        pair: None  # a set that keeps its order
        for f, g in itertools.combinations(FEATURES, 2)
        for pair in itertools.product(((f, a) for a in FEATURES[f]), ((g, b) for b in FEATURES[g]))
        if fits(dict(pair))
    }
    order = list(FEATURES).index

    def grow(start: tuple[tuple[str, str], ...]) -> Case:
        case = dict(start)
        for name in rng.sample(list(FEATURES), len(FEATURES)):
            if name not in case:
                options = [v for v in FEATURES[name] if fits(case | {name: v})]
                case[name] = max(options, key=lambda v: (new(case, name, v), rng.random()))
        return {name: case[name] for name in FEATURES}

    def new(case: Case, name: str, value: str) -> int:
        own = (name, value)
        return sum(((own, one) if order(name) < order(one[0]) else (one, own)) in left for one in case.items())

    def pairs(case: Case) -> Iterator[tuple[tuple[str, str], ...]]:
        return itertools.combinations(case.items(), 2)

    cases: list[Case] = []
    while left:
        tries = [grow(next(iter(left))) for _ in range(5)]
        cases.append(max(tries, key=lambda case: sum(pair in left for pair in pairs(case))))
        for pair in pairs(cases[-1]):
            left.pop(pair, None)
    return cases


CASES = crossed()


@pytest.mark.promise("D8")
def test_any_two_values_that_fit_are_together_in_a_case() -> None:
    assert all(fits(case) and case.keys() == FEATURES.keys() for case in CASES)
    together = {frozenset(pair) for case in CASES for pair in itertools.combinations(case.items(), 2)}
    for f, g in itertools.combinations(FEATURES, 2):
        for a, b in itertools.product(FEATURES[f], FEATURES[g]):
            assert (frozenset(((f, a), (g, b))) in together) == fits({f: a, g: b}), (f, a, g, b)


# --- asking --------------------------------------------------------------------------------------------------------


@dataclass
class Said:
    """One choice of a reply, whole or put together from a stream."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[tuple[float | None, list[float]]] = field(default_factory=list)  # its own, and the likeliest
    prompt: list[int] = field(default_factory=list)
    prompt_logprobs: Any = None


@dataclass
class Reply:
    choices: list[Said]
    usage: dict[str, Any]


def body_of(case: Case) -> dict[str, Any]:
    body: dict[str, Any] = {"return_token_ids": True}
    for name, value in case.items():
        body |= FEATURES[name][value]
    if case["route"] == "chat":
        body["messages"] = [{"role": "user", "content": QUESTION}]
        if "logprobs" in body:
            body["top_logprobs"] = body["logprobs"]
            body["logprobs"] = True
    else:
        body["prompt"] = STORY if case["route"] == "completion" else [STORY, TOKENIZER.encode("3 4 5 6")]
    return body


def ask(server: RunningServer, case: Case) -> Reply:
    path = "/v1/chat/completions" if case["route"] == "chat" else "/v1/completions"
    reply = server.client.post(path, json=body_of(case))
    assert reply.status_code == 200, (case, reply.text)
    if case["stream"] == "whole":
        events = [reply.json()]
    else:
        assert reply.text.endswith("data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices: dict[int, Said] = {}
    for event in events:
        for choice in event["choices"]:
            take(choices.setdefault(choice["index"], Said()), choice, event)
    return Reply([choices[i] for i in sorted(choices)], events[-1]["usage"])


def take(said: Said, choice: dict[str, Any], event: dict[str, Any]) -> None:
    message = choice.get("message") or choice.get("delta") or {}
    said.text += choice.get("text") or message.get("content") or ""
    said.tokens += choice.get("token_ids", ())
    said.finish = choice["finish_reason"] or said.finish
    beside = choice if "prompt_token_ids" in choice else event
    said.prompt = beside.get("prompt_token_ids", said.prompt)
    said.prompt_logprobs = choice.get("prompt_logprobs", event.get("prompt_logprobs"))
    given = choice.get("logprobs")
    if given is None:
        return
    if "content" in given:
        said.logprobs += [(e["logprob"], [t["logprob"] for t in e["top_logprobs"]]) for e in given["content"]]
    else:
        tops = [sorted((top or {}).values(), reverse=True) for top in given["top_logprobs"]]
        said.logprobs += list(zip(given["token_logprobs"], tops, strict=True))


# --- checking ------------------------------------------------------------------------------------------------------


def sampled(case: Case, body: dict[str, Any], eos: list[int]) -> Sampled:
    """What the oracle is told. Of several stop strings those that never come are left out."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    ends = (frozenset() if body.get("ignore_eos") else frozenset(eos)) | frozenset(body.get("stop_token_ids", ()))
    stop = body.get("stop")
    return Sampled(
        **{name: body[name] for name in names if name in body},
        logit_bias=tuple((int(t), float(b)) for t, b in body.get("logit_bias", {}).items()),
        min_tokens=body.get("min_tokens", 0),
        max_tokens=body["max_tokens"],
        seed=body["seed"],
        stop=stop[0] if isinstance(stop, list) else stop,
        ends=ends,
        include_stop=bool(body.get("include_stop_str_in_output")),
        show_special=body.get("skip_special_tokens") is False,
    )


ADAPTER = {"base": None, "lora": "shout", "trained": "json"}


def check(case: Case, reply: Reply, eos: list[int]) -> None:
    body = body_of(case)
    p, adapter, n = sampled(case, body, eos), ADAPTER[case["model"]], body.get("n", 1)
    prompts = 2 if case["route"] == "two prompts" else 1
    assert len(reply.choices) == n * prompts
    expected = {"chat": QUESTION, "completion": STORY, "two prompts": STORY}
    for i, said in enumerate(reply.choices):
        prompt = said.prompt or reply.choices[0].prompt
        if case["route"] == "chat":
            assert QUESTION in TOKENIZER.decode(prompt, show_special=True)
        else:
            text = "3 4 5 6" if i >= n else expected[case["route"]]
            assert prompt == TOKENIZER.encode(text)
        scores = check_tokens(prompt, said.tokens, i % n, adapter, p)
        text = said.text
        if "echo" in body:
            shown = TOKENIZER.decode(prompt, show_special=True)
            assert text.startswith(shown)
            text = text[len(shown) :]
        assert said.finish is not None
        # A thought is no part of a chat's text.
        if case["route"] != "chat" or TOKENIZER.added_tokens["<think>"] not in said.tokens:
            check_end(said.tokens, text, said.finish, p)
        check_logprobs(case, body, said, prompt, scores, adapter)
        check_prompt_logprobs(body.get("prompt_logprobs"), said, prompt, adapter)
    tokens = sum(len(said.tokens) for said in reply.choices)
    lengths = sum(len(reply.choices[k * n].prompt or reply.choices[0].prompt) for k in range(prompts))
    assert reply.usage["completion_tokens"] == tokens
    assert reply.usage["prompt_tokens"] == lengths
    assert reply.usage["total_tokens"] == lengths + tokens


def check_logprobs(
    case: Case, body: dict[str, Any], said: Said, prompt: list[int], scores: Any, adapter: str | None
) -> None:
    """The model's own logprobs of what was drawn, whatever drew it, and the likeliest. An echo has the prompt's."""
    if case["logprobs"] == "none":
        assert said.logprobs == []
        return
    k = body.get("top_logprobs", body["logprobs"])
    own: list[float | None] = [float(lp[t]) for lp, t in zip(scores, said.tokens, strict=True)]
    likeliest = [np.sort(lp)[::-1] for lp in scores]
    if "echo" in body:
        before = log_softmax(logits_of(prompt, adapter))
        own = [None, *(float(lp[t]) for lp, t in zip(before, prompt[1:], strict=False)), *own]
        likeliest = [*(np.sort(lp)[::-1] for lp in (before[:1], *before[:-1])), *likeliest]
    assert len(said.logprobs) == len(own)
    for (given, top), exact, best in zip(said.logprobs, own, likeliest, strict=True):
        assert (given is None) == (exact is None)
        if given is None or exact is None:
            continue
        assert abs(given - exact) < LOGPROB_TOLERANCE
        # A completion shows tokens by their text: two that read the same are one, and its own is among them.
        wanted = min(k, len(top))
        assert wanted >= k - 2 and len(top) <= k + 1
        if k and case["route"] == "chat":
            assert np.allclose(top, best[:k], atol=LOGPROB_TOLERANCE)
        elif k:
            assert abs(top[0] - best[0]) < LOGPROB_TOLERANCE


def check_prompt_logprobs(k: int | None, said: Said, prompt: list[int], adapter: str | None) -> None:
    given = said.prompt_logprobs
    assert (given is None) == (k is None)
    if given is None or k is None:
        return
    assert given[0] is None and len(given) == len(prompt)
    for own, token, lp in zip(given[1:], prompt[1:], log_softmax(logits_of(prompt, adapter)), strict=False):
        assert abs(own[str(token)]["logprob"] - lp[token]) < LOGPROB_TOLERANCE
        best = sorted((e["logprob"] for e in own.values() if e["rank"] <= k), reverse=True)
        assert np.allclose(best, np.sort(lp)[::-1][:k], atol=LOGPROB_TOLERANCE)


# --- the server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It has an adapter that is trained, and so far is what it began as."""
    config = learning_config(tmp_path_factory.mktemp("learning"), init_from="json")
    config = structs.replace(config, rl_training=structs.replace(config.rl_training, lora_rank=8))
    with serving(config) as running:
        yield running


@pytest.fixture(scope="module")
def crowded(server: RunningServer) -> list[Reply]:
    """The replies to all cases, each asked beside others."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda case: ask(server, case), CASES))


@pytest.fixture(scope="module")
def eos(server: RunningServer) -> list[int]:
    return list(server.client.get("/health").json()["engine"]["eos_token_ids"])


@pytest.mark.promise("D8")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_case_answers_as_by_plain_evaluation(crowded: list[Reply], eos: list[int], number: int) -> None:
    check(CASES[number], crowded[number], eos)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_case_answers_alone_as_in_the_crowd(server: RunningServer, crowded: list[Reply], number: int) -> None:
    alone, beside = ask(server, CASES[number]), crowded[number]
    for one, other in zip(alone.choices, beside.choices, strict=True):
        assert (one.tokens, one.text, one.finish) == (other.tokens, other.text, other.finish)
        assert len(one.logprobs) == len(other.logprobs)


def test_choices_and_seeds_draw_apart(crowded: list[Reply]) -> None:
    """The oracle has the engine's noise: that this depends on the choice and the seed is looked at here."""
    free = [
        [tuple(said.tokens) for said in reply.choices[:4]]
        for case, reply in zip(CASES, crowded, strict=True)
        if case["n"] == "four" and case["draw"] in ("plain", "hot") and case["bias"] != "forced"
    ]
    assert sum(len(set(choices)) > 1 for choices in free) > 1


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("route", "stream", "swap", "priority")])
def test_a_reply_to_other_values_is_seen(crowded: list[Reply], eos: list[int], name: str) -> None:
    """The check is not blind: taken for the reply to a request with another value of a feature, replies fail it."""

    def fails(case: Case, reply: Reply) -> bool:
        try:
            check(case, reply, eos)
        except (AssertionError, ValueError):
            return True
        return False

    others = (
        (case | {name: value}, reply)
        for case, reply in zip(CASES, crowded, strict=True)
        for value in FEATURES[name]
        if value != case[name] and fits(case | {name: value})
    )
    assert len(list(itertools.islice((other for other in others if fails(*other)), 5))) == 5
