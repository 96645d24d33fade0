"""Learning on a server beside TRL's `GRPOTrainer`: the same weights, task, questions, group size and learning rate.

    python -m venv ./trl && ./trl/bin/pip install trl==1.16.0 transformers==5.23.0 peft torch
    python benchmarks/beside_trl.py --trl ./trl/bin/python --json-out ./beside.json

Each side is asked the same questions in the same order, eight at a time with eight answers each, and takes one step of
AdamW for each of these batches of 64 answers. A side has arrived when the mean reward of `WINDOW` batches in a row is
at least 0.85. Measured are the answers up to there, the time since the model was loaded, and the largest memory of all
the processes of a side at one time (their proportional set sizes, so that shared pages count once).

Our side is a client over HTTP and a server with all that belongs to it: engine, journal, reward worker. TRL's is one
program. Both sides of a seed run beside each other and take turns batch by batch, one waiting while the other works, so
that what else the machine does slows both down alike. `cpu_s` is the processor time of the same batches, which
depends less on that. Where all programs of the machine stand still for a while, that time is not counted, and told
as `stopped_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import yaml
from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo.learner import MAX_TOKENS, SETTINGS, SKILL, question
from mlx_tandem.cli.outputs import argument
from mlx_tandem.http_client import once

PROMPTS = ANSWERS = 8  # of a batch, and to each prompt
BATCHES = 80
WINDOW = 5
WANTED = 0.85
BEAT = 0.5  # seconds between two looks at memory
GAP = 5.0  # seconds without a look from which the machine counts as stopped
RATIOS = {"answers": 1.0, "seconds": 0.5, "cpu_s": 0.5, "peak_mb": 0.7}
"""The figures that are compared, each with the largest ratio of ours to TRL's that is wanted."""


def task(seed: int, model: Path) -> dict[str, Any]:
    """Return what both sides are told."""
    rng = random.Random(seed)
    asked = [question(rng) for _ in range(PROMPTS * BATCHES)]
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return {
        "seed": seed,
        "model": str(model),
        "questions": [[template.format(SKILL.format(digits)), answer] for digits, answer in asked],
        "prompts": PROMPTS,
        "answers": ANSWERS,
        "max_tokens": MAX_TOKENS,
        "rank": SETTINGS["lora_rank"],
        "alpha": SETTINGS["lora_alpha"],
        "learning_rate": SETTINGS["learning_rate"],
        "beta1": 0.9,
        "beta2": 0.95,
        "threads": os.cpu_count(),
    }


# -- our side, in a process of its own -----------------------------------------------------------------------------


def serve(told: dict[str, Any]) -> None:
    """Run the server and ask it, as TRL's program does it: one line for each batch."""
    with tempfile.TemporaryDirectory(prefix="tandem-beside-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        training = {
            "enabled": True,
            "adapter": "policy",
            "seed": told["seed"],
            "lora_rank": told["rank"],
            "lora_alpha": told["alpha"],
            "algorithm": "grpo",
            "learning_rate": told["learning_rate"],
            "beta1": told["beta1"],
            "beta2": told["beta2"],
            "max_grad_norm": 1.0,
            "guard_prompts": 0,  # TRL has no guard, whose answers would be more to learn from
            "update_frequency": told["prompts"] * told["answers"],
        }
        tree = {
            "rl_training": training,
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints"},
            # As docs/training.md says for a server that nobody else uses.
            "duty": {"micro_batch_tokens": 2048},
            "cache": {"num_blocks": 512},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings), "--dtype", "float32").started(Path(told["model"])) as server:
            _say(ready=True)
            asyncio.run(_learn(server.url, told))


async def _learn(url: str, told: dict[str, Any]) -> None:
    size = told["prompts"]
    for at in range(0, len(told["questions"]), size):
        if not await asyncio.to_thread(sys.stdin.readline):
            return
        asked = [_ask(url, told, at + i) for i in range(size)]
        scores = [score for group in await asyncio.gather(*asked) for score in group]
        await _post(url, "/v1/training/update", {"wait": True})
        _say(reward=sum(scores) / len(scores))


async def _ask(url: str, told: dict[str, Any], at: int) -> list[float]:
    prompt, answer = told["questions"][at]
    body = {
        "model": "policy",
        "prompt": prompt,
        "n": told["answers"],
        "max_tokens": told["max_tokens"],
        "temperature": 1.0,
        "seed": told["seed"] * 1_000_000 + at,
        "scoring_function": "exact_match",
        "metadata": {"answer": answer},
        "collect_trajectory": True,
    }
    return [choice["score"] for choice in (await _post(url, "/v1/completions", body))["choices"]]


async def _post(url: str, path: str, body: object) -> Any:
    status, reply = await once(url, "POST", path, body)
    if status >= 300:
        raise RuntimeError(f"{path}: {status} {reply}")
    return reply


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


# -- watching a side -----------------------------------------------------------------------------------------------


