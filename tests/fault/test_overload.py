"""Ten times as many clients as a server takes: who is refused is told at once and why, and nobody else is harmed.

Nothing here is timed: that refusals are quick is seen by an engine that stands still meanwhile, and goodput by how full
the engine's steps are.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from mlx_tandem.config import SchedulerConfig
from tests.serving import RunningServer, demo_config, serving
from tests.streams import until_token
from tests.waiting import until

SEATS, QUEUE = 4, 4
CAPACITY = SEATS + QUEUE
CLIENTS = 10 * CAPACITY
ANSWERS = 8 * CAPACITY  # until which an overload goes on
TOKENS = 12
PROMPTS = [[300 + 7 * i + j for j in range(12)] for i in range(8)]
PADDING = "x" * 60_000
"""Of each body: what refused requests bring would be seen in memory if it were kept."""
FLAT = 24 << 20
"""Bytes that the server may grow by between two overloads that are alike: less than half of what is refused in one."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = demo_config(max_queue_size=QUEUE)
    scheduler = SchedulerConfig(max_num_seqs=SEATS)
    with serving(
        msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, scheduler=scheduler))
    ) as s:
        yield s


def body(number: int) -> bytes:
    fields = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return json.dumps(fields | {"metadata": {"padding": PADDING}}).encode()


BODIES = [body(i) for i in range(len(PROMPTS))]


@dataclass(frozen=True)
class Answer:
    number: int
    status: int
    retry_after: str | None
    content: dict[str, Any]

    @property
    def text(self) -> str:
        return str(self.content["choices"][0]["text"])


class Asking:
    """A client with a connection of its own, which asks again and again without waiting as it is told to."""

    def __init__(self, server: RunningServer):
        url = httpx.URL(server.url)
        self._connection = http.client.HTTPConnection(str(url.host), url.port or 80, timeout=60)

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, number: int) -> Answer:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", BODIES[number % len(BODIES)], headers)
        reply = self._connection.getresponse()
        return Answer(number, reply.status, reply.getheader("retry-after"), json.loads(reply.read()))


def overload(server: RunningServer, clients: int) -> list[Answer]:
    """All clients at once, each asking again as soon as it has an answer or a refusal, until ANSWERS are given."""
    answers: list[Answer] = []
    given = [0]

    def run(first: int) -> None:
        with Asking(server) as client:
            number = first
            while given[0] < ANSWERS:
                answer = client.ask(number)
                answers.append(answer)
                given[0] += answer.status == 200
                number += 1

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(run, range(clients)))
    return answers


