"""Does it learn? A client over HTTP teaches the demo model its weak skill; controls must not learn.

python benchmarks/learn.py --json-out benchmarks/results/learn.json

For each seed: a server with learning on, `steps` batches of 64 completions to `/v1/completions` with
`collect_trajectory` and `scoring_function`. The controls: rewards that change places within each batch before they are
learned from, and a learning rate of 0. "rate x8" is the guard's run: a learning rate that destroys the policy, beside
held-out prompts which each version has to pass before it is served; what is served is asked other held-out questions.

On another device, with the time told:

    python benchmarks/learn.py --runs true --seeds 1 --dtype auto --seconds 90 --json-out ./learn-here.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from partial import Results, stop_cleanly
from servers import Running, tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo.learner import MAX_TOKENS, SETTINGS, SKILL, Learner, Rewards, question
from mlx_tandem.cli.outputs import argument

RUNS: dict[str, tuple[Rewards, dict[str, Any]]] = {
    "true": ("true", {}),
    "shuffled": ("shuffled", {}),
    "rate 0": ("true", {"learning_rate": 0.0}),
    "rate x8": ("true", {"learning_rate": 8 * SETTINGS["learning_rate"]}),
}
GUARDED = "rate x8"
HELD_OUT = 32
EVERY = 4  # batches between two evaluations of the served version


Progress = Callable[[dict[str, Any]], None]


def learned(name: str, seed: int, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the figures of one run on a fresh server."""
    rewards, changes = RUNS[name]
    with tempfile.TemporaryDirectory(prefix="tandem-learn-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        if name == GUARDED:
            changes = changes | {"validation_prompts": str(write_held_out(Path(scratch) / "held_out.jsonl"))}
        tree = {
            "rl_training": SETTINGS | {"seed": seed} | changes,
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints", "interval": 20},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings), "--dtype", args.dtype).started(demo.MODEL_PATH) as server:
            run = Run(Learner(server.url, seed=seed, rewards=rewards), name, seed, server)
            return asyncio.run(run.done(args.steps, args.seconds, progress))


class Run:
    """One course of learning, with the figures so far."""

    def __init__(self, learner: Learner, name: str, seed: int, server: Running):
        self._learner = learner
        self._name = name
        self._about = {"run": name, "seed": seed, "device": server.device(), "server_start_s": round(server.start_s, 1)}
        self._accuracy: list[float] = []
        self._questions = [question(random.Random(f"asked {i}")) for i in range(HELD_OUT)]

    async def done(self, steps: int, seconds: float, progress: Progress) -> dict[str, Any]:
        """Run `steps` batches, or as many as begin within `seconds`; return the figures."""
        curve = self._learner.curve
        await self._look()
        while len(curve.steps) < steps and (not curve.steps or curve.steps[-1].seconds < seconds):
            await self._learner.learn(min(EVERY, steps - len(curve.steps)))
            await self._look()
            progress(self._found())
        return self._found() | await self._said()

    async def _look(self) -> None:
        if self._name == GUARDED:
            self._accuracy.append(await self._learner.accuracy(self._questions))

    def _found(self) -> dict[str, Any]:
        curve = self._learner.curve
        found = self._about | {
            "steps": len(curve.steps),
            "first_five": curve.first(),
            "last_five": curve.last(),
            "rewards": curve.rewards,
            "versions": curve.steps[-1].version,
            "seconds": curve.steps[-1].seconds,
        }
        if self._accuracy:
            lowest = round(self._accuracy[0] - min(self._accuracy), 4)
            found |= {"served_accuracy": self._accuracy, "lowest_below_start": lowest}
        return found

    async def _said(self) -> dict[str, Any]:
        status = await self._learner.status()
        return {key: status[key] for key in ("rollbacks", "publishes", "updates", "running", "reason", "learning_rate")}


def write_held_out(file: Path) -> Path:
    """Write prompts for `validation_prompts`, drawn apart from those that are learned from and those that are asked."""
    lines = []
    for i in range(HELD_OUT):
        digits, answer = question(random.Random(f"held out {i}"))
        prompt = [{"role": "user", "content": SKILL.format(digits)}]
        scoring = {"scoring_function": "exact_match", "metadata": {"answer": answer}, "max_tokens": MAX_TOKENS}
        lines.append(json.dumps({"prompt": prompt} | scoring))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="learning over HTTP, and controls")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of a run, after which no batch begins")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--dtype", default="auto", help="that the server computes in")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, settings=SETTINGS)
    finished: list[dict[str, Any]] = []

    def progress(run: dict[str, Any]) -> None:
        results.add(results=[*finished, run])
        print(_line(run), file=sys.stderr, flush=True)

    for seed in range(args.seeds):
        for name in args.runs.split(","):
            finished.append(learned(name, seed, args, progress))
    results.finish(results=finished)
    for run in finished:
        print(_line(run))


def _line(run: dict[str, Any]) -> str:
    line = (
        f"{run['run']:<10} seed {run['seed']}  {run['steps']} batches  {run['first_five']:.3f} → {run['last_five']:.3f}"
    )
    served = f"  served at least start - {run['lowest_below_start']:.3f}" if "served_accuracy" in run else ""
    back = f", {run['rollbacks']} taken back" if "rollbacks" in run else ""
    return f"{line}  {run['seconds']:.0f} s after a start of {run['server_start_s']:.0f} s{served}{back}"


if __name__ == "__main__":
    main()
