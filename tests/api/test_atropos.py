"""A server that learns from the batches of an Atropos API."""

from __future__ import annotations

import gzip
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import httpx

from mlx_tandem import demo
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.server.sockets import unused_port
from tests.atropos_api import atropos_api, scored
from tests.commands import running
from tests.waiting import until

TANDEM = [sys.executable, "-m", "mlx_tandem"]
TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
PROMPT = TOKENIZER.encode("Sort down: 3 1 2")
ANSWERS = [TOKENIZER.encode(text) for text in ("3 2 1", "1 2 3", "3 1 2", "2 1 3")]
SMALL = ["--max-model-len", "1024", "--num-blocks", "512", "--lora-rank", "4"]


def test_batches_become_updates_across_restarts_of_the_api(tmp_path: Path):
    port = unused_port()

    def get(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
            return str(reply.read().decode())

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(get("/v1/training/status"))
        return found

    with atropos_api() as api:
        words = [*TANDEM, "serve", "--port", str(port), "--enable-rl-training", "--update-frequency", "8", *SMALL]
        with running([*words, "--atropos-url", api.url], port, tmp_path):
            until(lambda: status()["atropos"]["state"] == "waiting")
            assert api.registration is not None
            assert (api.registration["batch_size"], api.registration["max_token_len"]) == (8, 1024)
            bad = scored(PROMPT, [[2000]] * 4, [1.0, 0.0, 0.0, 1.0])
            good = scored(PROMPT, ANSWERS, [1.0, 0.0, 0.5, 0.0])
            api.put(bad, good, good, good)  # half of the first batch is of no use, so a second one is asked for
            until(lambda: status()["updates"] == 1)
            fed = status()["atropos"]
            assert (fed["batches"], fed["trajectories"], fed["refused_groups"]) == (2, 12, 1)
            assert (fed["url"], fed["batch_size"], fed["without_logprobs"], fed["error"]) == (api.url, 8, 0, "")
            api.restart()
            until(lambda: api.registration is not None)
            assert api.registration["starting_step"] == 1
            api.put(good, good)
            until(lambda: status()["updates"] == 2)
            now = status()
            assert now["trajectories_collected"] == 20
            assert "tandem_training_atropos_trajectories_total 20.0" in get("/metrics")
            assert now["kl"] >= 0 and now["last_verdict"] == "ok"
        with running(words, port, tmp_path):
            now = status()
            assert (now["atropos"], now["trajectories_collected"], now["updates"]) == (None, 20, 2)


def test_environments_post_to_the_server_itself(tmp_path: Path):
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    headers = {"authorization": "Bearer secret"}
    words = [*TANDEM, "serve", "--port", str(port), "--enable-rl-training", "--update-frequency", "8", *SMALL]
    with (
        running([*words, "--atropos-api", "--api-key", "secret"], port, tmp_path),
        httpx.Client(base_url=url, headers=headers, timeout=30) as client,
    ):

        def status() -> dict[str, Any]:
            found: dict[str, Any] = client.get("/v1/training/status").json()
            return found

        assert httpx.get(f"{url}/info").status_code == 401
        until(lambda: client.get("/info").json() == {"batch_size": 8, "max_token_len": 1024})
        said = {"max_token_length": 64, "desired_name": "sort", "weight": 1.0, "group_size": 4}
        until(lambda: client.post("/register-env", json=said).json()["status"] == "success")
        good = scored(PROMPT, ANSWERS, [1.0, 0.0, 0.5, 0.0])
        content = gzip.compress(json.dumps([good, scored(PROMPT, [[2000]] * 4, [1.0, 0.0, 0.0, 1.0]), good]).encode())
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        assert client.post("/scored_data_list", content=content, headers=packed).json()["groups_processed"] == 3
        assert client.post("/scored_data", json=good).json() == {"status": "received"}
        until(lambda: status()["updates"] == 1)
        fed = status()["atropos"]
        assert (fed["batches"], fed["trajectories"], fed["refused_groups"], fed["url"]) == (2, 12, 1, "")
        assert client.request("GET", "/status-env", json={"env_id": 0}).json()["current_step"] == 2
        for path in ("/batch", "/reset_data"):
            assert client.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.get("/reset_data").text == "Reset successful"
        until(lambda: client.get("/status").json() == {"current_step": 1, "queue_size": 0})
