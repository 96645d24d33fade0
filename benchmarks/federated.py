"""Measures whether trainers that average what they learn reach what one trainer with all data does.

The task is the built-in model's weak skill. The questions are divided by a hash: each trainer is asked those of its own
share only. One trainer alone is asked all of them: it does as many updates as each of the others, each made of as
many answers as all of theirs. Both are judged on questions that nobody is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo.learner import MAX_TOKENS, POLICY, POLL_SECONDS, SETTINGS, SKILL, Question, question
from mlx_tandem.cli.outputs import argument
from mlx_tandem.http_client import once

ROOM = ("--max-model-len", "256", "--num-blocks", "512")
GROUPS, ANSWERS = 4, 8  # of a batch, which is one update
HELD_OUT = 100


def share(asked: Question, shares: int) -> int:
    """Return to which share a question belongs; -1 for one that is held out."""
    number = int.from_bytes(hashlib.blake2b(asked[0].encode(), digest_size=8).digest(), "little")
    return -1 if number % 5 == 0 else number // 5 % shares


def drawn(rng: random.Random, own: int, shares: int) -> Question:
    """Return a random question of one share; of all shares if there is one only."""
    while share(found := question(rng), shares) != own:
        pass
    return found


async def ask(url: str, asked: Question, n: int, seed: int, *, collect: bool) -> list[float]:
    """Return the scores of the answers of the served policy. Raises RuntimeError for a refusal."""
    messages = [{"role": "user", "content": SKILL.format(asked[0])}]
    body = {"messages": messages, "model": POLICY, "n": n, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed}
    body |= {"scoring_function": "exact_match", "metadata": {"answer": asked[1]}, "collect_trajectory": collect}
    status, reply = await once(url, "POST", "/v1/chat/completions", body)
    if status != 200:
        raise RuntimeError(f"{status}: {reply}")
    return [choice["score"] for choice in reply["choices"]]


async def accuracy(url: str) -> float:
    """Return the share of right answers to the questions that are held out."""
    rng = random.Random(7)
    questions = [drawn(rng, -1, 1) for _ in range(HELD_OUT)]
    scores: list[float] = []
    for i in range(0, HELD_OUT, 10):
        asked = (ask(url, q, 4, i, collect=False) for q in questions[i : i + 10])
        scores += [score for each in await asyncio.gather(*asked) for score in each]
    return sum(scores) / len(scores)


async def teach(url: str, own: int, shares: int, seed: int, updates: int, groups: int = GROUPS) -> None:
    """Ask a trainer `groups` questions of its share at once until it has done so many updates, while its loop runs."""
    rng = random.Random(f"{seed}-{own}")
    while True:
        _, status = await once(url, "GET", "/v1/training/status")
        if status["updates"] >= updates:
            return
        if not status["running"] or status["busy"]:
            await asyncio.sleep(POLL_SECONDS)
            continue
        asked = (ask(url, drawn(rng, own, shares), ANSWERS, rng.getrandbits(62), collect=True) for _ in range(groups))
        await asyncio.gather(*asked)


def started(stack: ExitStack, folder: Path, name: str, cluster: dict[str, Any], *, groups: int) -> str:
    """Start a server that learns from so many groups at once, or not at all, and return its URL."""
    settings = {**SETTINGS, "enabled": groups > 0, "update_frequency": max(groups, 1) * ANSWERS, "guard_prompts": 0}
    tree = {
        "rl_training": settings,
        "checkpointing": {"checkpoint_dir": str(folder / name / "checkpoints")},
        "cluster": cluster | {"dir": str(folder / name / "cluster")},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return stack.enter_context(tandem("--config", str(file), *ROOM).started(demo.MODEL_PATH)).url


async def together(leader: str, trainers: list[str], seed: int, updates: int, every: int) -> dict[str, float]:
    """Return the accuracy of the leader's versions after so many updates of each trainer."""
    found = {"0": await accuracy(trainers[0])}
    for goal in range(every, updates + 1, every):
        await asyncio.gather(*(teach(url, i, len(trainers), seed, goal) for i, url in enumerate(trainers)))
        while (await once(leader, "GET", "/v1/cluster/status"))[1]["contributions"]:
            await asyncio.sleep(POLL_SECONDS)
        found[str(goal)] = await accuracy(leader)
        print(f"together, after {goal} updates each: {found[str(goal)]:.3f}", file=sys.stderr, flush=True)
    return found


async def alone(url: str, seed: int, updates: int, every: int, groups: int) -> dict[str, float]:
    """Return the accuracy of one trainer after so many updates."""
    found = {"0": await accuracy(url)}
    for goal in range(every, updates + 1, every):
        await teach(url, 0, 1, seed, goal, groups)
        found[str(goal)] = await accuracy(url)
        print(f"alone, after {goal} updates: {found[str(goal)]:.3f}", file=sys.stderr, flush=True)
    return found


def measure(seed: int, trainers: int, updates: int, every: int, round_updates: int) -> dict[str, Any]:
    """Return the accuracies of both sides. `updates` are those of each trainer."""
    with tempfile.TemporaryDirectory(prefix="tandem-federated-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        leader = started(stack, folder, "leader", {"share": True, "trainers": trainers}, groups=0)
        joins = {"connect_to": leader, "round_updates": round_updates}
        urls = [started(stack, folder, f"trainer{i}", joins, groups=GROUPS) for i in range(trainers)]
        several = asyncio.run(together(leader, urls, seed, updates, every))
    with tempfile.TemporaryDirectory(prefix="tandem-federated-") as scratch, ExitStack() as stack:
        url = started(stack, Path(scratch), "alone", {}, groups=GROUPS * trainers)
        single = asyncio.run(alone(url, seed, updates, every, GROUPS * trainers))
    return {"seed": seed, "together": several, "alone": single}


def main() -> None:
    """Run the benchmark for each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20, help="of each trainer")
    parser.add_argument("--every", type=int, default=10, help="updates between two judgements")
    parser.add_argument("--round-updates", type=int, default=2)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(
        args.json_out, groups=GROUPS, answers=ANSWERS, held_out=HELD_OUT, arguments=vars(args) | {"json_out": ""}
    )
    found = []
    for seed in map(int, args.seeds.split(",")):
        found.append(measure(seed, args.trainers, args.updates, args.every, args.round_updates))
        results.add(results=found)
        print(found[-1], file=sys.stderr, flush=True)
    results.finish(results=found)


if __name__ == "__main__":
    main()
