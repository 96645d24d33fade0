"""The control arm on a real server: both versions answer, and nobody notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.learns import collect, learning_config, trajectories
from tests.serving import RunningServer, serving
from tests.waiting import until


def status(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/v1/training/status").json()
    return found


def test_live_prompts_are_answered_by_both_versions(tmp_path: Path) -> None:
    with serving(learning_config(tmp_path, guard_prompts=1000, update_frequency=900)) as server:
        body = {"trajectories": trajectories(), "wait": True}
        reply = server.client.post("/v1/training/update", json=body)
        assert reply.json()["report"]["outcome"] == "published", reply.text
        newest, accepted = status(server)["version"], status(server)["accepted"]
        assert newest == accepted + 1
        answered = set()
        for seed in range(12):
            versions = {v for c in collect(server, seed=seed, max_tokens=4) for v in c["versions"]}
            assert len(versions) == 1
            answered |= versions
        assert answered == {accepted, newest}
        # The second answers are learned from, too.
        until(lambda: status(server)["siblings_drawn"] == 12 * 4)
        assert status(server)["trajectories_collected"] == 4 + 12 * 4
        now = status(server)
        assert now["compared"] == 12
        assert (now["rollbacks"], now["alarm"]) == (0, "")
        (one,) = collect(server, n=1, model=f"policy@{newest}")
        assert set(one["versions"]) == {newest}, "a request that names a version gets it"


def test_a_policy_that_cannot_move_is_left_alone(tmp_path: Path) -> None:
    """Two kinds of prompts, one of which gets more; `benchmarks/guard_live.py` goes on for longer."""
    settings = {"guard_prompts": 1000, "learning_rate": 1e-9, "update_frequency": 4, "siblings": 0}
    with serving(learning_config(tmp_path, **settings)) as server:
        for seed in range(14):
            collect(server, seed=seed, prompt=("Sort down: 3 1 2", "Sort: 1 2 3")[seed % 2], max_tokens=4)
            until(lambda: not status(server)["busy"])
        now = status(server)
        assert now["updates"] > 5 and now["compared"] > 5
        assert (now["rollbacks"], now["learning_rate"], now["running"]) == (0, 1e-9, True)
        assert now["version"] == now["updates"] + 1


def test_a_rate_that_is_too_high_is_taken_back_and_finds_its_place_by_itself(tmp_path: Path) -> None:
    with serving(learning_config(tmp_path, learning_rate=0.5)) as server:
        outcomes, rates = [], []
        while "published" not in outcomes[-2:-1] and len(outcomes) < 20:
            body = {"trajectories": trajectories(), "wait": True}
            reply = server.client.post("/v1/training/update", json=body)
            outcomes.append(reply.json()["report"]["outcome"])
            rates.append(status(server)["learning_rate"])
        assert outcomes[0] == "rolled_back" and rates[0] == 0.25, "the first step went too far"
        back = outcomes.index("published")
        assert set(outcomes[:back]) == {"rolled_back"} and rates[back - 1] == 0.5 / 2**back
        assert rates[back] > rates[back - 1], "it recovers with each update that stands"
        assert status(server)["rollbacks"] >= back
