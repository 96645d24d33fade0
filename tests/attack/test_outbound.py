"""The server opens no connection: every server of these tests is watched, and the watch itself sees what it should.

`tests.serving.serving` looks at the record when its server has ended, for all tests that start one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mlx_tandem.config import CheckpointingConfig, DutyConfig, RLTrainingConfig
from tests import outbound
from tests.serving import RunningServer, demo_config, serving

PYTHON = {
    "connect": ("socket.create_connection(('192.0.2.1', 9))", "192.0.2.1"),
    "loopback": ("socket.create_connection(('127.0.0.1', 9))", "127.0.0.1"),
    "name": ("socket.getaddrinfo('example.invalid', 80)", "example.invalid"),
    "datagram": ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 9))", "192.0.2.1"),
    "urllib": ("urllib.request.urlopen('http://192.0.2.1/')", "192.0.2.1"),
    "child": (
        "subprocess.check_call([sys.executable, '-c', 'import socket; socket.gethostbyname(\"a.invalid\")'])",
        "a.i",
    ),
}
NATIVE = {
    "event loop": ("uvloop.run(asyncio.open_connection('192.0.2.1', 9))", "192.0.2.1"),
    "reference in a schema": ("jsonschema_rs.validator_for({'$ref': 'http://192.0.2.1/'})", "192.0.2.1"),
}
"""What no audit hook of Python sees."""


def run(code: str, record: Path) -> subprocess.CompletedProcess[str]:
    imports = "import asyncio, jsonschema_rs, socket, subprocess, sys, urllib.request, uvloop\n"
    env = outbound.guarded(os.environ, record)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", imports + code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("how", PYTHON)
def test_what_python_opens_is_refused_and_recorded(tmp_path: Path, how: str) -> None:
    code, target = PYTHON[how]
    done = run(code, tmp_path / "record")
    assert done.returncode == 1
    assert "tried to reach" in done.stderr
    assert target in outbound.tried(tmp_path / "record")[0]


@pytest.mark.skipif(outbound.COMPILER is None, reason="needs Linux and a C compiler")
@pytest.mark.parametrize("how", NATIVE)
def test_what_is_opened_beneath_python_is_refused_and_recorded(tmp_path: Path, how: str) -> None:
    code, target = NATIVE[how]
    done = run(code, tmp_path / "record")
    assert done.returncode == 1
    assert any(target in line for line in outbound.tried(tmp_path / "record"))


URL = "http://192.0.2.1/x"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "x"}


def scored(options: object) -> dict[str, object]:
    """A completion that is collected and scored by a JSON schema."""
    body = {"model": "policy", "prompt": "x", "max_tokens": 1, "collect_trajectory": True, "metadata": {"answer": "x"}}
    return body | {"scoring_function": [{"function": "json_schema", "options": options}]}


@pytest.mark.promise("A8", "B2", "G1")
@pytest.mark.parametrize(
    "target", [URL, "http:\\\\192.0.2.1\\x", "//192.0.2.1/x", "org/model", "\\\\192.0.2.1\\share\\x"]
)
def test_what_requests_name_is_not_fetched(learning: RunningServer, target: str) -> None:
    """Every place where a request may name something that lies elsewhere."""
    client = learning.client
    picture = {"type": "image_url", "image_url": {"url": target}}
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": [picture]}]}),
        (CHAT, {"messages": [USER], "model": target}),
        (CHAT, {"messages": [USER], "lora_adapter": target}),
        (CHAT, {"messages": [USER], "chat_template": target}),
        (CHAT, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"$ref": target}}}),
        (CHAT, {"messages": [USER], "guided_json": {"$ref": target}}),
        (CHAT, {"messages": [USER], "guided_json": {"$schema": target}}),
        (CHAT, {"messages": [USER], "guided_json": {"items": {"$schema": target, "$id": target, "$ref": "#/x"}}}),
        (CHAT, {"messages": [USER], "guided_json": {"$id": target, "items": {"$dynamicRef": target}}}),
        (COMPLETIONS, {"prompt": "x", "guided_grammar": f'start: %json {{"$ref": {json.dumps(target)}}}'}),
        (COMPLETIONS, scored({"schema": {"$ref": target}})),
        (COMPLETIONS, scored({"schema": {"$id": "http://a.invalid/y", "$dynamicRef": target}})),
        (COMPLETIONS, {"prompt": "x", "collect_trajectory": True, "scoring_function": target}),
        ("/v1/adapters", {"name": "x", "path": target}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": target}),
        ("/v1/training/rollback", {"to": target}),
        ("/model/switch-lora", {"version": target}),
    ):
        reply = client.post(path, json=body)
        assert 400 <= reply.status_code < 500, (path, body, reply.text)
    headers = {"forwarded": f"for={target}", "x-forwarded-host": target, "referer": target, "origin": target}
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert not outbound.tried(learning.record)


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = msgspec.structs.replace(
        demo_config(),
        rl_training=RLTrainingConfig(enabled=True, lora_rank=4),
        checkpointing=CheckpointingConfig(checkpoint_dir=str(tmp_path_factory.mktemp("checkpoints"))),
    )
    duty = DutyConfig(trainer_rank=4)
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, duty=duty))
    with serving(config) as running:
        yield running


def test_a_process_that_hides_its_attempt_is_still_told(tmp_path: Path) -> None:
    code = "try: socket.create_connection(('192.0.2.1', 9))\nexcept OSError: pass"
    assert run(code, tmp_path / "record").returncode == 0
    assert outbound.tried(tmp_path / "record")
    assert outbound.armed(tmp_path / "record") == 1


@pytest.mark.promise("G1")
def test_a_server_that_opens_a_connection_fails_its_test() -> None:
    """Here it is a child in the server's environment that does."""
    with pytest.raises(AssertionError, match=r"192\.0\.2\.1"), serving(demo_config()) as server:
        child = (
            "import contextlib, socket\nwith contextlib.suppress(OSError): socket.create_connection(('192.0.2.1', 9))"
        )
        subprocess.run([sys.executable, "-c", child], env=server.environment, check=True)