def stats(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/v1/engine/metrics").json()
    return found


def settled(server: RunningServer) -> dict[str, Any]:
    """The engine's counters once nothing is open and it has told the front of every token that the front has given."""
    while True:
        told = stats(server)
        if not told["open_requests"] and told["engine"]["generated_tokens"] == told["generated_tokens"]:
            engine: dict[str, Any] = told["engine"]
            return engine


def rows_per_step(server: RunningServer, clients: int) -> tuple[list[Answer], float]:
    """The answers, and how many rows the engine's steps had on average until the last of them was done."""
    before = settled(server)
    answers = overload(server, clients)
    after = settled(server)
    tokens = TOKENS * sum(a.status == 200 for a in answers)
    assert after["generated_tokens"] == before["generated_tokens"] + tokens, "who was refused was answered, too"
    return answers, (after["rows"] - before["rows"]) / (after["steps"] - before["steps"])


def resident(server: RunningServer) -> int:
    """Bytes of memory that the front and its engine have."""
    pids = f"{server.process.pid},{server.engine_pid()}"
    listed = subprocess.run(["ps", "-o", "rss=", "-p", pids], capture_output=True, text=True, check=True).stdout
    return 1024 * sum(map(int, listed.split()))


@pytest.fixture(scope="module")
def alone(server: RunningServer) -> list[str]:
    """What each prompt is answered with when nobody else asks."""
    with Asking(server) as client:
        return [client.ask(i).text for i in range(len(PROMPTS))]


def assert_refused_in_good_form(answer: Answer) -> None:
    error = answer.content["error"]
    assert answer.status == 429
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    assert answer.retry_after is not None and 1 <= int(answer.retry_after) <= 120


@pytest.mark.promise("FLT-43")
@pytest.mark.slow
def test_an_overloaded_server_answers_whom_it_takes_and_refuses_the_rest(
    server: RunningServer, alone: list[str]
) -> None:
    """Everybody gets the whole and right answer or a typed refusal, the batch stays as full as without the crowd, and
    memory does not grow with who is refused."""
    assert len(set(alone)) == len(PROMPTS)
    quiet, most = rows_per_step(server, CAPACITY)
    assert {a.status for a in quiet} == {200}, "as many as it takes are all taken"

    refused = stats(server)["refused"].get("max_queue_size", 0)
    first, filled = rows_per_step(server, CLIENTS)
    before = resident(server)
    second, filled_again = rows_per_step(server, CLIENTS)
    grown = resident(server) - before

    for answers in (first, second):
        for answer in answers:
            if answer.status == 200:
                assert answer.text == alone[answer.number % len(PROMPTS)]
            else:
                assert_refused_in_good_form(answer)
        counts = Counter(a.status for a in answers)
        assert counts[200] >= ANSWERS and counts[429] >= 2 * counts[200], counts
    told = sum(a.status == 429 for a in (*first, *second))
    assert stats(server)["refused"]["max_queue_size"] - refused == told
    # The end, when nobody takes the places of the last, is a part of both.
    assert min(filled, filled_again) >= 0.8 * most, "goodput falls while others are refused"
    assert grown < FLAT, f"{grown / 2**20:.0f} MiB more after as many requests again"

    after = stats(server)
    assert (after["open_requests"], after["open_choices"]) == (0, 0)
    assert after["engine"]["preemptions"] == after["engine"]["step_failures"] == after["restarts"] == 0
    assert server.client.get("/health").json()["status"] == "ok"
    with Asking(server) as client:
        assert [client.ask(i).text for i in range(len(PROMPTS))] == alone


def test_refusals_come_while_the_engine_stands_still(server: RunningServer, alone: list[str]) -> None:
    """They need no word of the engine, and those who were let in lose nothing by them."""
    engine = server.engine_pid()

    def ask(number: int) -> Answer:
        with Asking(server) as client:
            return client.ask(number)

    with ThreadPoolExecutor(CAPACITY) as pool, Asking(server) as client:
        os.kill(engine, signal.SIGSTOP)
        try:
            taken = [pool.submit(ask, i) for i in range(CAPACITY)]
            until(lambda: stats(server)["open_choices"] >= CAPACITY)
            for number in range(5 * CAPACITY):
                assert_refused_in_good_form(client.ask(number))
            assert not any(asked.done() for asked in taken)
            assert server.client.get("/livez").status_code == 200
        finally:
            os.kill(engine, signal.SIGCONT)
        assert [asked.result().text for asked in taken] == [alone[i % len(PROMPTS)] for i in range(CAPACITY)]


def test_a_place_that_is_free_again_is_given_without_the_engine(server: RunningServer, alone: list[str]) -> None:
    """One of those who have all places leaves while the engine stands still: the next is let in, and no more."""
    engine, long = server.engine_pid(), {"prompt": PROMPTS[0], "max_tokens": 900, "ignore_eos": True, "stream": True}

    def ask(number: int) -> Answer:
        with Asking(server) as client:
            return client.ask(number)

    with ThreadPoolExecutor(CAPACITY + 1) as pool, Asking(server) as client:
        with (
            httpx.Client(base_url=server.url, timeout=60) as leaving,
            leaving.stream("POST", "/v1/completions", json=long) as stream,
        ):
            lines = stream.iter_lines()
            until_token(lines)
            os.kill(engine, signal.SIGSTOP)
            try:
                taken = [pool.submit(ask, i) for i in range(CAPACITY - 1)]
                until(lambda: stats(server)["open_choices"] >= CAPACITY)
                assert_refused_in_good_form(client.ask(0))
                leaving.close()
                until(lambda: stats(server)["open_choices"] != CAPACITY)
                taken.append(pool.submit(ask, CAPACITY - 1))
                until(lambda: stats(server)["open_choices"] >= CAPACITY)
                assert_refused_in_good_form(client.ask(0))
            finally:
                os.kill(engine, signal.SIGCONT)
        assert [asked.result().text for asked in taken] == [alone[i % len(PROMPTS)] for i in range(CAPACITY)]
