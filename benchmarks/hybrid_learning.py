"""Does a hybrid learn what is rewarded, and nothing from rewards that say nothing?

    python benchmarks/hybrid_learning.py --families qwen3_5 --json-out benchmarks/results/hybrid_learning-qwen3_5.json

Tiny models with random weights, some of whose layers keep a state, and an adapter that learns by GRPO on the engine
that serves it. In a prompt one of two marks follows each random token. The mark decides which half of the vocabulary is
rewarded: the reward is the share of the answer's tokens in that half. Both marks come equally often, so answers that
ignore their prompts are worth 0.5 at most, and a policy that merely wanders does not rise. More than that needs the
mark, which the later tokens of an answer see only through the layers' states and attention, or in the tokens between.
A seed draws the model's weights, the adapter's first weights, the prompts and the answers.

After every few updates the served version answers prompts from which nothing is learned. The control must stay flat:
its rewards change places within their group before they are learned from, so that updates have the same size and no
direction.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from partial import Results, stop_cleanly

from mlx_tandem.api import Engine
from mlx_tandem.cli.bench.shapes import Shape, write_model
from mlx_tandem.cli.outputs import argument
from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.training.online.advantages import batches, by_group, varies
from mlx_tandem.training.trajectories import Trajectory
from tests import tiny_models

FAMILIES = ("qwen3_5", "nemotron_h")
RUNS = ("true", "shuffled")
POLICY = "policy"
VOCAB = tiny_models.VOCAB
HALVES = range(3, VOCAB // 2), range(VOCAB // 2, VOCAB - 3)
MARKS = HALVES[0][0], HALVES[1][0]
SETTINGS: dict[str, Any] = {
    "rank": 8,
    "alpha": 16.0,
    "learning_rate": 0.01,
    "grad_norm": 1.0,
    "prompt_tokens": 6,
    "answer_tokens": 6,
    "groups": 16,
    "answers": 8,
    "updates": 60,
    "evaluated_every": 10,
    "evaluation_prompts": 256,
}
"""The same for all families, seeds and runs. They were chosen with seeds from 100 on, which are not reported."""


def question(rng: random.Random, mark: int) -> tuple[int, ...]:
    """Return a prompt with this mark: 0 or 1."""
    pairs = ((rng.randrange(3, VOCAB - 3), MARKS[mark]) for _ in range(SETTINGS["prompt_tokens"] // 2))
    return tuple(token for pair in pairs for token in pair)


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of the answer's tokens that are in the half that the prompt's mark asks for."""
    wanted = HALVES[MARKS.index(prompt[-1])]
    return sum(token in wanted for token in answer) / len(answer)


class Pupil:
    """An adapter that learns on an engine."""

    def __init__(self, engine: Engine, run: str, seed: int):
        self._engine = engine
        self._run = run
        self._random = random.Random(f"asked {seed}")
        self._shuffles = random.Random(f"shuffled {seed}")
        self._trainer = engine.trainer(POLICY, rank=SETTINGS["rank"], alpha=SETTINGS["alpha"], seed=seed)
        self._trainer.publish()
        self._config = RLTrainingConfig(enabled=True, algorithm="grpo", adapter=POLICY)
        self._exam = [question(random.Random(f"exam {i}"), i % 2) for i in range(SETTINGS["evaluation_prompts"])]

    def evaluate(self) -> float:
        """Return the mean reward of the served version for prompts from which nothing is learned."""
        answers = self._answers(self._exam, 1, seed=0)
        return round(sum(t.reward for t in answers) / len(answers), 4)

    def update(self) -> float:
        """Learn from one batch of answers and serve the result; return the batch's mean reward."""
        prompts = [question(self._random, i % 2) for i in range(SETTINGS["groups"])]
        answers = self._answers(prompts, SETTINGS["answers"], seed=self._random.getrandbits(60))
        groups = [group for group in by_group(answers) if varies(group)]
        if self._run == "shuffled":
            groups = [self._shuffled(group) for group in groups]
        for batch in batches(groups, self._config):
            self._trainer.forward_backward(batch.data, batch.loss)
        self._trainer.step(SETTINGS["learning_rate"], grad_norm=SETTINGS["grad_norm"])
        self._trainer.publish()
        return sum(t.reward for t in answers) / len(answers)

    def _answers(self, prompts: Sequence[tuple[int, ...]], count: int, seed: int) -> list[Trajectory]:
        length = SETTINGS["answer_tokens"]
        options: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
        done = self._engine.generate(list(prompts), adapter=POLICY, n=count, seed=seed, **options)
        found = []
        for i, completion in enumerate(done):
            group, tokens, said = i // count, completion.token_ids, completion.logprobs or ()
            found.append(
                Trajectory(
                    str(i), str(group), prompts[group], tokens,
                    tuple(each.sampled for each in said), tuple(each.model for each in said),
                    (), 1.0, reward(prompts[group], tokens),
                )
            )  # fmt: skip
        return found

    def _shuffled(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        rewards = self._shuffles.sample([t.reward for t in group], len(group))
        return [
            Trajectory(t.id, t.group, t.prompt, t.tokens, t.logprobs, t.model_logprobs, (), 1.0, each)
            for t, each in zip(group, rewards, strict=True)
        ]


def measure(family: str, run: str, seed: int) -> dict[str, Any]:
    """Return the curve of one run on a fresh engine."""
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="tandem-hybrid-learning-") as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, Shape(64, 2, 4, 2, 16, 96, VOCAB), weights=False)  # for its tokenizer
        tiny_models.make(folder, family, seed=seed)
        with Engine(folder, {}, max_model_len=64, max_num_seqs=64) as engine:
            pupil = Pupil(engine, run, seed)
            curve, rewards = {0: pupil.evaluate()}, []
            for done in range(1, SETTINGS["updates"] + 1):
                rewards.append(round(pupil.update(), 4))
                if done % SETTINGS["evaluated_every"] == 0:
                    curve[done] = pupil.evaluate()
    return {
        "family": family,
        "run": run,
        "seed": seed,
        "first": curve[0],
        "last": curve[SETTINGS["updates"]],
        "lowest": min(curve.values()),
        "highest": max(curve.values()),
        "evaluations": {str(at): each for at, each in curve.items()},
        "rewards": rewards,
        "seconds": round(perf_counter() - began, 1),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="a tiny hybrid learns from rewards, and a control does not")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, settings=SETTINGS)
    found: list[dict[str, Any]] = []
    for family in args.families.split(","):
        for seed in map(int, args.seeds.split(",")):
            for run in args.runs.split(","):
                found.append(measure(family, run, seed))
                results.add(results=found)
                print(line(found[-1]), file=sys.stderr, flush=True)
    results.finish(results=found)


def line(row: dict[str, Any]) -> str:
    """Return one run in a line."""
    return (
        f"{row['family']:<18} seed {row['seed']} {row['run']:<9} {row['first']:.2f} → {row['last']:.2f}, "
        f"between {row['lowest']:.2f} and {row['highest']:.2f}, {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
