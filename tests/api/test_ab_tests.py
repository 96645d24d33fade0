"""A/B tests of aliases over HTTP: thumbs on answers of real servers promote an arm or take it back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from mlx_tandem.config import CheckpointingConfig, Config
from tests.serving import RunningServer, demo_config, serving

ARMS = [{"adapter": "json", "weight": 1}, {"adapter": "shout", "weight": 1}]
TEST = {"control": "json"}


def config(folder: Path) -> Config:
    return replace(demo_config(), checkpointing=CheckpointingConfig(str(folder)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(config(tmp_path_factory.mktemp("ab"))) as running:
        yield running


def put(server: RunningServer, name: str, **body: Any) -> httpx.Response:
    return server.client.put(f"/v1/aliases/{name}", json={"arms": ARMS, "ab_test": TEST} | body)


def begun(server: RunningServer, name: str, **body: Any) -> None:
    reply = put(server, name, **body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["ab_test"]["state"] == "running"


def state_of(server: RunningServer, name: str) -> dict[str, Any]:
    """What the server says of the alias's test."""
    reply = server.client.get(f"/v1/aliases/{name}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["ab_test"]
    return found


def answers(server: RunningServer, name: str) -> int:
    return sum(arm["answers"] for arm in state_of(server, name)["arms"])


def asked(server: RunningServer, name: str, **fields: Any) -> tuple[str, str]:
    """The id of an answer by the alias, and the adapter that gave it."""
    reply = server.complete("hi", model=name, max_tokens=1, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"], reply.json()["model"].partition("@")[0]


def give(server: RunningServer, id: str, **body: Any) -> None:
    reply = server.client.post("/v1/feedback", json={"completion_id": id} | body)
    assert reply.status_code == 200, reply.text


def judge(server: RunningServer, name: str, liked: str, most: int) -> str:
    """Give thumbs up to the answers of one arm and down to others, until the test ends or `most` have come."""
    for _ in range(most):
        id, by = asked(server, name)
        give(server, id, thumb="up" if by == liked else "down")
        if (state := state_of(server, name)["state"]) != "running":
            return str(state)
    return "running"


def test_thumbs_promote_an_arm_also_across_a_kill(tmp_path: Path) -> None:
    """The alias is there after the kill, with all that was counted."""
    with serving(config(tmp_path)) as first:
        begun(first, "chosen")
        assert judge(first, "chosen", "shout", 20) == "running"
        before = state_of(first, "chosen")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    with serving(config(tmp_path)) as second:
        assert state_of(second, "chosen") == before and answers(second, "chosen") == 20
        assert judge(second, "chosen", "shout", 200) == "promoted"
        decided = second.client.get("/v1/aliases/chosen").json()
        assert [arm["adapter"] for arm in decided["arms"]] == ["shout"]
        control, shout = decided["ab_test"]["arms"]
        assert (control["mean_score"], shout["mean_score"], shout["verdict"]) == (0.0, 1.0, "promoted")
        assert shout["better"]["evidence"] >= shout["better"]["needed"] == 20.0
        assert decided["ab_test"]["decided"] >= decided["ab_test"]["began"] > 1e9
        assert {asked(second, "chosen")[1] for _ in range(8)} == {"shout"}
        counted = answers(second, "chosen")
        give(second, asked(second, "chosen")[0], thumb="down")
        assert answers(second, "chosen") == counted, "a test that has ended counts nothing"
        assert 'tandem_ab_tests{state="promoted"} 1.0' in second.client.get("/metrics").text


def test_thumbs_take_an_arm_back(server: RunningServer) -> None:
    begun(server, "kept")
    assert judge(server, "kept", "json", 200) == "taken_back"
    found = server.client.get("/v1/aliases/kept").json()
    assert [arm["adapter"] for arm in found["arms"]] == ["json"]
    assert [arm.get("verdict") for arm in found["ab_test"]["arms"]] == [None, "taken_back"]


def test_an_answer_counts_once_and_a_user_once(server: RunningServer) -> None:
    begun(server, "once")
    id, _ = asked(server, "once")
    for body in ({"thumb": "up"}, {"thumb": "up"}, {"score": 0.25}, {"thumb": "down", "choice": 0}):
        give(server, id, **body)
    assert answers(server, "once") == 1
    for _ in range(3):
        give(server, asked(server, "once", user="ana")[0], thumb="down")
    give(server, asked(server, "once", user="ben")[0], thumb="down")
    assert answers(server, "once") == 3
    id, _ = asked(server, "once", n=2, temperature=1)
    give(server, id, preferred=1)
    give(server, id, comment="both are fine")
    assert answers(server, "once") == 3, "neither says how good the arm is"
    give(server, id, score=0.5, choice=1)
    assert answers(server, "once") == 4


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_every_api_count(server: RunningServer, path: str, stream: bool) -> None:
    begun(server, "every")
    messages = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"model": "every", "stream": stream}
    if path == "/v1/responses":
        body |= {"input": "hi", "max_output_tokens": 4}
    elif path == "/v1/completions":
        body |= {"prompt": "hi", "max_tokens": 1}
    else:
        body |= {"messages": messages, "max_tokens": 1}
    before = answers(server, "every")
    reply = server.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    give(server, reply.text.partition('"id":"')[2].partition('"')[0], thumb="up")
    assert answers(server, "every") == before + 1


def test_a_change_of_weights_goes_on_and_anything_else_begins_anew(server: RunningServer) -> None:
    begun(server, "anew")
    old, _ = asked(server, "anew")
    give(server, asked(server, "anew")[0], thumb="up")
    begun(server, "anew", arms=[ARMS[0] | {"weight": 3}, ARMS[1]])
    assert answers(server, "anew") == 1
    assert [arm["share"] for arm in server.client.get("/v1/aliases/anew").json()["arms"]] == [0.75, 0.25]
    give(server, old, thumb="up")
    assert answers(server, "anew") == 2, "nor does an answer from before the change lose its test"
    old, _ = asked(server, "anew")
    begun(server, "anew", ab_test=TEST | {"min_answers": 9})
    give(server, old, thumb="up")
    assert answers(server, "anew") == 0
    assert put(server, "anew", ab_test=None).json()["ab_test"] is None
    begun(server, "anew")
    assert server.client.delete("/v1/aliases/anew").status_code == 200
    assert put(server, "anew", ab_test=None).json()["ab_test"] is None


def test_nothing_counts_while_the_adapter_of_an_arm_is_gone(server: RunningServer) -> None:
    server.client.post("/v1/adapters", json={"name": "brief", "path": "shout"})
    begun(server, "orphan", arms=[ARMS[0], {"adapter": "brief", "weight": 1}])
    id, by = asked(server, "orphan")
    server.client.delete("/v1/adapters/brief")
    give(server, id, thumb="up" if by == "json" else "down")
    found = state_of(server, "orphan")
    assert (found["state"], found["missing"], answers(server, "orphan")) == ("paused", ["brief"], 0)
    server.client.post("/v1/adapters", json={"name": "brief", "path": "shout"})
    give(server, id, thumb="down" if by == "json" else "up")
    assert (state_of(server, "orphan")["state"], answers(server, "orphan")) == ("running", 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"ab_test": {"control": "base"}}, "ab_test.control"),
        ({"ab_test": {}}, "ab_test.control"),
        ({"ab_test": TEST | {"false_promotion": 0}}, "ab_test.false_promotion"),
        ({"ab_test": TEST | {"false_take_back": 0.6}}, "ab_test.false_take_back"),
        ({"ab_test": TEST | {"min_answers": 0}}, "ab_test.min_answers"),
        ({"ab_test": TEST | {"sometimes": 1}}, "ab_test.sometimes"),
        ({"arms": ARMS[:1]}, "arms"),
        ({"arms": [ARMS[0], ARMS[1] | {"weight": 0}]}, "arms[1].weight"),
        ({"arms": [ARMS[0], {"adapter": "nobody", "weight": 1}]}, "arms[1].adapter"),
    ],
)
def test_tests_that_are_refused(server: RunningServer, body: dict[str, Any], param: str) -> None:
    reply = put(server, "refused", **body)
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["param"] == param
    assert server.client.get("/v1/aliases/refused").status_code == 404
