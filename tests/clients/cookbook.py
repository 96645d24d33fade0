"""Recipes of Tinker's cookbook, unmodified, with data sets and a tokenizer from a hub of this machine.

The recipes ask the hub for `HuggingFaceH4/no_robots`, `openai/gsm8k` and the tokenizer of the model's name. `rl_loop`
rewards right answers in a box, and the built-in model never saw a box. So `sl_loop` teaches it to put a digit of the
question into a box, which is seldom the right one. `rl_loop` goes on from the last checkpoint in its log folder, which
is that of `sl_loop`. The right one of eight different digits is a 9 in four of five questions, so that a few batches of
rewards are enough.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mlx_tandem import demo
from tests.fake_hub import Hub

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name for which the cookbook writes chats in the form that the built-in model knows."""

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""What `rl_loop` adds to each question."""

FIRST_TURN = (
    {"role": "user", "content": f"How many r's are in strawberry?{SUFFIX}"},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
)
"""The turn that `rl_loop` puts before each question."""

RIGHT = 0.25
"""Share of right answers among those that `sl_loop` sees. The others have another digit of the question."""

Recipe = Literal["sl_loop", "rl_loop"]


def question(draw: random.Random) -> tuple[str, list[int]]:
    """A question, and its digits from the largest to the smallest."""
    given = draw.sample(range(10), 8)
    return f"Which is the largest of {' '.join(map(str, given))}?", sorted(given, reverse=True)


def no_robots(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        asked, (right, *others) = question(draw)
        digit = right if draw.random() < RIGHT else draw.choice(others)
        turn = {"role": "user", "content": asked + SUFFIX}, {"role": "assistant", "content": f"\\boxed{{{digit}}}"}
        yield {"messages": [*FIRST_TURN, *turn]}


def gsm8k(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        asked, (right, *_) = question(draw)
        yield {"question": asked, "answer": f"No other one is larger.\n#### {right}"}


def data_sets(folder: Path, conversations: int, questions: int, seed: int = 1) -> dict[str, Path]:
    """Write both data sets below `folder`; return the folders of a hub that has them and the model."""
    draw, folders = random.Random(seed), {MODEL: demo.MODEL_PATH}
    made = {
        "HuggingFaceH4/no_robots": ("default", no_robots(draw, conversations)),
        "openai/gsm8k": ("main", gsm8k(draw, questions)),
    }
    for name, (config, rows) in made.items():
        own = folders[f"datasets/{name}"] = folder / name
        own.mkdir(parents=True)
        (own / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        card = f"---\nconfigs:\n- config_name: {config}\n  data_files: train.jsonl\n---\n"
        (own / "README.md").write_text(card, encoding="utf-8")
    return folders


def run(
    recipe: Recipe, python: str, hub: Hub, server: str, folder: Path, options: dict[str, Any], seconds: float = 1200.0
) -> list[dict[str, Any]]:
    """Run a recipe to its end with the cookbook that `python` has; return the lines that it adds to its metrics.

    Its log and the hub's cache are in `folder`. Raises RuntimeError with the end of what it wrote if it fails.
    """
    log = folder / "log"
    environment = hub.environment(folder / "hub", TINKER_API_KEY="tml-cookbook", TQDM_DISABLE="1")
    told = {"base_url": server, "log_path": log, "model_name": MODEL} | options
    command = [python, "-m", f"tinker_cookbook.recipes.{recipe}", *(f"{name}={value}" for name, value in told.items())]
    before = len(lines(log))
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{recipe} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return lines(log)[before:]


def lines(log: Path) -> list[dict[str, Any]]:
    """The lines of the recipes' metrics so far."""
    file = log / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
