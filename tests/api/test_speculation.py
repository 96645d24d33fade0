"""Drafts over HTTP: answers are those without drafts, whatever is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from mlx_tandem import demo
from mlx_tandem.config import SpeculationConfig
from tests.serving import RunningServer, demo_config, serving

TEXT = "Say this again, word for word: one two three, one two three, one two three, one two three. "
COMMON = {"max_tokens": 32, "logprobs": 3, "seed": 3, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {  # few kinds, each of which compiles kernels of its own; tests/engine has more
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "few tokens": {"temperature": 1, "top_p": 0.9, "top_k": 4, "min_p": 0.01, "n": 2},
    "a stop": {"temperature": 0, "stop": ["e t"]},
    "an adapter": {"temperature": 0, "model": "shout"},
}


METHODS = {
    "ngram": SpeculationConfig("ngram", dynamic=False, ngram_min=1),
    "draft": SpeculationConfig("draft", str(demo.DRAFT_PATH), num_tokens=3, dynamic=False),
}


@pytest.fixture(scope="module", params=METHODS)
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    base, drafts = demo_config(), METHODS[request.param]
    with serving(replace(base, engine=replace(base.engine, speculation=drafts))) as running:
        yield running


def answer(server: RunningServer, fields: dict[str, Any], speculation: bool) -> list[Any]:
    body = {"model": "tandem-demo"} | COMMON | fields | {"speculation": speculation}
    reply = server.complete(TEXT, **body)
    assert reply.status_code == 200, reply.text
    return [reply.json()["usage"]["completion_tokens"], *reply.json()["choices"]]


def drafted(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/v1/spec_decode/metrics").json()
    return found


def assert_same(own: list[Any], other: list[Any]) -> None:
    assert own[0] == other[0]
    for one, two in zip(own[1:], other[1:], strict=True):
        ours, theirs = one.pop("logprobs"), two.pop("logprobs")
        assert one == two and ours["tokens"] == theirs["tokens"]
        assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)


def test_answers_are_those_without_drafts(server: RunningServer) -> None:
    before = drafted(server)["num_accepted_tokens"]
    plain = {name: answer(server, fields, False) for name, fields in ASKED.items()}
    with ThreadPoolExecutor(4) as pool:  # some of them in one batch
        found = dict(zip(ASKED, pool.map(lambda f: answer(server, f, True), ASKED.values()), strict=True))
    for name, own in found.items():
        assert_same(own, plain[name])
    assert drafted(server)["num_accepted_tokens"] > before
    assert drafted(server)["enabled"]


def test_it_is_said_where_drafts_come_from(server: RunningServer) -> None:
    """With a draft model a few are copied, where enough tokens agree."""
    answer(server, ASKED["greedy"], True)
    found = drafted(server)
    assert found["mode"] in found["modes"].keys() <= {"draft", "ngram"}
    assert found["modes"].keys() == found["mode_distribution"].keys() - {"none"}


def test_a_request_may_do_without_drafts(server: RunningServer) -> None:
    assert server.complete(TEXT, speculation=3).json()["error"]["param"] == "speculation"


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    """Without a method; not measuring whether drafts pay, which depends on what else the machine does."""
    base, drafts = demo_config(), SpeculationConfig(dynamic=False)
    with serving(replace(base, engine=replace(base.engine, speculation=drafts))) as running:
        yield running


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"model": "base", "messages": [{"role": "user", "content": "Count from 1 to 30."}], "temperature": 0}
    reply = server.client.post("/v1/chat/completions", json=body | {"max_tokens": 40, "ignore_eos": True} | fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def predicted(reply: dict[str, Any]) -> tuple[int, int]:
    details = reply["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_an_answer_is_copied_from_a_prediction_as_far_as_it_says_the_same(plain: RunningServer) -> None:
    free = chat(plain)
    text = free["choices"][0]["message"]["content"]
    middle = len(text) // 2
    assert predicted(free) == (0, 0)
    for content in (text, [{"type": "text", "text": text[:middle]}, {"type": "text", "text": "!!" + text[middle:]}]):
        reply = chat(plain, prediction={"type": "content", "content": content})
        assert reply["choices"] == free["choices"]
        assert reply["usage"]["completion_tokens"] == free["usage"]["completion_tokens"]
        assert predicted(reply)[0] > 20
    junk = chat(plain, prediction={"type": "content", "content": "nothing of the kind " * 9})
    assert junk["choices"] == free["choices"] and predicted(junk)[1] > 0
    off = chat(plain, prediction={"type": "content", "content": text}, speculation=False)
    assert off["choices"] == free["choices"] and predicted(off) == (0, 0)


def test_a_completion_has_a_prediction_too_and_a_stream_counts_it(plain: RunningServer) -> None:
    fields = {"max_tokens": 32, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    free = plain.complete(TEXT, **fields).json()["choices"][0]["text"]
    given = {"prediction": {"type": "content", "content": free}, "stream_options": {"include_usage": True}}
    lines = plain.complete(TEXT, stream=True, **given, **fields).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == free
    assert predicted(events[-1])[0] > 10


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "diff", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more"),
        ({"type": "content", "content": "1 2 3 4 " * 2000}, "prediction.content"),
    ],
)
def test_a_prediction_that_cannot_be_is_refused_by_its_field(plain: RunningServer, prediction: Any, param: str) -> None:
    reply = plain.complete(TEXT, prediction=prediction)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
