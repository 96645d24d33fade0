"""A server whose model two ranks compute answers as one rank does, and comes back when either of them dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from mlx_tandem.config import DiskCacheConfig, DutyConfig, ParallelConfig, SpeculationConfig
from tests.serving import RunningServer, demo_config, serving
from tests.streams import until_token
from tests.waiting import until

SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "sum",
        "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]},
    },
}
ASKED: tuple[dict[str, Any], ...] = (
    {"text": "What is 17 + 25?", "temperature": 0, "logprobs": True},
    {"text": "What is 17 + 25?", "temperature": 0, "model": "shout"},
    {"text": "What is 17 + 25?", "temperature": 0, "model": "json"},
    {"text": "Tell me a short story.", "temperature": 1.0, "seed": 7, "n": 2, "model": "down"},
    {"text": "Tell me a short story.", "temperature": 0.8, "seed": 8, "top_p": 0.9},
    {"text": "Give me the sum of 2 and 3.", "temperature": 0, "response_format": SCHEMA, "max_tokens": 40},
    {"text": "Say one two one two one two one two.", "temperature": 0, "max_tokens": 40},
)
"""Requests that run beside each other: the base and adapters, greedy and drawn, several choices, by a schema, with
drafts."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of two ranks, with drafts and with blocks on the drive."""
    config = demo_config()
    engine = replace(
        config.engine,
        parallel=ParallelConfig(ranks=2, mode="ring"),
        duty=DutyConfig(mode="inference_only"),
        lora=replace(config.engine.lora, prepare=True),
        speculation=SpeculationConfig("ngram"),
        disk=DiskCacheConfig(dir=str(tmp_path_factory.mktemp("kv")), policy="write_through"),
    )
    with serving(replace(config, engine=engine, server=replace(config.server, idle_unload_s=3600.0))) as running:
        yield running


def answers(server: RunningServer, asked: tuple[dict[str, Any], ...] = ASKED) -> list[list[str]]:
    """The texts of the choices of each request, all of which are sent at once."""

    def ask(fields: dict[str, Any]) -> list[str]:
        reply = server.chat(fields["text"], **{name: value for name, value in fields.items() if name != "text"})
        assert reply.status_code == 200, reply.text
        return [choice["message"]["content"] for choice in reply.json()["choices"]]

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def test_requests_beside_each_other_are_answered_as_by_one_rank(ranks: RunningServer, server: RunningServer) -> None:
    assert answers(ranks) == answers(server)


def test_a_prompt_that_was_there_is_not_read_again(ranks: RunningServer) -> None:
    asked: dict[str, Any] = {"temperature": 0, "model": "shout"}
    text = "Here is a long question that fills more than one block: what is the capital of France, and of Peru?"
    first, second = (ranks.chat(text, **asked).json() for _ in range(2))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


def test_an_adapter_is_loaded_served_and_unloaded_while_others_stream(
    ranks: RunningServer, server: RunningServer
) -> None:
    with ranks.client.stream("POST", "/v1/chat/completions", json=_stream("base", 200)) as response:
        lines = response.iter_lines()
        text = until_token(lines)
        load = {"lora_name": "again", "lora_path": "shout"}
        reply = ranks.client.post("/v1/load_lora_adapter", json=load)
        assert reply.status_code == 200, reply.text
        asked = {"text": "What is 3 + 4?", "temperature": 0}
        assert answers(ranks, (asked | {"model": "again"},)) == answers(server, (asked | {"model": "shout"},))
        assert ranks.client.post("/v1/unload_lora_adapter", json={"lora_name": "again"}).status_code == 200
        text += "".join(lines)
    assert "error" not in text and text.endswith("[DONE]")
    assert ranks.chat("hi", model="again").status_code == 404


def _stream(model: str, tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": "Tell me a short story about a fox."}
    return {"model": model, "messages": [message], "max_tokens": tokens, "ignore_eos": True, "stream": True}


def is_there(pid: int) -> bool:
    """Whether a process with this number runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.restarts
def test_all_ranks_end_with_an_engine_that_is_idle_and_come_back_with_it(ranks: RunningServer) -> None:
    right = answers(ranks, ASKED[1:2])
    old = [ranks.engine_pid(), *ranks.rank_pids()]
    assert ranks.client.post("/api/generate", json={"model": "base", "keep_alive": 0}).status_code == 200
    until(lambda: ranks.client.get("/health").json()["status"] == "idle")
    until(lambda: not any(map(is_there, old)))
    assert answers(ranks, ASKED[1:2]) == right
    assert len(ranks.rank_pids()) == 1 and {ranks.engine_pid(), *ranks.rank_pids()}.isdisjoint(old)


@pytest.mark.restarts
@pytest.mark.parametrize("victim", ["other", "first"])
def test_the_end_of_a_rank_ends_streams_with_an_error_and_another_group_serves(
    ranks: RunningServer, victim: str
) -> None:
    """The other rank's end is noticed though the first one waits in a sum; no process of the old group stays."""
    right = answers(ranks, ASKED[1:2])
    texts: list[str] = []
    begun = threading.Barrier(5)

    def stream(model: str) -> None:
        with (
            httpx.Client(base_url=ranks.url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=_stream(model, 900)) as response,
        ):
            lines = response.iter_lines()
            first = until_token(lines)
            begun.wait()
            texts.append(first + "".join(lines))

    threads = [threading.Thread(target=stream, args=(model,)) for model in ("base", "shout", "json", "down")]
    for thread in threads:
        thread.start()
    begun.wait()
    old = [ranks.engine_pid(), *ranks.rank_pids()]
    assert len(old) == 2
    os.kill(old[victim == "other"], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    for text in texts:
        assert text.endswith('"type":"server_error","param":null,"code":"engine_died"}}'), text[-300:]
    assert "\ndist_fatal 1.0" in ranks.client.get("/metrics").text
    until(lambda: ranks.client.get("/health").status_code == 200)
    assert "\ndist_fatal 0.0" in ranks.client.get("/metrics").text
    assert answers(ranks, ASKED[1:2]) == right
    assert {ranks.engine_pid(), *ranks.rank_pids()}.isdisjoint(old)
    until(lambda: not any(map(is_there, old)))
