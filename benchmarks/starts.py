"""Measure the time from the start of a server's process to its first answer, for a first start and for later ones.

    python benchmarks/starts.py /path/to/model --json-out benchmarks/results/starts.json
    python benchmarks/starts.py --shape qwen3-8b
    python benchmarks/starts.py --shape qwen3-8b --adapters 8 --options=--enable-rl-training
    python benchmarks/starts.py --real 4bit

The first start has an empty cache folder of its own, so nothing is kept from an earlier start. With `--shape` the
weights are drawn at random, and the adapters of `--adapters` are written before the first start. With `--real` the
model is the one that `scripts/real_model.py` makes. The seconds of a stage are the time between two changes of
`/health`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from partial import Results, stop_cleanly
from real import FORMS, write_real

from mlx_tandem.cli.bench.shapes import SHAPES, write_adapter, write_model
from mlx_tandem.cli.outputs import argument
from mlx_tandem.http_client import HttpError, once
from mlx_tandem.server.sockets import unused_port

QUESTION = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 8, "temperature": 0.0}

POLL_SECONDS = 0.02
"""Seconds between two requests to a server that starts."""


def start(command: list[str], port: int, environment: dict[str, str]) -> dict[str, Any]:
    """Start a server, ask it once, stop it, and return the seconds of its stages."""
    url = f"http://127.0.0.1:{port}"
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, cwd=environment["TMPDIR"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        stages = asyncio.run(_watch(url, began, process))
        ready = time.perf_counter() - began
        status, _ = asyncio.run(once(url, "POST", "/v1/chat/completions", QUESTION))
        answer = time.perf_counter() - began
    finally:
        process.terminate()
        _, errors = process.communicate()
    if status != 200:
        raise SystemExit(f"the server answered with status {status}: {errors.decode(errors='replace')[-2000:]}")
    return {"ready_s": round(ready, 2), "first_answer_s": round(answer, 2), "stages_s": stages}


async def _watch(url: str, began: float, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the seconds of each stage until the server is ready."""
    stages: dict[str, float] = {}
    stage, since = "process", began
    while True:
        if process.poll() is not None:
            assert process.stderr is not None
            raise SystemExit(f"the server ended: {process.stderr.read().decode(errors='replace')[-2000:]}")
        try:
            status, health = await once(url, "GET", "/health")
        except HttpError:
            status, health = 0, {}
        now = time.perf_counter()
        said = health.get("progress", {}).get("stage", stage) if status != 200 else ""
        if said != stage:
            stages[stage] = round(stages.get(stage, 0.0) + now - since, 2)
            stage, since = said, now
        if status == 200:
            return stages
        await asyncio.sleep(POLL_SECONDS)


def main() -> None:
    """Run the starts."""
    parser = argparse.ArgumentParser(description="how long a server takes to start")
    parser.add_argument("model", nargs="?", type=Path, help="a model's folder; by default the built-in model")
    parser.add_argument("--shape", choices=[*SHAPES], help="a shape with random weights instead")
    parser.add_argument("--real", choices=FORMS, help="a real model of 135M parameters instead (scripts/real_model.py)")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantise the random weights")
    parser.add_argument("--adapters", type=int, default=0, help="serve so many adapters of the shape")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--options", default="", help="further options of the server")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    if args.adapters and not args.shape:
        parser.error("--adapters goes with --shape only")
    stop_cleanly()
    name = args.shape or args.real or str(args.model or "demo")
    about = {"bits": args.bits, "adapters": args.adapters, "options": args.options}
    results = Results(args.json_out, model=name, **about)
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-starts-") as scratch:
        words: list[str] = [] if args.model is None else [str(args.model)]
        if args.shape:
            folder = write_model(Path(scratch) / "model", SHAPES[args.shape], weights=False, bits=args.bits)
            words = [str(folder), "--random-weights"]
            for i in range(args.adapters):
                adapter = write_adapter(Path(scratch) / f"adapter-{i}", SHAPES[args.shape], seed=i)
                words += ["--adapter", f"a{i}", str(adapter)]
        if args.real:
            words = [str(write_real(Path(scratch) / "model", args.real))]
        environment = os.environ | {"XDG_CACHE_HOME": f"{scratch}/cache", "TMPDIR": f"{scratch}/tmp"}
        Path(scratch, "tmp").mkdir()
        for number in range(1, args.starts + 1):
            port = unused_port()
            command = [sys.executable, "-m", "mlx_tandem", "serve", *words, "--port", str(port), "--api-key", ""]
            starts.append(start(command + shlex.split(args.options), port, environment))
            print(number, starts[-1], file=sys.stderr, flush=True)
            results.add(starts=starts)
    results.finish()


if __name__ == "__main__":
    main()
