"""`benchmarks/http_share.py` on a real server and a real engine: one loop in both, and what a stopped run leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.restarts

ROOT = Path(__file__).parents[2]
PROMPT, TOKENS, REQUESTS, STREAMS = 8, 4, 7, 3


def started(out: Path, repeats: int) -> subprocess.Popen[str]:
    script = str(ROOT / "benchmarks" / "http_share.py")
    load = ["--num-requests", str(REQUESTS), "--prompt-tokens", str(PROMPT), "--max-tokens", str(TOKENS)]
    command = [sys.executable, script, "--shape", "0.13m", "--streams", str(STREAMS), "--repeats", str(repeats)]
    return subprocess.Popen(
        [*command, *load, "--json-out", str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_same_loop_through_http_and_without(tmp_path: Path) -> None:
    with started(tmp_path / "share.json", repeats=2) as process:
        said, complaints = process.communicate()
    assert process.returncode == 0, complaints
    found: dict[str, Any] = json.loads((tmp_path / "share.json").read_text())
    assert found["complete"] and found["machine"] and found["device"]
    http, (row,) = found["http"], found["engine"]["results"]
    assert [(r["requests"], r["tokens"]) for r in http["rounds"]] == [(REQUESTS, REQUESTS * TOKENS)] * 2
    assert (row["batch"], row["prompt_tokens"]) == (STREAMS, round(http["median"]["prompt_tokens"]))
    assert found["engine"]["engine"]["max_num_seqs"] == STREAMS
    for r in row["rounds"]["tandem"]:
        assert r["loop_tokens_per_s"] * r["loop_s"] == pytest.approx(REQUESTS * TOKENS)
    rates = [(rate["http"], rate["engine"]) for rate in found["tokens_per_s"]]
    engine = [r["loop_tokens_per_s"] for r in row["rounds"]["tandem"]]
    assert rates == list(zip((r["tokens_per_s"] for r in http["rounds"]), engine, strict=True))
    assert found["ratio"] == pytest.approx(sum(a / b for a, b in rates) / 2, abs=1e-3)
    assert f"{found['ratio']:.3f} of the engine's rate" in said


def test_a_run_that_is_stopped_keeps_its_rounds_and_ends_its_server(tmp_path: Path) -> None:
    with started(tmp_path / "share.json", repeats=10_000) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert process.stderr.readline().startswith("round 1 ")
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 1
    assert "stopped by signal" in said and "Traceback" not in said
    found = json.loads((tmp_path / "share.json").read_text())
    assert found["http"]["rounds"] and found["ratio"] and not found["complete"]
    address = re.search(r"http://(\S+):(\d+)", first)
    assert address is not None
    with socket.socket() as probe:
        assert probe.connect_ex((address[1], int(address[2]))) != 0


@pytest.mark.parametrize("when", ["before", "made", "running", "closed"])
def test_a_signal_ends_a_program_whatever_its_loop_does(when: str) -> None:
    script = f"""
import asyncio, os, signal, time
from partial import stop_cleanly

def kill(now):
    if now == {when!r}:
        os.kill(os.getpid(), signal.SIGTERM)

def made():
    loop = asyncio.new_event_loop()
    close = loop.close
    loop.close = lambda: (kill("closed"), close())
    kill("made")
    return loop

async def main():
    kill("running")
    await asyncio.sleep(0.1 if {when!r} == "closed" else 60)

stop_cleanly()
kill("before")
with asyncio.Runner(loop_factory=made) as runner:
    runner.run(main())
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (1, "stopped by signal 15\n")
