"""Does it learn? A client over HTTP teaches the demo model its weak skill; controls must not learn.

python benchmarks/learn.py --json-out benchmarks/results/learn.json

For each seed: a server with learning on, `steps` batches of 64 completions to `/v1/completions` with
`collect_trajectory` and `scoring_function`. The controls: rewards that change places within each batch before they are
learned from, and a learning rate of 0. "rate x8" is the guard's run: a learning rate that destroys the policy, beside
held-out prompts which each version has to pass before it is served; what is served is asked other held-out questions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.bench import machine
from mlx_tandem.cli.bench.serve import write
from mlx_tandem.cli.demo.learner import MAX_TOKENS, SETTINGS, SKILL, Curve, Learner, Rewards, question

RUNS: dict[str, tuple[Rewards, dict[str, Any]]] = {
    "true": ("true", {}),
    "shuffled": ("shuffled", {}),
    "rate 0": ("true", {"learning_rate": 0.0}),
    "rate x8": ("true", {"learning_rate": 8 * SETTINGS["learning_rate"]}),
}
GUARDED = "rate x8"
HELD_OUT = 32
EVERY = 4  # batches from one look at what is served to the next


def learned(name: str, seed: int, steps: int) -> dict[str, Any]:
    """One run on a fresh server."""
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
        with tandem("--config", str(settings)).running(demo.MODEL_PATH) as url:
            learner = Learner(url, seed=seed, rewards=rewards)
            found: dict[str, Any] = asyncio.run(_run(learner, name, seed, steps))
    curve = learner.curve
    return found | {
        "run": name,
        "seed": seed,
        "steps": steps,
        "first_five": curve.first(),
        "last_five": curve.last(),
        "rewards": curve.rewards,
        "versions": curve.steps[-1].version,
        "seconds": curve.steps[-1].seconds,
    }


async def _run(learner: Learner, name: str, seed: int, steps: int) -> dict[str, Any]:
    if name != GUARDED:
        await learner.learn(steps, _say(name, seed))
        return {}
    questions = [question(random.Random(f"asked {i}")) for i in range(HELD_OUT)]
    accuracy = [await learner.accuracy(questions)]
    for _ in range(0, steps, EVERY):
        await learner.learn(EVERY, _say(name, seed))
        accuracy.append(await learner.accuracy(questions))
    status = await learner.status()
    said = {key: status[key] for key in ("rollbacks", "publishes", "updates", "running", "reason", "learning_rate")}
    return {"served_accuracy": accuracy, "lowest_below_start": round(accuracy[0] - min(accuracy), 4)} | said


def write_held_out(file: Path) -> Path:
    """Prompts for `validation_prompts`, drawn apart from those that are learned from and those that are asked."""
    lines = []
    for i in range(HELD_OUT):
        digits, answer = question(random.Random(f"held out {i}"))
        prompt = [{"role": "user", "content": SKILL.format(digits)}]
        scoring = {"scoring_function": "exact_match", "metadata": {"answer": answer}, "max_tokens": MAX_TOKENS}
        lines.append(json.dumps({"prompt": prompt} | scoring))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _say(name: str, seed: int) -> Any:
    def on_step(curve: Curve) -> None:
        if len(curve.steps) % 10 == 0:
            print(
                f"{name}  seed {seed}  step {len(curve.steps)}  reward {curve.last():.2f}", file=sys.stderr, flush=True
            )

    return on_step


def main() -> None:
    parser = argparse.ArgumentParser(description="learning over HTTP, and controls")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    results = [learned(name, seed, args.steps) for seed in range(args.seeds) for name in args.runs.split(",")]
    for r in results:
        print(f"{r['run']:<10} seed {r['seed']}  {r['first_five']:.3f} → {r['last_five']:.3f}  {r['seconds']:.0f} s")
    if args.json_out:
        write(args.json_out, {"settings": SETTINGS, "results": results} | machine.describe())


if __name__ == "__main__":
    main()