class Side:
    """One side's program, which makes a batch when it is told to, and what its processes took so far."""

    def __init__(self, name: str, seed: int, command: Sequence[str]):
        """Start the program and wait until its model is loaded."""
        self.name, self.seed = name, seed
        self.rewards: list[float] = []
        self.seconds = self.stopped = self.cpu_s = 0.0
        self.peak = 0
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it goes with this object)
        # OpenMP threads that spin while they wait would take the processor from whoever has work.
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self._ended = Event()
        self._seen = began = perf_counter()
        self._watch = Thread(target=self._look, daemon=True)
        self._watch.start()
        self.versions = self._line().get("versions", {})
        self.start_s = perf_counter() - began

    @property
    def done(self) -> bool:
        """Whether the last batches have the mean reward that is wanted."""
        return len(self.rewards) >= WINDOW and statistics.fmean(self.rewards[-WINDOW:]) >= WANTED

    def batch(self) -> None:
        """Have one batch answered and learned from, and measure it."""
        assert self._process.stdin is not None
        cpu, stopped, began = self._cpu(), self.stopped, perf_counter()
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.rewards.append(self._line()["reward"])
        self.seconds += perf_counter() - began - (self.stopped - stopped)
        self.cpu_s += self._cpu() - cpu
        last = f"{self.name:>6} seed {self.seed} {len(self.rewards):>3} {self.rewards[-1]:.3f}"
        print(f"{last} {self.seconds:.1f} s {self.cpu_s:.1f} s of a core", file=sys.stderr, flush=True)

    def end(self) -> dict[str, Any]:
        """End the program and return the figures."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._ended.set()
        self._watch.join()
        return {
            "side": self.name,
            "seed": self.seed,
            "reached": self.done,
            "answers": len(self.rewards) * PROMPTS * ANSWERS,
            "seconds": self.seconds,
            "cpu_s": self.cpu_s,
            "start_s": self.start_s,
            "stopped_s": self.stopped,
            "peak_mb": self.peak / 2**20,
            "rewards": self.rewards,
            "versions": self.versions,
        }

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.name} ended:\n{self._errors.read()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _look(self) -> None:
        while not self._ended.wait(BEAT):
            self.peak = max(self.peak, sum(map(_pss, family(self._process.pid))))
            now = perf_counter()
            if now - self._seen > GAP:
                self.stopped += now - self._seen
            self._seen = now

    def _cpu(self) -> float:
        """Return the processor time of all processes of this side, in seconds."""
        ticks = 0
        for pid in family(self._process.pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # its own, and that of children that have ended
        return ticks / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


# -- the comparison ------------------------------------------------------------------------------------------------


def turns(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Let the sides take turns, batch by batch, until each has arrived; return their figures."""
    load = [os.getloadavg()[0]]
    found = []
    waiting = list(sides)
    while waiting and len(load) <= BATCHES:
        for side in list(waiting):
            side.batch()
            if side.done:
                waiting.remove(side)
                found.append(side.end())
        load.append(os.getloadavg()[0])
    found += [side.end() for side in waiting]
    return [run | {"load": {"median": statistics.median(load), "most": max(load)}} for run in found]


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of both sides, and the median of the ratios of the seeds."""
    found: dict[str, Any] = {}
    for figure, most in RATIOS.items():
        sides = {name: {r["seed"]: r[figure] for r in runs if r["side"] == name} for name in ("ours", "trl")}
        both = sorted(set(sides["ours"]) & set(sides["trl"]))
        if both:
            ratios = [sides["ours"][seed] / sides["trl"][seed] for seed in both]
            found[figure] = {
                "ours": statistics.median(sides["ours"][seed] for seed in both),
                "trl": statistics.median(sides["trl"][seed] for seed in both),
                "ratios": ratios,
                "ratio": statistics.median(ratios),
                "wanted": most,
            }
    return found


def main() -> None:
    """Run the benchmark, or our side of it."""
    parser = argparse.ArgumentParser(description="learning here and with TRL's GRPOTrainer")
    parser.add_argument("--trl", type=Path, help="Python of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sides", default="ours,trl")
    parser.add_argument("--model", type=Path, default=demo.MODEL_PATH)
    parser.add_argument("--json-out", type=argument)
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        serve(json.loads(args.ours.read_text()))
        return
    if args.trl is None:
        parser.error("--trl is needed: the Python of an environment with TRL")
    stop_cleanly()
    about = {key: value for key, value in task(0, args.model).items() if key not in ("questions", "model", "seed")}
    results = Results(args.json_out, task=about)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-beside-") as scratch:
        file = Path(scratch) / "task.json"
        commands = {
            "ours": [sys.executable, __file__, "--ours", str(file)],
            "trl": [str(args.trl), str(Path(__file__).with_name("trl_side.py")), str(file)],
        }
        for seed in range(args.seeds):
            file.write_text(json.dumps(task(seed, args.model)))
            runs += turns([Side(name, seed, commands[name]) for name in args.sides.split(",")])
            results.add(results=runs, compared=compared(runs))
    results.finish(results=runs, compared=compared(runs))
    for figure, row in compared(runs).items():
        print(f"{figure:<8} ours {row['ours']:.1f}  TRL {row['trl']:.1f}  ratio {row['ratio']:.2f} (≤ {row['wanted']})")


if __name__ == "__main__":
    main()
