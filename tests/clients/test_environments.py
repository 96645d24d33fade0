"""Environments of verifiers and Atropos, unmodified, where these are installed; each needs an environment of its own.

verifiers asks for another `openai` than the locks have, and atroposlib for many packages. Their programs `vf-eval` and
`run-api` are looked for, and run with the Python beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.server.sockets import unused_port
from tests.api.learns import learning_config
from tests.atropos_api import Group, atropos_api, scored
from tests.atropos_dialogue import dialogue, recorded
from tests.commands import running
from tests.serving import serving
from tests.waiting import until

HERE = Path(__file__).parent / "environments"
QUIET = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
KEY = "the-key"
GROUP = scored([3, 4], [[5, 6], [7, 8], [5, 8], [9, 9]], [1.0, 0.0, 0.5, 0.0]) | {"env_id": None}
REGISTRATION = {
    "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 64, "checkpoint_dir": "x",
    "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 9,
}  # fmt: skip


def beside(program: str) -> tuple[str, str]:
    """The path of a program and that of the Python that runs it; the test is skipped where there is none."""
    found = shutil.which(program) or pytest.skip(f"{program} is not installed")
    return found, str(Path(found).resolve().parent / "python")


def ask(url: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    content = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, content, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as e:
        with e:
            return e.code, None


@contextlib.contextmanager
def process(command: list[str], **environment: str) -> Iterator[None]:
    """A program that runs during the block."""
    with subprocess.Popen(
        command, env=os.environ | QUIET | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=HERE
    ) as run:
        try:
            yield
        finally:
            run.kill()


@contextlib.contextmanager
def real_api() -> Iterator[str]:
    """The address of Atropos' own API."""
    program, _ = beside("run-api")
    url = f"http://127.0.0.1:{unused_port()}"

    def is_up() -> bool:
        with contextlib.suppress(OSError):
            return ask(f"{url}/")[0] == 200
        return False

    with process([program, "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]):
        until(is_up)
        yield url


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A file of questions in the form of GSM8K's."""
    draw, lines = random.Random(1), []
    for _ in range(64):
        digits = draw.sample(range(10), 4)
        answer = "They go down.\n#### " + " ".join(map(str, sorted(digits, reverse=True)))
        lines.append(json.dumps({"question": "Sort down: " + " ".join(map(str, digits)), "answer": answer}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "train.jsonl")


def conversation(url: str, put: Callable[[Group], object]) -> list[object]:
    """What a trainer hears, while groups of four make batches of eight."""
    heard: list[object] = [ask(f"{url}/batch"), ask(f"{url}/info"), ask(f"{url}/register", {"batch_size": 8})[0]]
    for size in (8, 16):
        status, found = ask(f"{url}/register", REGISTRATION | {"batch_size": size})
        heard.append((status, list(found), found["uuid"] > 1 << 64))
    heard += [ask(f"{url}/info"), ask(f"{url}/batch")]
    put(GROUP)
    heard.append(ask(f"{url}/batch"))
    for _ in range(4):
        put(GROUP)
    return [*heard, *(ask(f"{url}/batch") for _ in range(3)), ask(f"{url}/nothing")[0]]


def test_the_double_of_the_api_says_what_atropos_says():
    with real_api() as url:
        real = conversation(url, lambda group: ask(f"{url}/scored_data_list", [group]))
    with atropos_api() as api:
        assert conversation(api.url, api.put) == real


def test_what_is_recorded_is_what_atropos_says():
    def asked(method: str, path: str, body: Any) -> tuple[int, Any]:
        reply = httpx.request(method, f"{url}{path}", json=body, timeout=30)
        return reply.status_code, reply.json() if "json" in reply.headers["content-type"] else reply.text

    with real_api() as url:
        assert dialogue(asked) == recorded()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("where", ["run-api", "own"])
def test_an_environment_of_atropos_is_learned_from(kind: str, where: str, tmp_path: Path, data: str):
    _, python = beside("run-api")
    port = unused_port()
    words = [sys.executable, "-m", "mlx_tandem", "serve", "--port", str(port), "--enable-rl-training"]
    words += ["--update-frequency", "32", "--learning-rate", "1e-3", "--max-model-len", "1024", "--num-blocks", "512"]
    server = f"http://127.0.0.1:{port}"

    def status() -> dict[str, Any]:
        found: dict[str, Any] = ask(f"{server}/v1/training/status")[1]
        return found

    with contextlib.ExitStack() as stack:
        api = stack.enter_context(real_api()) if where == "run-api" else server
        words += ["--atropos-url", api] if where == "run-api" else ["--atropos-api"]
        stack.enter_context(running(words, port, tmp_path))
        until(lambda: status()["atropos"]["state"] == "waiting")
        given = {"API": api, "SERVER": server, "MODEL": str(demo.MODEL_PATH), "TYPE": kind, "DATA": data}
        with process([python, "sorting_atropos.py", "serve"], **given):
            until(lambda: status()["updates"] >= 2)
        fed = status()["atropos"]
        assert (fed["without_logprobs"], fed["refused_groups"], fed["error"]) == (0, 0, "")
        assert status()["trajectories_collected"] == fed["trajectories"] >= 64


@pytest.mark.slow
def test_rollouts_of_verifiers_are_learned_from(tmp_path: Path, data: str):
    _, python = beside("vf-eval")
    with serving(learning_config(tmp_path)) as server:
        done = subprocess.run(
            [python, "sorting_verifiers.py", server.url, "policy", str(demo.MODEL_PATH), "2", "8"],
            env=os.environ | QUIET | {"DATA": data}, cwd=HERE, capture_output=True, text=True, check=True,
        )  # fmt: skip
        made = json.loads(done.stdout.splitlines()[-1])
        assert len(made) == 16 and {t["reward"] for t in made} == {0.0, 1.0}
        for each in made:
            text = server.client.post("/detokenize", json={"tokens": each["prompt_token_ids"]}).json()["prompt"]
            assert "Sort down: " in text
            assert len(each["logprobs"]) == len(each["token_ids"])
        report = server.client.post("/v1/training/update", json={"trajectories": made, "wait": True}).json()["report"]
        assert report["outcome"] == "published"


@pytest.mark.slow
def test_an_environment_of_verifiers_is_played_by_the_command(tmp_path: Path, data: str):
    _, python = beside("vf-eval")
    port = unused_port()
    words = [sys.executable, "-m", "mlx_tandem", "train", "rl", "--environment", str(HERE / "sorting.toml")]
    words += ["--environment-python", python, "--environment-variables", "DATA"]
    words += ["--port", str(port), "--update-frequency", "64", "--api-key-file", str(tmp_path / "key")]
    words += ["--learning-rate", "1e-3", "--max-model-len", "1024", "--num-blocks", "512"]
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    with running(words, port, tmp_path, os.environ | QUIET | {"DATA": data}):

        def status() -> dict[str, Any]:
            found: dict[str, Any] = ask(f"http://127.0.0.1:{port}/v1/training/status", key=KEY)[1]
            return found

        until(lambda: status()["environment"]["state"] != "starting")  # verifiers takes long to import
        for updates in (1, 2):
            until(lambda: status()["updates"] >= updates or status()["environment"]["error"])  # noqa: B023
        played = status()["environment"]
        assert (played["failed_episodes"], played["refused_groups"], played["error"]) == (0, 0, "")
        assert played["trajectories"] >= 128 and 0 < played["reward"] <= 1 and status()["last_verdict"] == "ok"
