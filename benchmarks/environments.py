"""Learning from real environments of verifiers and Atropos, with shuffled rewards as the control.

    python -m venv ./verifiers && ./verifiers/bin/pip install 'verifiers>=0.4'
    python -m venv ./atropos && ./atropos/bin/pip install atroposlib
    python benchmarks/environments.py --verifiers ./verifiers/bin/python --atropos ./atropos/bin/python

The task is sorting digits, which the built-in model does badly, as 256 questions in the form of GSM8K's lines. Each run
is a server with its own seed, and one of these ways by which its environment plays:

- verifiers: `tandem train rl --environment`
- run-api: Atropos' own trajectory API and `--atropos-url`
- atropos-api: `--atropos-api`, so that the environment posts to the server itself

The reward is measured apart from what the environment says: before the first update and after every `EVERY` updates, by
the share of right answers to 128 other questions, 4 answers each at temperature 1. A run ends when it is 0.85, or after
`--updates`. With shuffled rewards each answer gets the score of another one; those runs do `CONTROL` updates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.outputs import argument
from mlx_tandem.http_client import once
from mlx_tandem.server.sockets import unused_port

PLAYED = Path(__file__).resolve().parents[1] / "tests" / "clients" / "environments"
QUIET = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
QUESTIONS, EXAM, ANSWERS = 256, 128, 4
BATCH = 64
EVERY = 3
CONTROL = 12
WANTED = 0.85
WAYS = ("verifiers", "run-api", "atropos-api")


def questions(draw: random.Random, count: int) -> list[tuple[str, str]]:
    """Return different questions with their results."""
    found: dict[str, str] = {}
    while len(found) < count:
        digits = draw.sample(range(10), 4)
        found["Sort down: " + " ".join(map(str, digits))] = " ".join(map(str, sorted(digits, reverse=True)))
    return list(found.items())


def data() -> tuple[str, list[tuple[str, str]]]:
    """Return the lines that environments play, and other questions for the exam. Both are the same for every seed."""
    every = questions(random.Random(5), QUESTIONS + EXAM)
    lines = [
        json.dumps({"question": asked, "answer": f"From the largest to the smallest.\n#### {answer}"})
        for asked, answer in every[:QUESTIONS]
    ]
    return "\n".join(lines) + "\n", every[QUESTIONS:]


async def examined(url: str, exam: list[tuple[str, str]]) -> float:
    """Return the share of right answers of the version that is served."""

    async def right(asked: str, answer: str) -> int:
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": asked}],
            "n": ANSWERS,
            "max_tokens": 16,
            "temperature": 1.0,
        }
        status, reply = await once(url, "POST", "/v1/chat/completions", body)
        if status != 200:
            raise RuntimeError(f"{status} {reply}")
        return sum(choice["message"]["content"].strip() == answer for choice in reply["choices"])

    found = await asyncio.gather(*(right(*each) for each in exam))
    return sum(found) / (len(exam) * ANSWERS)


@contextlib.contextmanager
def program(*command: str, log: Path, **environment: str) -> Iterator[None]:
    """Run a program during the block."""
    with (
        log.open("ab") as said,
        subprocess.Popen(command, env=os.environ | QUIET | environment, stdout=said, stderr=said, cwd=PLAYED) as run,
    ):
        try:
            yield
        finally:
            run.kill()


def run(
    way: str, seed: int, *, shuffled: bool, pythons: dict[str, str], updates: int, rate: str, scratch: Path
) -> dict[str, Any]:
    """Learn once, and return the figures."""
    text, exam = data()
    (scratch / "train.jsonl").write_text(text, encoding="utf-8")
    said = {"DATA": str(scratch / "train.jsonl"), "SEED": str(seed), "SHUFFLED": str(int(shuffled))}
    os.environ.update(QUIET | said)  # the server's program of verifiers has them from it
    folder = scratch / f"{way}-{seed}-{shuffled}"
    settings = folder / "learn.yaml"
    folder.mkdir()
    settings.write_text(f"rl_training: {{enabled: true, seed: {seed}}}\n", encoding="utf-8")
    options = ["--config", str(settings), "--checkpoint-dir", str(folder / "checkpoints"), "--num-blocks", "512"]
    options += ["--max-model-len", "1024", "--update-frequency", str(BATCH), "--learning-rate", rate]
    options += ["--lora-rank", "8"]
    with contextlib.ExitStack() as stack:
        api, log = f"http://127.0.0.1:{unused_port()}", folder / "log"
        if way == "verifiers":
            options += ["--environment", str(PLAYED / "sorting.toml"), "--environment-python", pythons["verifiers"]]
            options += ["--environment-variables", ",".join(said)]
        elif way == "run-api":
            run_api = str(Path(pythons["atropos"]).with_name("run-api"))
            stack.enter_context(program(run_api, "--host", "127.0.0.1", "--port", api.rpartition(":")[2], log=log))
            options += ["--atropos-url", api]
        else:
            options += ["--atropos-api"]
        server = stack.enter_context(tandem(*options).started(demo.MODEL_PATH))
        before = asyncio.run(examined(server.url, exam))
        began = time.monotonic()
        if way != "verifiers":
            told = {"API": server.url if way == "atropos-api" else api, "SERVER": server.url}
            told |= said | {"MODEL": str(demo.MODEL_PATH)}
            stack.enter_context(program(pythons["atropos"], "sorting_atropos.py", "serve", log=log, **told))
        found = asyncio.run(learned(server.url, exam, before, updates, shuffled=shuffled))
    seconds = time.monotonic() - began
    figures = {"way": way, "seed": seed, "shuffled": shuffled, "rate": rate, "seconds": seconds} | found
    last = f"{way:<11} seed {seed}{' shuffled' if shuffled else ''}: {before:.3f} -> {found['after']:.3f}"
    print(f"{last} in {found['updates']} updates, {seconds:.0f} s", file=sys.stderr, flush=True)
    return figures


async def learned(
    url: str, exam: list[tuple[str, str]], before: float, updates: int, *, shuffled: bool
) -> dict[str, Any]:
    """Wait for updates and examine what is served, until the goal is reached or all updates are done."""
    curve = [(0, before)]
    while True:
        _, status = await once(url, "GET", "/v1/training/status")
        done = status["updates"]
        if done < min(curve[-1][0] + EVERY, updates):
            await asyncio.sleep(0.5)
            continue
        curve.append((done, await examined(url, exam)))
        if done >= updates or (curve[-1][1] >= WANTED and not shuffled):
            break
    fed = status["environment"] or status["atropos"]
    counts = ("trajectories", "refused_groups", "failed_episodes", "without_logprobs", "error")
    _, history = await once(url, "GET", "/v1/training/history")
    return {
        "before": before,
        "after": curve[-1][1],
        "updates": curve[-1][0],
        "curve": curve,
        "rates": [update["learning_rate"] for update in history["updates"]],
        "taken": {name: fed[name] for name in counts if name in fed},
    }


def main() -> None:
    """Run all ways with all seeds, and a control of each."""
    parser = argparse.ArgumentParser(description="learning from environments of verifiers and Atropos")
    parser.add_argument("--verifiers", required=True, help="Python of an environment with verifiers")
    parser.add_argument("--atropos", required=True, help="Python of an environment with atroposlib")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rewards", default="true,shuffled", help="of the runs of each seed")
    parser.add_argument("--rate", default="auto", help="of learning: a number, or auto")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    pythons = {name: str(Path(getattr(args, name)).absolute()) for name in ("verifiers", "atropos")}
    results = Results(args.json_out, task={"batch": BATCH, "questions": QUESTIONS, "exam": EXAM, "answers": ANSWERS})
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-environments-") as scratch:
        for way in args.ways.split(","):
            for seed, rewards in itertools.product(map(int, args.seeds.split(",")), args.rewards.split(",")):
                runs.append(
                    run(
                        way,
                        seed,
                        shuffled=rewards == "shuffled",
                        pythons=pythons,
                        rate=args.rate,
                        scratch=Path(scratch),
                        updates=CONTROL if rewards == "shuffled" else args.updates,
                    )
                )
                results.add(runs=runs)
    results.finish(runs=runs)


if __name__ == "__main__":
    main()
