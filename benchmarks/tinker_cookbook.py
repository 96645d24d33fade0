"""The loops `sl_loop` and `rl_loop` of Tinker's cookbook, unmodified, against a server with the built-in model.

    python -m venv ./cookbook && ./cookbook/bin/pip install 'tinker-cookbook[math-rl]'
    python benchmarks/tinker_cookbook.py --python ./cookbook/bin/python --json-out ./cookbook.json

Both are run as their page says, by `python -m` with options, and see nothing of the outside: the tokenizer and the data
sets come from a hub of this machine. The data sets have the form of `no_robots` and `gsm8k` and tasks for the built-in
model (`tests/clients/cookbook.py`). The figures are those that the recipes write into their `metrics.jsonl`: the mean
loss of a token of each batch of `sl_loop`, and the mean reward of each batch of `rl_loop`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.outputs import argument
from tests.clients import cookbook
from tests.fake_hub import fake_hub

SL = {"batch_size": 4, "learning_rate": 3e-3, "lora_rank": 16, "train_on_what": "last_assistant_message"}
RL = {"batch_size": 4, "group_size": 8, "learning_rate": 5e-4, "max_tokens": 12, "loss_fn": "importance_sampling"}
ROOM = ("--max-model-len", "1024", "--num-blocks", "1024")
ENDS = 4  # batches at the beginning and at the end whose means are compared


def versions(python: str) -> dict[str, str]:
    """Return the versions of the packages that matter in the environment of `python`."""
    names = ("tinker", "tinker_cookbook", "torch", "transformers", "datasets")
    asked = f"from importlib.metadata import version; print(*map(version, {names!r}))"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(names, found, strict=True))


def ends(curve: list[float]) -> dict[str, float]:
    """Return the means of the first and of the last batches."""
    return {
        "first": round(statistics.mean(curve[:ENDS]), 4),
        "last": round(statistics.mean(curve[-ENDS:]), 4),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="sl_loop and rl_loop of Tinker's cookbook")
    parser.add_argument("--python", required=True, help="the Python of an environment with tinker-cookbook[math-rl]")
    parser.add_argument("--sl-batches", type=int, default=24)
    parser.add_argument("--rl-batches", type=int, default=16)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, client=versions(args.python), sl_options=SL, rl_options=RL)
    with tempfile.TemporaryDirectory(prefix="tandem-cookbook-") as scratch:
        folder = Path(scratch)
        # rl_loop counts its batches on from those of sl_loop.
        folders = cookbook.data_sets(
            folder / "data", SL["batch_size"] * args.sl_batches, RL["batch_size"] * (args.sl_batches + args.rl_batches)
        )
        options = ("--enable-tinker", "--tinker-trainers", "1", "--tinker-dir", str(folder / "tinker"), *ROOM)
        server = tandem(*options, "--served-model-name", cookbook.MODEL)
        with fake_hub(folders) as hub, server.started(demo.MODEL_PATH) as started:

            def run(recipe: cookbook.Recipe, told: dict[str, Any], figure: str) -> list[float]:
                lines = cookbook.run(recipe, args.python, hub, started.url, folder, told)
                return [round(line[figure], 4) for line in lines]

            loss = run("sl_loop", SL, "train_mean_nll")
            results.add(sl_loss=loss, sl_summary=ends(loss))
            reward = run("rl_loop", RL, "reward/total")
    results.finish(rl_reward=reward, rl_summary=ends(reward))
    print(f"loss of sl_loop: {ends(loss)}; reward of rl_loop: {ends(reward)}")


if __name__ == "__main__":
    main()
