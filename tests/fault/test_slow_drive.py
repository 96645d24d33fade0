"""A drive that stands still: what is served goes on, and learning waits for it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.api.learns import SORT, learning_config, trajectories
from tests.serving import RunningServer, serving
from tests.waiting import until

SLOW = """
import fcntl
from mlx_tandem import files
from mlx_tandem.training.store.database import Database

def waiting(real):
    def waits(*args):
        with open({lock!r}) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return real(*args)
    return waits

files.Disk.sync = waiting(files.Disk.sync)
Database.write = waiting(Database.write)
"""
"""Run by every process of the server when it starts: nothing gets to the drive while somebody else has the lock."""


@contextmanager
def standing_still(lock: Path) -> Iterator[None]:
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def status(server: RunningServer) -> dict[str, object]:
    found: dict[str, object] = server.client.get("/v1/training/status").json()
    return found


def ask(server: RunningServer, **fields: object) -> list[int]:
    reply = server.complete(SORT, model="policy@1", temperature=0, return_token_ids=True, **fields)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def test_streams_go_on_and_learning_waits_while_nothing_gets_to_the_drive(tmp_path: Path) -> None:
    """Neither when an update begins nor when a checkpoint is written."""
    lock = tmp_path / "lock"
    lock.touch()
    (tmp_path / "servercustomize.py").write_text(SLOW.format(lock=str(lock)), encoding="utf-8")
    with serving(learning_config(tmp_path, scoring_function="contains"), tmp_path) as server:
        post = {"trajectories": trajectories(), "wait": True}
        assert server.client.post("/v1/training/update", json=post).json()["report"]["outcome"] == "published"
        alone = ask(server, max_tokens=300, ignore_eos=True)
        update = {"trajectories": trajectories(text="Sort down: 2 1"), "wait": True}
        streams_go_on(server, lock, alone, "update", update)
        assert status(server)["updates"] == 2
        streams_go_on(server, lock, alone, "checkpoint", {"name": "waits"})
        assert status(server)["available_checkpoints"] == ["waits"]


def streams_go_on(server: RunningServer, lock: Path, alone: list[int], work: str, body: dict[str, object]) -> None:
    """Ask learning for work while nothing gets to the drive: others are served, and learning goes on afterwards."""
    client = server.client
    long = {"prompt": "3 " * 8192}  # so long that it is worked on beside the event loop
    count = client.post("/tokenize", json=long).json()["count"]
    before = status(server)
    fields = {"prompt": SORT, "model": "policy@1", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
    thread = ThreadPoolExecutor(1)
    with standing_still(lock):
        answer = thread.submit(client.post, f"/v1/training/{work}", json=body)
        with client.stream(
            "POST", "/v1/completions", json=fields | {"stream": True, "return_token_ids": True}
        ) as reply:
            events = [json.loads(e[6:]) for e in reply.iter_lines() if e.startswith("data: {")]
        streamed = [t for e in events for c in e["choices"] for t in c["token_ids"]]
        assert streamed == alone, "as if nothing were"
        assert client.post("/tokenize", json=long).json()["count"] == count
        # Scored in the background.
        collected = server.complete(SORT, model="policy", collect_trajectory=True, metadata={"answer": "3"})
        assert collected.status_code == 200 and collected.json()["choices"][0]["trajectory_id"]
        assert client.get("/livez").status_code == client.get("/readyz").status_code == 200
        now = status(server)
        for same in ("updates", "step", "version", "checkpoint_saves", "available_checkpoints"):
            assert now[same] == before[same], "learning waits"
        assert not answer.done()
    assert answer.result().status_code == 200
    thread.shutdown()
    until(lambda: int(str(status(server)["trajectories_collected"])) > int(str(before["trajectories_collected"])))
