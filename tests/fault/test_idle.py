"""Real engines that are unloaded while nobody uses them, and woken by requests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlx_tandem import demo
from tests.api.learns import SORT, learning_config, trajectories
from tests.fault.idle_cycles import answers, config, cycle, prepare
from tests.serving import serving
from tests.waiting import until

pytestmark = pytest.mark.restarts

LIMIT = 0.4


def test_nothing_is_lost_or_leaked_over_cycles(tmp_path: Path) -> None:
    """Adapters of the settings and of requests, aliases, the cache on the drive and counters are as before.

    In the end the model's folder is gone: that is an error until it is back.
    """
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(demo.MODEL_PATH, model)
    with serving(config(tmp_path / "kv", LIMIT, model)) as server:
        prepare(server)
        expected = answers(server)
        found = [cycle(server, LIMIT, expected) for _ in range(3)]
        assert [c.processes for c in found] == [found[0].processes] * 3
        assert [c.files for c in found[1:]] == [found[1].files] * 2
        assert max(c.threads for c in found) <= found[0].threads + 2, "the pool of threads may still grow"
        assert server.client.get("/v1/cache/stats").json()["disk"]["hits"] > 0, "prompts came back from the drive"
        health = server.client.get("/health").json()
        assert health["engine_restarts"] == 0
        assert health["engine_unloads"] >= 3  # more where the machine was busy for as long as the limit
        until(lambda: server.client.get("/health").json()["status"] == "idle")
        model.rename(away)
        refused = server.chat("hi", temperature=0)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error"), refused.text
        assert str(tmp_path) not in refused.text, "clients are not told of folders"
        assert server.client.get("/health").json()["status"] == "idle"
        away.rename(model)
        assert server.chat("hi", temperature=0).status_code == 200


def test_learning_goes_on_after_it_was_idle(tmp_path: Path) -> None:
    """Versions, the optimiser's step and what was learned are there."""
    base = learning_config(tmp_path)
    with serving(replace(base, server=replace(base.server, idle_unload_s=LIMIT))) as server:

        def learned() -> tuple[int, int, str]:
            status = server.client.get("/v1/training/status").json()
            answer = server.complete(SORT, model="policy", temperature=0, max_tokens=8).json()["choices"][0]["text"]
            return status["step"], status["version"], answer

        def update() -> None:
            body = {"trajectories": trajectories(), "wait": True}
            reply = server.client.post("/v1/training/update", json=body)
            assert reply.json()["status"] == "succeeded", reply.text

        update()
        before = learned()
        until(lambda: server.client.get("/health").json()["status"] == "idle")
        assert learned() == before
        update()
        assert learned()[:2] == (before[0] + 1, before[1] + 1)
