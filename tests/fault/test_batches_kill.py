"""A server that runs a batch is killed again and again; in the end every request is answered exactly once.

TANDEM_BATCH_KILLS=20 has it killed so many times.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlx_tandem.config import BatchesConfig
from tests.serving import RunningServer, demo_config, serving
from tests.waiting import until

pytestmark = pytest.mark.restarts

KILLS = int(os.environ.get("TANDEM_BATCH_KILLS", "1"))
LINES = 60 * (KILLS + 1)
MODELS = ("tandem-demo", "shout", "json", "nobody")


def request(number: int) -> str:
    """Return a request, of which every fourth names a model that does not exist."""
    body = {"model": MODELS[number % 4], "prompt": f"{number} + 1 =", "max_tokens": 8, "temperature": 0}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def test_kill_9_loses_and_doubles_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    config = replace(demo_config(), batches=BatchesConfig(dir=str(tmp_path)))
    id = ""

    def done(server: RunningServer) -> int:
        counts = server.client.get(f"/v1/batches/{id}").json()["request_counts"]
        return int(counts["completed"] + counts["failed"])

    for kill in range(KILLS):
        most = 30 * kill + rng.randint(1, 30)
        with serving(config) as server:
            if not id:
                file = ("in.jsonl", "".join(map(request, range(LINES))).encode())
                input_ = server.client.post("/v1/files", data={"purpose": "batch"}, files={"file": file}).json()["id"]
                body = {"input_file_id": input_, "endpoint": "/v1/completions", "completion_window": "24h"}
                id = server.client.post("/v1/batches", json=body).json()["id"]
            while done(server) < most:
                pass  # a request each time, which waits for the server
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    with serving(config) as server:
        until(lambda: server.client.get(f"/v1/batches/{id}").json()["status"] == "completed")
        batch = server.client.get(f"/v1/batches/{id}").json()
        assert batch["request_counts"] == {"total": LINES, "completed": LINES * 3 // 4, "failed": LINES // 4}
        found = []
        for kind in ("output_file_id", "error_file_id"):
            text = server.client.get(f"/v1/files/{batch[kind]}/content").text
            found += [json.loads(each) for each in text.splitlines()]
        assert sorted(int(each["custom_id"]) for each in found) == list(range(LINES))
        alone = server.complete("8 + 1 =", model="tandem-demo", temperature=0).json()["choices"][0]["text"]
        (same,) = [each for each in found if each["custom_id"] == "8"]
        assert same["response"]["body"]["choices"][0]["text"] == alone
