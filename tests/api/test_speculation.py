"""Drafts over HTTP: answers are those without drafts, whatever is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from mlx_tandem.config import SpeculationConfig
from tests.serving import RunningServer, demo_config, serving
from tests.waiting import until

TEXT = "Say this again, word for word: one two three, one two three, one two three, one two three. "
COMMON = {"max_tokens": 48, "logprobs": 3, "seed": 3, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {  # few kinds, each of which compiles kernels of its own; tests/engine has more
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "few tokens": {"temperature": 1, "top_p": 0.9, "top_k": 4, "min_p": 0.01, "n": 2},
    "a stop": {"temperature": 0, "stop": ["e t"]},
    "an adapter": {"temperature": 0, "model": "shout"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    base = demo_config()
    drafts = SpeculationConfig("ngram", dynamic=False, ngram_min=1)
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
    until(lambda: drafted(server)["num_accepted_tokens"] != before)  # it comes with the engine's next sign of life
    assert drafted(server)["enabled"]


def test_a_request_may_do_without_drafts(server: RunningServer) -> None:
    assert server.complete(TEXT, speculation=3).json()["error"]["param"] == "speculation"
