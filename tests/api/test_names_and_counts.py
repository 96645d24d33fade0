"""What a server that learns calls its versions and checkpoints, what it counts, and what can be posted back to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.learns import SORT, collect, learning_config, trajectories
from tests.serving import RunningServer, serving
from tests.waiting import until


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(learning_config(tmp_path_factory.mktemp("learns"))) as running:
        yield running


def status(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/v1/training/status").json()
    return found


def post(server: RunningServer, path: str, code: int = 200, **body: object) -> dict[str, Any]:
    reply = server.client.post(path, json=body)
    assert reply.status_code == code, reply.text
    found: dict[str, Any] = reply.json()
    return found


def update(server: RunningServer, trajectories: list[Any], **body: object) -> dict[str, Any]:
    report: dict[str, Any] = post(server, "/v1/training/update", trajectories=trajectories, wait=True, **body)["report"]
    return report


def metric(server: RunningServer, name: str) -> float:
    (line,) = (x for x in server.client.get("/metrics").text.splitlines() if x.startswith(f"{name} "))
    return float(line.split()[1])


# --- names ---------------------------------------------------------------------------------------------------------


def test_the_latest_version_is_served_again_by_that_name(learner):
    newest = update(learner, trajectories())["version"]
    post(learner, "/model/switch-lora", version=newest - 1)
    assert status(learner)["version"] == newest - 1
    moved = post(learner, "/model/switch-lora", version="latest")
    assert moved == {"status": "switched", "current_lora": f"policy@{newest}", "version": newest}
    refused = post(learner, "/v1/training/checkpoint", 400, name="latest")["error"]
    assert refused["param"] == "name"


def test_a_checkpoint_that_was_switched_to_is_the_current_lora(learner):
    update(learner, trajectories(text="Sort down: 8 7"), checkpoint_name="mine")
    update(learner, trajectories(text="Sort down: 8 6"))
    assert post(learner, "/model/switch-lora", version="mine")["current_lora"] == "mine"
    assert status(learner)["current_lora"] == "mine"
    newest = update(learner, trajectories(text="Sort down: 8 5"))["version"]
    assert status(learner)["current_lora"] == f"policy@{newest}"


def test_a_checkpoint_s_name_is_not_given_to_what_learned_nothing(learner):
    alike = [t | {"reward": 1} for t in trajectories(text="Sort down: 9 1")]
    assert update(learner, alike, checkpoint_name="nothing")["outcome"] == "skipped"
    assert "nothing" not in status(learner)["available_checkpoints"]
    learned = update(learner, trajectories(text="Sort down: 9 1"), checkpoint_name="nothing")
    assert learned["outcome"] == "published"
    assert "nothing" in status(learner)["available_checkpoints"]


# --- what is posted back -------------------------------------------------------------------------------------------


def test_collected_answers_are_posted_back_as_they_were_handed_out(learner):
    choices = collect(learner, "Sort down: 3 1 2", logprobs=0, return_token_ids=True, n=8, temperature=2)
    kept = [c for c in choices if c["trajectory_id"]]
    before = status(learner)
    assert len({c["score"] for c in kept}) > 1, "they can be learned from"
    report = update(learner, kept)
    assert (report["outcome"], report["trajectories"]) == ("published", len(kept))
    after = status(learner)
    assert after["trajectories_collected"] == before["trajectories_collected"], "they were counted already"
    assert after["buffered"] == before["buffered"] - len(kept)
    error = post(learner, "/v1/training/update", 400, trajectories=[kept[0]])["error"]
    assert (error["param"], error["code"]) == ("trajectories[0].trajectory_id", "trajectory_not_found")


def test_ids_alone_stand_for_what_was_collected(learner):
    ids = [c["trajectory_id"] for c in collect(learner, "Sort down: 3 2 1", n=8, temperature=2)]
    report = update(learner, ids)
    assert (report["outcome"], report["trajectories"]) == ("published", len(ids))


def test_tokens_with_the_version_that_made_them(learner):
    post(learner, "/v1/training/checkpoint", name="named")
    number, prompt = status(learner)["version"], [810, 616]
    made = [{"prompt_token_ids": prompt, "tokens": [3, 4, 5 + i], "reward": i} for i in range(3)]
    for item, version in zip(made, (number, f"policy@{number}", "named"), strict=True):
        item |= {"logprobs": [-0.5, -0.5, -0.5], "lora_version": version}
    assert update(learner, made)["outcome"] == "published"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"lora_version": "nobody"}, "lora_version"),
        ({"lora_version": 999}, "versions[0]"),
        ({"token_ids": [3]}, "tokens"),
        ({"score": 1.0}, "score"),
        ({"trajectory_id": "traj-0"}, "trajectory_id"),
    ],
)
def test_what_is_posted_back_wrongly_is_named(learner, change, param):
    item = {"prompt": SORT, "tokens": [3, 4], "reward": 0.0} | change
    error = post(learner, "/v1/training/update", 400, trajectories=[item])["error"]
    assert error["param"] == f"trajectories[0].{param}"


def test_the_tokens_have_to_be_those_of_the_trajectory(learner):
    choice = collect(learner, "Sort down: 1 2 3", seed=9)[0]
    item = {"trajectory_id": choice["trajectory_id"], "tokens": [*choice["token_ids"], 3]}
    error = post(learner, "/v1/training/update", 400, trajectories=[item])["error"]
    assert error["param"] == "trajectories[0].token_ids"


# --- counts, and the guard's checkpoints ---------------------------------------------------------------------------


def test_siblings_are_counted_apart_and_the_pace_is_known_at_once(tmp_path: Path):
    with serving(learning_config(tmp_path, siblings=4, guard_prompts=6, update_frequency=4)) as server:
        choices = collect(server, n=1)
        until(lambda: status(server)["siblings_drawn"] >= 4)
        assert status(server)["trajectories_collected"] == len(choices) == 1
        update(server, trajectories())
        assert metric(server, "mlx_parallm_rl_updates_per_second") > 0
        assert metric(server, "tandem_training_trajectories_total") == 1 + 4
        assert metric(server, "tandem_training_siblings_total") >= 4


def test_the_guard_s_checkpoints_are_listed_nowhere(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    with serving(learning_config(tmp_path, guard_prompts=6)) as server:
        update(server, trajectories())
        until(lambda: any(path.name.startswith("guard-") for path in folder.iterdir()))
        post(server, "/v1/training/checkpoint", name="mine")
        until(lambda: "mine" in {m["id"] for m in server.client.get("/v1/models").json()["data"]})
        for path in ("/v1/models", "/v1/adapters", "/v1/training/status", "/api/tags"):
            assert "guard-" not in server.client.get(path).text, path
        assert "mine" in status(server)["available_checkpoints"]
