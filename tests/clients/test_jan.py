"""Jan's desktop program: what its MLX extension starts, reads and sends, after its source (janhq/jan).

Read were the plugin that starts the server (tauri-plugin-mlx), the extension that chooses its arguments
(mlx-extension), and the module that makes the requests (model-factory). Jan itself runs on a Mac with a screen, so it
was not run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.server.sockets import unused_port
from tests.commands import ROOT

PROGRAM = [sys.executable, "-c", "from mlx_tandem.cli.programs import mlx_server as main; main()"]
KEY = "key-of-this-session"
READY = ("http server listening", "server is listening", "server started", "ready to accept")
"""The words, in lower case, of the line on standard output for which the plugin waits. It waits for nothing else."""

SMALL = ["--num-blocks", "512"]


@dataclass
class Sidecar:
    """A server as the plugin has started it."""

    process: subprocess.Popen[str]
    client: httpx.Client
    model_id: str


@pytest.fixture
def sidecar(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sidecar]:
    """The arguments are those of the plugin, but for a smaller pool; more of them come with the test's parameter."""
    model_id = "mlx-community/Small-4bit"
    folder = tmp_path / "mlx" / "models" / model_id
    folder.parent.mkdir(parents=True)
    folder.symlink_to(demo.MODEL_PATH)
    port = unused_port()
    arguments = ["--model", str(folder / "model.safetensors"), "--port", str(port), *getattr(request, "param", [])]
    arguments += ["--ctx-size", "4096", "--api-key", KEY]
    process = subprocess.Popen(
        [*PROGRAM, *arguments, *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MLX_API_KEY": KEY},
    )
    headers = {"Authorization": f"Bearer {KEY}", "Origin": "tauri://localhost"}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if any(word in line.lower() for word in READY):
                break
        else:
            raise AssertionError(f"no line said that it is ready, and it ended with {process.wait()}")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            yield Sidecar(process, client, model_id)
    finally:
        process.kill()
        process.communicate()


def chunks(response: httpx.Response) -> list[dict[str, object]]:
    """The events of a stream as the extension reads them: a line that begins with `error: ` would be an error."""
    lines = [line.strip() for line in response.iter_lines()]
    assert not any(line.startswith("error: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    "sidecar", [["--model-id", "mlx-community/Small-4bit", "--embedding"]], ids=["latest"], indirect=True
)
def test_jan_starts_it_asks_it_and_ends_it(sidecar: Sidecar) -> None:
    client = sidecar.client
    # The extension asks before each chat, without a key.
    assert client.get("/health", headers={"Authorization": ""}).json()["status"] == "ok"
    assert client.get("/v1/models").json()["data"][0]["id"] == sidecar.model_id
    body = {
        "model": sidecar.model_id,
        "messages": [
            {"role": "system", "content": "You are a calculator."},
            {"role": "user", "content": [{"type": "text", "text": "What is 12 + 5?"}]},
        ],
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "max_tokens": 2048,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert client.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer no"}).status_code == 401
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        events = chunks(response)
    last = [event for event in events if event["choices"]][-1]
    assert last["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
    assert {event["model"] for event in events} == {sidecar.model_id}
    # The extension takes "length" for a context that is too small, so a chat without a limit has room.
    del body["max_tokens"]
    whole = client.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert client.post("/v1/chat/completions", json=body | {"temperature": -1}).json()["error"]["message"]
    # When a chat is stopped, the program closes the stream, and posts to a route of its own server without reading
    # the answer.
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        next(response.iter_lines())
    assert client.post("/v1/cancel", json={}).status_code == 404
    endless = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "n": 8, "stream": True}
    with client.stream("POST", "/v1/completions", json=endless) as response:
        next(response.iter_lines())
        sidecar.process.send_signal(signal.SIGTERM)
        assert sidecar.process.wait(60) == 0


def test_a_server_that_jan_ends_has_ended_before_it_is_killed() -> None:
    killed_after_seconds = 5.0
    assert CALLERS["mlx-server"].defaults["server.drain_seconds"] == killed_after_seconds - 1


@pytest.mark.parametrize(
    "sidecar",
    [["--max-batch-size", "4", "--batch-timeout-ms", "100", "--kv-block-size", "16", "--enable-prefix-caching"]],
    ids=["earlier"],
    indirect=True,
)
def test_jan_before_it_named_the_model_knows_it_as_that_of_its_folder(sidecar: Sidecar) -> None:
    for model in ("model", sidecar.model_id):
        body = {"model": model, "messages": [{"role": "user", "content": "What is 12 + 5?"}], "max_tokens": 20}
        assert sidecar.client.post("/v1/chat/completions", json=body).is_success
