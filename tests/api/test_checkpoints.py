"""Checkpoints of a server that really learns: how many stay, what versions are left, and the best by live rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mlx_tandem.config import Config
from mlx_tandem.training.store.checkpoints import BEST, Checkpoints
from tests.api.learns import SORT, collect, learning_config, trajectories
from tests.serving import RunningServer, serving
from tests.waiting import until


def config_in(folder: Path, **settings: Any) -> Config:
    """A checkpoint after every update, of which two are kept; the engine's memory has room for one adapter only."""
    config = learning_config(folder, **settings)
    engine = structs.replace(config.engine, lora=structs.replace(config.engine.lora, max_cpu_loras=1))
    checkpointing = structs.replace(config.checkpointing, interval=1, keep_n_checkpoints=2)
    return structs.replace(config, engine=engine, checkpointing=checkpointing)


def says(server: RunningServer, model: str) -> list[float]:
    """What tells versions apart: logprobs of the same tokens."""
    reply = server.complete(f"{SORT} 3 2 1", model=model, echo=True, logprobs=0, max_tokens=0)
    assert reply.status_code == 200, reply.text
    logprobs: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"][1:]
    return logprobs


def update(server: RunningServer, text: str) -> int:
    post = {"trajectories": trajectories(text=text), "wait": True}
    reply = server.client.post("/v1/training/update", json=post)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["report"]["version"])


def available(server: RunningServer) -> list[str]:
    found: list[str] = server.client.get("/v1/training/status").json()["available_checkpoints"]
    return found


def test_two_are_two_and_the_newest_versions_outlive_them(tmp_path: Path) -> None:
    with serving(config_in(tmp_path)) as server:
        said = {version: says(server, "policy") for version in [update(server, f"Sort down: {i} 1") for i in range(5)]}
        assert list(said) == [2, 3, 4, 5, 6]
        said = {}
        for i in range(5, 9):
            version = update(server, f"Sort down: {i} 1")
            said[version] = says(server, "policy")
            says(server, "shout")  # nothing that lies in a folder can stay in memory
            assert len(available(server)) == 2
        assert list(said) == [7, 8, 9, 10] and available(server) == ["checkpoint-9", "checkpoint-8"]
        for version in (8, 9, 10):
            assert says(server, f"policy@{version}") == said[version]
        reply = server.client.post("/v1/training/rollback", json={"to": "checkpoint-8"})
        assert reply.status_code == 200, reply.text
        assert reply.json()["version"] == 9
        assert available(server) == ["checkpoint-8", "checkpoint-9"], "it is the newest again, and there once"
        assert says(server, "policy") == says(server, "checkpoint-8") == said[9]
        again = server.client.post("/v1/training/rollback", json={"to": "checkpoint-8"})
        assert again.json()["version"] == 9
        saved = server.client.post("/v1/training/checkpoint")
        assert saved.json()["checkpoint"] == "checkpoint-8" and len(available(server)) == 2
    infos = Checkpoints(tmp_path / "checkpoints", 2).list()
    assert len({i.digest for i in infos}) == len(infos) == 2
    with serving(config_in(tmp_path)) as server:
        now = says(server, "policy")
        assert now == pytest.approx(said[9], abs=1e-4) and now != pytest.approx(said[8], abs=1e-4)
        assert update(server, "Sort down: 9 9 1") == 11


def test_the_best_comes_with_live_rewards(tmp_path: Path) -> None:
    """Of each version eight answers, as many as an update takes: first good ones, then bad ones."""
    answers = {"n": 8, "max_tokens": 3, "ignore_eos": True}
    with serving(config_in(tmp_path, update_frequency=8, guard_reward_drop=9.0)) as server:

        def answered(target: int) -> None:
            """All eight get the same reward: what is known of the version, and nothing to learn from."""
            collect(server, scoring_function=[{"function": "length", "options": {"target": target}}], **answers)

        update(server, "Sort down: 1 1")
        assert available(server) == ["checkpoint-1"] and server.complete("x", model=BEST).status_code == 404
        answered(3)
        until(lambda: BEST in available(server))
        until(lambda: server.complete("x", model=BEST).status_code == 200)
        assert says(server, BEST) == says(server, "policy@2")
        update(server, "Sort down: 2 1")
        answered(6)
        good = says(server, BEST)
        for i in (3, 4, 5):
            update(server, f"Sort down: {i} 1")
            answered(6)
        assert set(available(server)) == {"checkpoint-5", "checkpoint-4", BEST}
        assert says(server, BEST) == good
        update(server, "Sort down: 6 1")
        collect(server, scoring_function=[{"function": "length", "weight": 2, "options": {"target": 3}}], **answers)
        until(lambda: says(server, BEST) == says(server, "policy"))  # another is the best now
        until(lambda: server.complete("x", model=f"{BEST}@1").status_code == 404)  # its folder has other content
    manifest = Checkpoints(tmp_path / "checkpoints", 2).verify(BEST)
    assert (manifest.version, manifest.reward) == (7, 2.0)
