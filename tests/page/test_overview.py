"""`/v1/overview`, which the page asks once a second."""

from __future__ import annotations

import json
import socket
from typing import Any

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.engine.messages import Occupancy
from mlx_tandem.server.overview import overview
from tests.api.scripted import scripted_server
from tests.serving import RunningServer, demo_config
from tests.waiting import until


def seen(server: RunningServer) -> dict[str, Any]:
    return server.client.get("/v1/overview").json()


def test_it_counts_what_was_answered(server: RunningServer) -> None:
    before = seen(server)
    told = server.chat("What is 17 + 25?", model="shout", stream=True, stream_options={"include_usage": True}).text
    usage = json.loads(told.split("data: ")[-2])["usage"]
    until(lambda: seen(server)["requests"]["completed"] == before["requests"]["completed"] + 1)
    after = seen(server)
    tokens = {name: after["tokens"][name] - before["tokens"][name] for name in ("prompt", "generated")}
    assert tokens == {"prompt": usage["prompt_tokens"], "generated": usage["completion_tokens"]}
    for name in ("time_to_first_token", "inter_token"):
        old, new = before["latency"][name], after["latency"][name]
        assert sum(new["counts"]) > sum(old["counts"]) and new["sum"] > old["sum"]
        assert len(new["counts"]) == len(new["bounds"]) + 1
    assert after["memory"]["budget"] == sum(after["memory"]["parts"].values())
    assert after["adapters"]["registered"] >= 3 and after["adapters"]["resident"] >= 1
    assert (after["status"], after["engine"]["model_type"], after["learning"]) == ("ok", "qwen3", False)


def test_it_shows_the_load_of_the_engine() -> None:
    with scripted_server() as (client, peer, _):
        peer.say(Occupancy(3, 2, 10, 54))
        until(lambda: client.get("/v1/overview").json()["requests"]["running"] == 3)
        found = client.get("/v1/overview").json()
        assert found["requests"]["waiting"] == 2
        assert (found["cache"]["used_blocks"], found["cache"]["blocks"]) == (10, 64)


def test_it_answers_before_there_is_an_engine() -> None:
    def launch() -> tuple[socket.socket, object]:
        raise AssertionError("nothing is started here")

    found = overview(ServerFront(demo_config(), launch))  # type: ignore[arg-type]
    assert (found["status"], found["engine"], found["memory"]["budget"]) == ("starting", None, 0)
    assert found["progress"]["stage"]
    assert len(json.dumps(found)) < 4096
