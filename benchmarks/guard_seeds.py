"""How alike versions answer that draw with the same seeds: what the guard's validation prompts gain by it.

    python benchmarks/guard_seeds.py --json-out benchmarks/results/guard_seeds.json

The built-in model learns its weak skill. After some updates, the first version and the newest one answer the same
questions, once with the same seeds and once with others: the share of equal answers, and the variance of the
differences of rewards.
"""

from __future__ import annotations

import argparse
import random
from statistics import fmean
from typing import Any

from partial import Results

from mlx_tandem.api import Engine
from mlx_tandem.cli.demo.learner import MAX_TOKENS, SKILL, question
from mlx_tandem.cli.outputs import argument

ANSWERS = 4
QUESTIONS = 64
AFTER = (1, 5, 10, 20)
"""Updates after which the versions are compared."""


def drawn(engine: Engine, adapter: str, seed: int, questions: list[tuple[str, str]]) -> list[list[tuple[str, float]]]:
    """Return the answers to each question with their rewards."""
    found = []
    for digits, answer in questions:
        prompt = engine.codec.chat([{"role": "user", "content": SKILL.format(digits)}], asks=True)
        made = engine.generate([prompt], adapter=adapter, n=ANSWERS, max_tokens=MAX_TOKENS, temperature=1, seed=seed)
        found.append([(c.text, float(c.text.strip() == answer)) for c in made])
    return found


def compared(old: list[list[tuple[str, float]]], new: list[list[tuple[str, float]]]) -> dict[str, float]:
    """Return how alike answers are, and the mean and the variance of what the new ones got more."""
    differences = [fmean(r for _, r in b) - fmean(r for _, r in a) for a, b in zip(old, new, strict=True)]
    mean = fmean(differences)
    equal = fmean(x[0] == y[0] for a, b in zip(old, new, strict=True) for x, y in zip(a, b, strict=True))
    return {
        "equal answers": round(equal, 3),
        "difference": round(mean, 3),
        "variance": round(fmean((d - mean) ** 2 for d in differences), 4),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="how alike versions answer with the same seeds")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    results, rows, rng = Results(args.json_out, answers=ANSWERS, questions=QUESTIONS), [], random.Random(0)
    asked = [question(random.Random(f"held out {i}")) for i in range(QUESTIONS)]
    with Engine() as engine:
        trainer = engine.trainer("policy", rank=8)
        trainer.publish()
        old = drawn(engine, "policy", 7, asked)
        for update in range(1, max(AFTER) + 1):
            learn(engine, trainer, rng, update)
            trainer.publish()
            if update in AFTER:
                same, others = (compared(old, drawn(engine, "policy", seed, asked)) for seed in (7, 8))
                rows.append({"updates": update, "same seeds": same, "other seeds": others})
                print(rows[-1], flush=True)
                results.add(results=rows)
    results.finish(results=rows)


def learn(engine: Engine, trainer: Any, rng: random.Random, update: int) -> None:
    """Do one update from the answers to eight questions."""
    data = []
    for k in range(8):
        digits, answer = question(rng)
        prompt = engine.codec.chat([{"role": "user", "content": SKILL.format(digits)}], asks=True)
        made = engine.generate(
            [prompt], adapter="policy", n=8, max_tokens=MAX_TOKENS, temperature=1, logprobs=0, seed=100 * update + k
        )
        rewards = [float(c.text.strip() == answer) for c in made]
        data += [
            {
                "prompt": prompt,
                "completion": c.token_ids,
                "logprobs": [logprob.sampled for logprob in c.logprobs or ()],
                "advantages": reward - fmean(rewards),
            }
            for c, reward in zip(made, rewards, strict=True)
        ]
    trainer.forward_backward(data, "ppo", normalize="token_mean")
    trainer.step(learning_rate=1e-3, grad_norm=1.0)


if __name__ == "__main__":
    main()
