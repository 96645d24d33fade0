"""Updates, versions, checkpoints and steering over HTTP, on servers that really learn."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.api.learns import SORT, collect, learning_config, trajectories
from tests.api.scripted import scripted_server
from tests.serving import ROOT, RunningServer, serving

SEED_FIELDS = {
    "training_enabled",
    "current_lora",
    "trajectories_collected",
    "last_update",
    "loss",
    "available_checkpoints",
}


@pytest.fixture(scope="module")
def learns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learns")


@pytest.fixture(scope="module")
def learner(learns: Path) -> Iterator[RunningServer]:
    with serving(learning_config(learns)) as running:
        yield running


GOOD = trajectories()


def chat(role: str, **more: object) -> dict[str, Any]:
    """A trajectory whose prompt is one message."""
    return GOOD[0] | {"prompt": [{"role": role, "content": SORT} | more]}


def status(server: RunningServer) -> dict[str, Any]:
    reply = server.client.get("/v1/training/status")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def update(server: RunningServer, **body: object) -> httpx.Response:
    return server.client.post("/v1/training/update", json={"trajectories": trajectories(), "wait": True} | body)


def post(server: RunningServer, path: str, **body: object) -> dict[str, Any]:
    reply = server.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def says(server: RunningServer, **fields: object) -> list[float]:
    """What tells versions apart: logprobs of the same tokens."""
    body = {"echo": True, "logprobs": 0, "max_tokens": 0} | fields
    reply = server.complete(f"{SORT} 3 2 1", **body)
    assert reply.status_code == 200, reply.text
    logprobs: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"][1:]
    return logprobs


def test_an_update_makes_a_version(learner):
    before = status(learner)
    old, base = says(learner, model="policy"), says(learner, model="base")
    reply = update(learner)
    assert reply.status_code == 200, reply.text
    job = reply.json()
    assert (job["object"], job["status"], job["error"]) == ("training.job", "succeeded", None)
    report = job["report"]
    assert (report["outcome"], report["trajectories"], report["groups"]) == ("published", 4, 1)
    assert report["version"] == before["version"] + 1
    after = status(learner)
    assert after["current_lora"] == f"policy@{report['version']}"
    assert after["updates"] == before["updates"] + 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", after["last_update"])
    new = says(learner, model="policy")
    assert new != old
    assert says(learner, model=f"policy@{before['version']}") == old
    assert says(learner, model="base") == base
    assert learner.client.get(f"/v1/training/jobs/{job['id']}").json() == job
    (choice,) = collect(learner, n=1)
    assert set(choice["versions"]) == {report["version"]}


def test_a_job_is_done_in_its_own_time(learner):
    reply = update(learner, wait=False, update_inference=False)
    job = reply.json()
    assert (reply.status_code, job["status"], job["report"]) == (202, "queued", None)
    version = status(learner)["version"]
    last = update(learner, trajectories=trajectories(text="Sort down: 9 8"), update_inference=False)  # behind it
    assert last.json()["report"]["outcome"] == "kept"
    done = learner.client.get(f"/v1/training/jobs/{job['id']}").json()
    assert (done["status"], done["report"]["outcome"], done["report"]["version"]) == ("succeeded", "kept", 0)
    assert status(learner)["version"] == version
    missing = learner.client.get("/v1/training/jobs/job-0")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "job_not_found")


def test_what_was_collected_is_learned_from(learner):
    before = status(learner)
    collect(learner, n=8, max_tokens=3, scoring_function=[{"function": "length", "options": {"target": 3}}])
    assert status(learner)["buffered"] == before["buffered"] + 8
    report = update(learner, trajectories=[]).json()["report"]
    assert report["outcome"] == "published" and report["trajectories"] >= 8
    assert status(learner)["buffered"] <= before["buffered"], "single answers wait for others to their prompt"
    assert update(learner, trajectories=[]).json()["report"]["outcome"] == "skipped"


def test_a_trajectory_is_learned_from_once(learner):
    named = [t | {"id": f"mine-{i}"} for i, t in enumerate(trajectories())]
    assert update(learner, trajectories=named).json()["report"]["trajectories"] == 4
    again = update(learner, trajectories=named).json()["report"]
    assert (again["outcome"], again["trajectories"]) == ("skipped", 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"trajectories": {}}, "trajectories"),
        ({"trajectories": [{"prompt": "x", "completion": "y"}]}, "trajectories[0].reward"),
        ({"trajectories": [{"prompt": "x", "completion": "y", "reward": 1e7}]}, "trajectories[0].reward"),
        ({"trajectories": [{"prompt": "x", "completion": "", "reward": 1}]}, "trajectories[0].completion"),
        ({"trajectories": [{"prompt": "x", "token_ids": [-1], "reward": 1}]}, "trajectories[0].token_ids"),
        ({"trajectories": [{"prompt": "x", "token_ids": [1] * 2000, "reward": 1}]}, "trajectories[0]"),
        ({"trajectories": [{"prompt": "x", "completion": "y", "reward": 1, "path": "/"}]}, "trajectories[0].path"),
        ({"trajectories": [*GOOD, GOOD[0] | {"temperature": 0.0001}]}, "trajectories[4].temperature"),
        ({"trajectories": [*GOOD, GOOD[0] | {"versions": [999] * 6}]}, "trajectories[4].versions[0]"),
        ({"trajectories": [*GOOD, GOOD[0] | {"prompt": ""}]}, "trajectories[4].prompt"),
        ({"trajectories": [*GOOD, GOOD[0] | {"prompt": []}]}, "trajectories[4].prompt"),
        ({"trajectories": [*GOOD, chat("evil")]}, "trajectories[4].prompt[0].role"),
        ({"trajectories": [*GOOD, chat("user", content=None)]}, "trajectories[4].prompt[0].content"),
        ({"trajectories": [*GOOD, chat("user", mood="good")]}, "trajectories[4].prompt[0].mood"),
        ({"trajectories": [t | {"id": "same"} for t in GOOD]}, "trajectories[1].id"),
        ({"checkpoint_name": "../x"}, "checkpoint_name"),
        ({"checkpoint_name": "shout"}, "checkpoint_name"),
        ({"checkpoint_name": "policy"}, "checkpoint_name"),
        ({"checkpoint_name": "best-performance"}, "checkpoint_name"),
        ({"checkpoint_name": "journal"}, "checkpoint_name"),
        ({"checkpoint_name": "7"}, "checkpoint_name"),
        ({"update_inference": 1}, "update_inference"),
        ({"wait": "yes"}, "wait"),
        ({"trajectory": []}, "trajectory"),
    ],
)
def test_bodies_that_are_wrong(learner, body, param):
    """One bad trajectory refuses the whole post, and none of it is learned from."""
    before = status(learner)
    reply = update(learner, **body)
    assert 400 <= reply.status_code < 410, reply.text
    assert reply.json()["error"]["param"] == param
    after = status(learner)
    assert (after["updates"], after["step"], after["buffered"]) == (
        before["updates"],
        before["step"],
        before["buffered"],
    )


def test_prompts_may_be_conversations_and_versions_those_that_were_there(learner):
    update(learner)
    tokens = learner.client.post("/tokenize", json={"prompt": " 1 2", "add_special_tokens": False}).json()["tokens"]
    version = status(learner)["version"]
    said = [
        chat("user", name="ann") | {"completion": None, "token_ids": tokens, "versions": [v] * len(tokens), "reward": i}
        for i, v in enumerate((max(version - 4, 0), version - 1, version))
    ]
    reply = update(learner, trajectories=said)
    assert reply.status_code == 200, reply.text
    assert reply.json()["report"]["trajectories"] == 3
    wrong = said[0] | {"versions": [0] * (len(tokens) - 1) + [status(learner)["version"] + 1]}
    reply = update(learner, trajectories=[*said, wrong])
    assert reply.json()["error"]["param"] == f"trajectories[3].versions[{len(tokens) - 1}]"


def test_checkpoints_are_models(learner):
    update(learner, trajectories=trajectories(text="Sort down: 4 5 6"), checkpoint_name="first")
    at_first = says(learner, model="policy")
    named = post(learner, "/v1/training/checkpoint", name="second")
    assert named == {"status": "saved", "checkpoint": "second"}
    assert {"first", "second"} <= set(status(learner)["available_checkpoints"])
    update(learner, trajectories=trajectories(text="Sort down: 7 8 9"))
    assert says(learner, model="policy") != at_first
    assert says(learner, lora_adapter="first", model="tandem-demo") == at_first
    assert says(learner, model="second") == at_first
    twice = learner.client.post("/training/checkpoint", json={"name": "first"})
    assert twice.status_code == 409, twice.text
    (choice,) = collect(learner, n=1, model=None, lora_adapter="first")
    assert choice["trajectory_id"]


def test_serving_moves_and_training_does_not(learner):
    post(learner, "/v1/training/checkpoint", name="here")
    here, version = says(learner, model="policy"), status(learner)["version"]
    base = says(learner)
    update(learner, trajectories=trajectories(text="Sort down: 1 1 2"))
    there, step = says(learner, model="policy"), status(learner)["step"]
    for model_id in ("here", version, f"policy@{version}", str(version)):
        moved = post(learner, "/model/switch-lora", version=model_id)
        named = "here" if model_id == "here" else f"policy@{version}"
        assert moved == {"status": "switched", "current_lora": named, "version": version}
        assert says(learner, model="policy") == here
        assert says(learner) == base
        post(learner, "/model/switch-lora", version=version + 1)
        assert says(learner, model="policy") == there
    assert status(learner)["step"] == step
    assert learner.client.post("/model/switch-lora", json={"version": "nobody"}).status_code == 404
    for wrong in ("../x", "", 2**60, None, 1.5):
        reply = learner.client.post("/model/switch-lora", json={"version": wrong})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "version")


def test_going_back(learner):
    post(learner, "/v1/training/checkpoint", name="good")
    good, before = says(learner, model="policy"), status(learner)
    update(learner, trajectories=trajectories(text="Sort down: 2 2 3"))
    assert says(learner, model="policy") != good
    back = post(learner, "/v1/training/rollback", to="good")
    assert back["status"] == "rolled_back" and back["current_lora"] == status(learner)["current_lora"]
    assert says(learner, model="policy") == good
    assert status(learner)["step"] == before["step"]
    for path, field in (("/v1/training/rollback", "to"), ("/model/switch-lora", "version")):
        refused = learner.client.post(path, json={field: "nobody"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, field)


def test_a_folder_of_checkpoints_that_is_gone_is_noticed(learner, learns):
    """Health says it, what comes is not acknowledged, and serving goes on. When the folder is back, so is learning."""
    folder = learns / "checkpoints"
    elsewhere = folder.with_name("elsewhere")
    before = learner.client.get("/health").json()
    assert before["status"] == "ok" and "learning_error" not in before
    folder.rename(elsewhere)
    try:
        health = learner.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert "was removed or replaced" in health.json()["learning_error"]
        reply = update(learner)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "storage_error")
        assert learner.complete("x", max_tokens=1).status_code == 200
    finally:
        elsewhere.rename(folder)
    assert learner.client.get("/health").json()["status"] == "ok"
    assert update(learner, trajectories=trajectories(text="Sort down: 7 5")).status_code == 200


def test_what_curl_sends_of_itself(learner):
    client = learner.client
    assert client.post("/training/checkpoint").status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded"}
    version = f'{{"version": {status(learner)["version"]}}}'
    assert client.post("/model/switch-lora", content=version, headers=form).status_code == 200
    for origin in ("https://example.com", "null"):
        for path in ("/training/checkpoint", "/model/switch-lora", "/v1/training/stop", "/v1/training/rollback"):
            reply = client.post(path, content=version, headers=form | {"origin": origin})
            assert reply.status_code == 415, reply.text
            assert client.post(path, headers={"origin": origin}).status_code == 415
    text = {"content-type": "text/plain"}
    assert client.post("/model/switch-lora", content=version, headers=text).status_code == 415


@pytest.mark.parametrize("path", ["update", "start", "stop", "checkpoint", "rollback"])
def test_bodies_under_training_are_json_as_everywhere(learner, path):
    for types in ({}, {"content-type": ""}, {"content-type": "application/x-www-form-urlencoded"}):
        reply = learner.client.post(f"/v1/training/{path}", content='{"unknown": 1}', headers=types)
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
    reply = learner.client.post(f"/v1/training/{path}", json={"unknown": 1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "unknown")


def test_a_request_without_a_body_needs_no_content_type(learner):
    assert learner.client.post("/v1/training/start").status_code == 200


def test_the_loop_stops_and_starts(learner):
    assert status(learner)["running"]
    assert post(learner, "/v1/training/stop")["running"] is False
    before = status(learner)["trajectories_collected"]
    collect(learner, n=2)
    assert status(learner)["trajectories_collected"] == before + 2
    assert post(learner, "/v1/training/start")["running"] is True
    assert learner.client.post("/v1/training/stop", json={"now": True}).status_code == 400


def test_status_and_debug(learner):
    update(learner)
    found = status(learner)
    assert found.keys() >= SEED_FIELDS
    assert found["training_enabled"] is True
    debug = learner.client.get("/debug/training").json()
    assert debug["history"][-1]["trajectories"] == 4
    assert debug["status"] == status(learner) | {k: debug["status"][k] for k in ("serving_ms", "training_ms")}
    assert debug["config"]["rl_training"]["lora_rank"] == 4
    assert debug["reward_failures"].keys() >= {"timeout", "died"}


def test_metrics(learner):
    update(learner, trajectories=trajectories(text="Sort down: 6 1"))
    found = status(learner)
    text = learner.client.get("/metrics").text
    values = {
        s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples if not s.labels
    }
    assert values["tandem_training_trajectories_total"] == found["trajectories_collected"]
    assert values["tandem_training_version"] == found["version"]
    assert values["mlx_parallm_rl_trajectories_collected"] == found["trajectories_collected"]
    assert values["mlx_parallm_rl_training_loss"] == found["loss"]
    assert values["mlx_parallm_checkpoint_saves_total"] == found["checkpoint_saves"]
    assert values["mlx_parallm_lora_swaps_total"] >= found["publishes"] > 0
    assert values["mlx_parallm_rl_updates_per_second"] >= 0
    outcomes = dict(re.findall(r'^tandem_training_updates_total\{outcome="(\w+)"\} ([\d.]+)$', text, re.MULTILINE))
    assert sum(map(float, outcomes.values())) == found["updates"]


def test_alerts_are_about_metrics_that_exist(learner):
    assert learner.client.get("/nothing").status_code == 404  # the first error has its metric
    text = learner.client.get("/metrics").text
    rules = yaml.safe_load((ROOT / "docs" / "prometheus-rules.yml").read_text(encoding="utf-8"))
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert any("tandem_training_diverged" in e for e in expressions)
    assert any("tandem_engine_ready" in e for e in expressions)
    board = json.loads((ROOT / "docs" / "grafana-board.json").read_text(encoding="utf-8"))
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in board["panels"]}) == len(places)
    expressions += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for name in {n for e in expressions for n in re.findall(r"(?:tandem_|vllm:)\w+", e)}:
        assert re.search(rf"^{name}[ {{]", text, re.MULTILINE), name


def test_the_trained_name_is_not_to_be_taken(learner):
    body = {"name": "policy", "path": "shout"}
    assert learner.client.post("/v1/adapters", json=body).status_code == 409
    assert learner.client.delete("/v1/adapters/policy").status_code == 409
    arms = {"arms": [{"adapter": "base", "weight": 1}]}
    assert learner.client.put("/v1/aliases/policy", json=arms).status_code == 409
    (listed,) = [a for a in learner.client.get("/v1/adapters").json()["adapters"] if a["name"] == "policy"]
    assert listed["version"] == status(learner)["version"]
    assert "policy" in [m["id"] for m in learner.client.get("/v1/models").json()["data"]]


def test_a_following_request_names_the_version_of_each_token(learner):
    """Its neighbour, pinned, says what it would have said alone."""
    fields = {"prompt": SORT, "model": "policy", "max_tokens": 400, "ignore_eos": True, "seed": 5, "stream": True}
    alone = learner.complete(**fields | {"stream": False}, return_token_ids=True).json()["choices"][0]
    version = status(learner)["version"]
    client = learner.client
    asked = fields | {"return_token_ids": True}
    with (
        client.stream("POST", "/v1/completions", json=asked) as pinned,
        client.stream("POST", "/v1/completions", json=asked | {"swap_policy": "inflight_keep"}) as following,
    ):
        assert update(learner, trajectories=trajectories(text="Sort down: 5 4 1")).json()["report"]["version"]
        found = [re.findall(r'"versions":\[([\d,]*)\]', "".join(r.iter_text())) for r in (pinned, following)]
    kept, moved = ([int(v) for part in parts for v in part.split(",") if v] for parts in found)
    assert kept == alone["versions"] == [version] * 400
    assert len(moved) == 400 and moved == sorted(moved) and set(moved) == {version, version + 1}


def test_after_the_engine_dies_versions_are_there_again(tmp_path: Path):
    with serving(learning_config(tmp_path)) as server:
        update(server)
        update(server, trajectories=trajectories(text="Sort down: 8 1"))
        new, version = says(server, model="policy"), status(server)["version"]
        old = says(server, model=f"policy@{version - 1}")
        collect(server, n=1)
        running = status(server)["trajectories_collected"]
        os.kill(server.engine_pid(), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:
            reply = server.complete("x", model="policy")
            if reply.status_code == 200:
                break
            assert reply.status_code == 503 and time.monotonic() < deadline, reply.text
        while status(server)["recovering"]:
            assert time.monotonic() < deadline
        assert (status(server)["version"], status(server)["trajectories_collected"]) == (version, running)
        assert says(server, model="policy") == new
        before = server.complete(SORT, model=f"policy@{version - 1}", max_tokens=1)
        if before.status_code == 404:  # its state was not saved, since saving had its share of the time
            assert "no longer there" in before.text
        else:
            assert says(server, model=f"policy@{version - 1}") == old


def test_a_new_server_goes_on(tmp_path: Path):
    config = learning_config(tmp_path)
    with serving(config) as server:
        report = update(server, checkpoint_name="kept").json()["report"]
        update(server, trajectories=trajectories(text="Sort down: 8 1"))
        said, before = says(server, model="policy"), status(server)
    with serving(config) as server:
        after = status(server)
        assert {k: after[k] for k in ("version", "step", "updates", "trajectories_collected")} == {
            k: before[k] for k in ("version", "step", "updates", "trajectories_collected")
        }
        assert says(server, model="policy") == said
        assert says(server, model="kept") != said
        (choice,) = collect(server, n=1, model="kept")
        assert set(choice["versions"]) == {before["version"] - 1}
        report = update(server, trajectories=trajectories(text="Sort down: 9 1")).json()["report"]
        assert report["version"] == before["version"] + 1


def test_a_server_that_does_not_learn(server):
    assert set(status(server)) == SEED_FIELDS
    assert status(server)["training_enabled"] is False
    debug = server.client.get("/debug/training").json()
    assert debug["status"]["training_enabled"] is False and debug["config"]["rl_training"]["enabled"] is False
    routes = ["/v1/training/update", "/v1/training/start", "/v1/training/stop", "/v1/training/checkpoint"]
    for path in (*routes, "/v1/training/rollback", "/training/checkpoint"):
        reply = server.client.post(path, json={})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "learning_disabled")
        assert "--enable-rl-training" in reply.json()["error"]["message"]
    assert server.client.post("/model/switch-lora", json={"version": 1}).status_code == 400
    assert server.client.get("/v1/training/jobs/x").status_code == 400


def test_the_key_guards_it_all():
    with scripted_server(api_key="secret") as (client, _, _):
        for path in ("/v1/training/status", "/v1/training/jobs/x", "/debug/training"):
            assert client.get(path).status_code == 401
        for path in ("update", "start", "stop", "checkpoint", "rollback"):
            assert client.post(f"/v1/training/{path}", json={}).status_code == 401
        assert client.post("/training/checkpoint").status_code == 401
        assert client.post("/model/switch-lora", json={"version": 1}).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert client.get("/v1/training/status", headers=key).status_code == 200
