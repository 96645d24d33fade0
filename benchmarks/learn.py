"""Does it learn? A client over HTTP teaches the demo model its weak skill; controls must not learn.

python benchmarks/learn.py --json-out benchmarks/results/learn.json

For each seed: a server with learning on, `steps` batches of 64 completions to `/v1/completions` with
`collect_trajectory` and `scoring_function`. The controls: rewards that change places within each batch before they are
learned from, and a learning rate of 0.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.bench import machine
from mlx_tandem.cli.bench.serve import write
from mlx_tandem.cli.demo.learner import SETTINGS, Curve, Learner, Rewards

RUNS: dict[str, tuple[Rewards, dict[str, Any]]] = {
    "true": ("true", {}),
    "shuffled": ("shuffled", {}),
    "rate 0": ("true", {"learning_rate": 0.0}),
}


def learned(name: str, seed: int, steps: int) -> dict[str, Any]:
    """One run on a fresh server."""
    rewards, changes = RUNS[name]
    with tempfile.TemporaryDirectory(prefix="tandem-learn-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        tree = {
            "rl_training": SETTINGS | {"seed": seed} | changes,
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints", "interval": 20},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings)).running(demo.MODEL_PATH) as url:
            curve: Curve = asyncio.run(Learner(url, seed=seed, rewards=rewards).learn(steps, _say(name, seed)))
    return {
        "run": name,
        "seed": seed,
        "steps": steps,
        "first_five": curve.first(),
        "last_five": curve.last(),
        "rewards": curve.rewards,
        "versions": curve.steps[-1].version,
        "seconds": curve.steps[-1].seconds,
    }


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
