"""The control arm on a real server: both versions answer, and nobody notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.learns import collect, learning_config, trajectories, until
from tests.serving import RunningServer, serving


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
        until(lambda: status(server)["trajectories_collected"] == 4 + 2 * 12 * 4)
        now = status(server)
        assert now["compared"] == 12
        assert (now["rollbacks"], now["alarm"]) == (0, "")
        (one,) = collect(server, n=1, model=f"policy@{newest}")
        assert set(one["versions"]) == {newest}, "a request that names a version gets it"
