"""Several adapters that learn in one real server: each from its own answers, with settings and a folder of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.learns import SORT, collect, learning_config, trajectories
from tests.serving import RunningServer, serving
from tests.unit.cli_tools import tandem
from tests.waiting import until

ADAPTERS: dict[str, dict[str, Any]] = {
    "policy": {},
    "twin": {},
    "coder": {"learning_rate": 3e-3, "algorithm": "dr_grpo", "lora_rank": 2, "loss_tokens": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(learning_config(folder, adapters=ADAPTERS)) as running:
        yield running


def named(adapter: str | None) -> dict[str, str]:
    return {} if adapter is None else {"adapter": adapter}


def get(server: RunningServer, path: str, adapter: str | None = None) -> dict[str, Any]:
    reply = server.client.get(path, params=named(adapter))
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def status(server: RunningServer, adapter: str | None = None) -> dict[str, Any]:
    return get(server, "/v1/training/status", adapter)


def post(server: RunningServer, path: str, adapter: str | None, **body: object) -> dict[str, Any]:
    reply = server.client.post(path, json=body, params=named(adapter))
    assert reply.status_code < 300, reply.text
    found: dict[str, Any] = reply.json()
    return found


def update(server: RunningServer, adapter: str | None, *, wait: bool = True, **body: object) -> dict[str, Any]:
    return post(server, "/v1/training/update", adapter, **{"trajectories": trajectories(), "wait": wait} | body)


def job(server: RunningServer, id: str) -> dict[str, Any]:
    return get(server, f"/v1/training/jobs/{id}")


def digest(server: RunningServer, model: str) -> str:
    return str(get(server, f"/v1/adapters/{model}")["digest"])


def test_each_equals_itself_alone_and_a_long_update_keeps_no_short_one_waiting(server: RunningServer) -> None:
    """`policy` learns while nothing else does, and `twin`, which has its settings, in the middle of an update of
    another."""
    assert update(server, "policy")["report"]["outcome"] == "published"
    long = update(server, "coder", wait=False, trajectories=trajectories(200, "Sort down: 5 3 9 1 7 2 8 6 4"))
    twin = update(server, "twin")
    assert job(server, long["id"])["status"] == "running", "the device was shared, and the shorter one was done first"
    assert twin["report"]["outcome"] == "published"
    assert digest(server, "twin@2") == digest(server, "policy@2") != digest(server, "policy@1")
    until(lambda: job(server, long["id"])["status"] == "succeeded")
    assert [status(server, name)["version"] for name in ADAPTERS] == [2, 2, 2]
    assert digest(server, "coder@2") != digest(server, "policy@2")
    history = get(server, "/v1/training/history", "coder")["updates"]
    assert [(u["trajectories"], u["learning_rate"]) for u in history] == [(200, 3e-3)]


def test_each_learns_from_its_own_answers(server: RunningServer) -> None:
    """Agents of one environment ask for several models; what each has said goes to the learner of its adapter."""
    before = {name: status(server, name)["trajectories_collected"] for name in ADAPTERS}
    collect(server, n=4)
    collect(server, n=3, model="coder")
    collect(server, n=5, model="twin")  # whose content is that of `policy`
    collect(server, n=2, model="base")
    (kept,) = collect(server, n=1, model="coder", scoring_function="later")
    id = kept["trajectory_id"]
    assert [status(server, name)["open_trajectories"] for name in ADAPTERS] == [0, 0, 1]
    wrong = server.complete(SORT, model="policy", trajectory_id=id)
    assert wrong.status_code in (400, 409), wrong.text
    assert get(server, f"/v1/trajectories/{id}")["answers"] == 1
    assert post(server, f"/v1/trajectories/{id}/reward", None, reward=1.0)["status"] == "collected"
    again = server.client.post(f"/v1/trajectories/{id}/reward", json={"reward": 1.0})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "trajectory_closed")
    after = {name: status(server, name)["trajectories_collected"] for name in ADAPTERS}
    assert {name: after[name] - before[name] for name in ADAPTERS} == {"policy": 6, "twin": 5, "coder": 4}
    other = server.complete(SORT, model="shout", collect_trajectory=True, scoring_function="later")
    assert "collected of policy, twin, coder and of the base" in other.json()["error"]["message"]


def test_the_status_of_one_and_the_list_of_all(server: RunningServer) -> None:
    whole = status(server)
    assert whole["adapter"] == "policy" and [each["adapter"] for each in whole["adapters"]] == list(ADAPTERS)
    for each in whole["adapters"]:
        own = status(server, each["adapter"])
        assert "adapters" not in own
        assert each == {field: own[field] for field in each}
    missing = server.client.get("/v1/training/status", params={"adapter": "codr"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "adapter_not_found")
    assert "did you mean 'coder'?; trained are: policy, twin, coder" in missing.json()["error"]["message"]
    assert missing.json()["error"]["param"] == "adapter"
    for path in ("update", "start", "stop", "checkpoint", "rollback"):
        refused = server.client.post(f"/v1/training/{path}", params={"adapter": "shout"}, json={})
        assert refused.status_code == 404, path
    assert server.client.post("/v1/training/stop", params={"adapter": "coder"}).json()["running"] is False
    assert [status(server, name)["running"] for name in ADAPTERS] == [True, True, False]
    assert post(server, "/v1/training/start", "coder")["running"] is True
    debug = get(server, "/debug/training", "coder")
    assert debug["config"]["rl_training"]["algorithm"] == "dr_grpo" and debug["status"]["adapter"] == "coder"


def test_checkpoints_versions_and_going_back(server: RunningServer, folder: Path) -> None:
    assert post(server, "/v1/training/checkpoint", "coder", name="kept")["checkpoint"] == "kept"
    assert post(server, "/v1/training/checkpoint", "twin", name="kept")["checkpoint"] == "kept"
    assert post(server, "/training/checkpoint", None, name="kept")["checkpoint"] == "kept"
    assert (folder / "checkpoints" / "coder" / "kept").is_dir() and (folder / "checkpoints" / "kept").is_dir()
    listed = {m["id"]: m["root"] for m in get(server, "/v1/models")["data"]}
    assert {"policy", "twin", "coder", "kept", "coder.kept", "twin.kept"} <= listed.keys()
    assert server.complete(SORT, model="coder.kept").status_code == 200
    assert digest(server, "coder.kept") == digest(server, "coder@2")
    assert set(collect(server, n=1, model="coder.kept", max_tokens=2)[0]["versions"]) == {2}
    taken = server.client.post("/v1/adapters", json={"name": "coder.kept"})
    assert taken.status_code == 409, "it is the name of a checkpoint"
    update(server, "coder")
    assert post(server, "/model/switch-lora", "coder", version="kept")["current_lora"] == "kept"
    assert status(server, "policy")["current_lora"] == "policy@2"
    back = post(server, "/v1/training/rollback", "coder", to="coder@2")
    assert back["version"] == 2 and status(server, "coder")["step"] == 1
    with_other = server.client.post("/v1/training/rollback", params={"adapter": "twin"}, json={"to": "coder@2"})
    assert with_other.status_code == 400


def test_metrics_have_the_adapter(server: RunningServer) -> None:
    text = server.client.get("/metrics").text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    steps = {s.labels["adapter"]: s.value for s in families["tandem_training_step"].samples}
    assert steps == {name: status(server, name)["step"] for name in ADAPTERS}
    assert [s.labels for s in families["tandem_training_device_seconds"].samples] == [{}]
    outcomes = families["tandem_training_updates"].samples
    assert {s.labels["adapter"] for s in outcomes if s.labels["outcome"] == "published" and s.value} == set(ADAPTERS)


def test_the_command_line_knows_them(server: RunningServer, folder: Path) -> None:
    place = str(folder / "checkpoints")
    listed = json.loads(tandem("learn", "list", "--checkpoint-dir", place, "--json").stdout)
    assert {line["adapter"]: line["updates"] for line in listed} == {
        name: status(server, name)["updates"] for name in ADAPTERS
    }
    shown = json.loads(tandem("learn", "show", "coder", "--checkpoint-dir", place, "--json").stdout)
    assert [line["outcome"] for line in shown] == ["published"] * len(shown) and shown
    done = tandem("checkpoints", "rollback", "--yes", "--adapter", "coder", "--url", server.url, "kept")
    assert done.stdout == "back at coder@2\n", done.stderr
    wrong = tandem("learn", "watch", "nobody", "--url", server.url)
    assert wrong.returncode == 1 and "'nobody' is not trained by this server" in wrong.stderr


def test_watching_one_of_them(server: RunningServer) -> None:
    """Without a name the default one is shown, with a line for each other."""

    def first(count: int, *words: str) -> list[str]:
        command = [sys.executable, "-m", "mlx_tandem", "learn", "watch", *words, "--url", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(count)]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        return lines

    default, twin, coder = first(3)
    assert default.startswith("policy@")
    assert twin.startswith("also twin@") and coder.endswith("watch it with: tandem learn watch coder\n")
    line, update = first(2, "coder")
    assert line.startswith("coder@") and update.startswith("step 1 ")


def test_a_server_that_was_killed_goes_on_with_each_of_them(tmp_path: Path) -> None:
    """While one was in the middle of an update. What was acknowledged is there, and each goes on as it would have."""
    config = learning_config(tmp_path, adapters=ADAPTERS)
    with serving(config) as server:
        for name in ("policy", "coder"):
            assert update(server, name)["report"]["outcome"] == "published"
        collect(server, n=4, model="coder")
        update(server, "twin", wait=False, trajectories=trajectories(200))
        # Its data are on the drive once a pass of it runs.
        until(lambda: (now := status(server, "twin"))["update_done"] or now["updates"])
        before = {name: status(server, name) for name in ADAPTERS}
        found = {name: digest(server, name) for name in ("policy", "coder")}
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serving(config) as server:
        until(lambda: not any(status(server, name)["recovering"] for name in ADAPTERS))
        until(lambda: status(server, "twin")["updates"] == 1)
        for name in ("policy", "coder"):
            assert digest(server, name) == found[name]
            after = status(server, name)
            for field in ("version", "step", "updates", "buffered", "trajectories_collected"):
                assert after[field] == before[name][field], (name, field)
        assert update(server, "coder")["report"]["version"] == 3
