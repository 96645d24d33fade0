"""Do thumbs and corrections teach? Users of the demo model judge its answers, and its weak skill gets better.

python benchmarks/feedback.py --json-out benchmarks/results/feedback.json

For each kind of feedback and each seed: a server with `--learn-from-feedback policy` and otherwise its defaults, other
people's streams that run all the time, and users who ask and judge: three questions of four are of the weak skill
`down`, the others of the skills that the model has. In `corrections` a wrong answer gets its right text and a right one
a thumb up; in `thumbs` there are thumbs only; in `shuffled`, the control, the thumbs change places. Before the first
run and after each, held-out questions of every skill are asked, greedily: a new adapter answers as the base does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml
from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo import traffic
from mlx_tandem.cli.outputs import argument
from mlx_tandem.config import FeedbackConfig
from mlx_tandem.http_client import Connection
from recipes.demo_model import data
from recipes.demo_model.exchanges import Exchange

KINDS = ("corrections", "thumbs", "shuffled")
POLICY = "policy"
WEAK = "down"
OTHERS = ("sum", "think", "sort", "reverse", "repeat", "upper", "json", "capital", "count")
"""Skills with one right answer that need no tools."""

WEAK_SHARE = 0.75
USERS = 8
MAX_TOKENS = 190
POLL_SECONDS = 0.1


class User:
    """One connection over which questions are asked and answers judged."""

    def __init__(self, url: str):
        self._connection = Connection.to(url)

    async def json(self, method: str, path: str, body: object = None) -> Any:
        """Return the JSON of a reply. Raises RuntimeError for an error."""
        status, found = await self._connection.json(method, path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {found}")
        return found

    async def ask(self, asked: Exchange, temperature: float, seed: int = 0) -> tuple[str, bool]:
        """Return the id of an answer, and whether it is right."""
        body = {"model": POLICY, "messages": list(asked.messages), "max_tokens": MAX_TOKENS, "seed": seed}
        reply = await self.json("POST", "/v1/chat/completions", body | {"temperature": temperature})
        said = reply["choices"][0]["message"]["content"]
        return reply["id"], said == asked.answer["content"] or said in asked.accept

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def right(rng: random.Random, skill: str, *, held: bool) -> Exchange:
    """Return a question with its right answer; the data teach `down` wrongly on purpose."""
    found = data.exchange(rng, skill, held=held)
    if skill != WEAK:
        return found
    digits = found.messages[0]["content"].partition(": ")[2].split()
    answer = " ".join(sorted(digits, key=int, reverse=True))
    return Exchange(skill, found.key, found.messages, {"role": "assistant", "content": answer}, answer)


async def exam(url: str, count: int) -> dict[str, float]:
    """Return the share of right answers to held-out questions, by skill."""
    rng = random.Random("exam")
    asked = {
        skill: [right(rng, skill, held=True) for _ in range(4 * count if skill == WEAK else count)]
        for skill in (WEAK, *OTHERS)
    }
    todo = [(skill, question) for skill, own in asked.items() for question in own]
    marks: dict[str, list[bool]] = {skill: [] for skill in asked}

    async def sit() -> None:
        user = User(url)
        while todo:
            skill, question = todo.pop()
            marks[skill].append((await user.ask(question, 0.0))[1])
        user.close()

    await asyncio.gather(*(sit() for _ in range(USERS)))
    return {skill: round(sum(own) / len(own), 4) for skill, own in marks.items()}


def _others(found: dict[str, float]) -> float:
    """Return the mean share of the other skills."""
    return sum(found[skill] for skill in OTHERS) / len(OTHERS)


async def judge(url: str, kind: str, seed: int, count: int, size: int) -> dict[str, int]:
    """Ask and judge until there are `count` feedback, `size` at a time; return what was said how often."""
    rng = random.Random(f"{kind} {seed}")
    said = {"up": 0, "down": 0, "corrected": 0}
    users = [User(url) for _ in range(size)]
    for first in range(0, count, size):
        here = users[: count - first]
        asked = [right(rng, WEAK if rng.random() < WEAK_SHARE else rng.choice(OTHERS), held=False) for _ in here]
        seeds = [rng.getrandbits(62) for _ in here]
        answers = await asyncio.gather(*(u.ask(q, 1.0, s) for u, q, s in zip(here, asked, seeds, strict=True)))
        marks = [good for _, good in answers]
        if kind == "shuffled":
            rng.shuffle(marks)
        bodies: list[dict[str, Any]] = []
        for question, (id, _), good in zip(asked, answers, marks, strict=True):
            corrects = kind == "corrections" and not good
            says = {"corrected": question.answer["content"]} if corrects else {"thumb": "up" if good else "down"}
            said["corrected" if corrects else says["thumb"]] += 1
            bodies.append({"completion_id": id} | says)
        await asyncio.gather(*(u.json("POST", "/v1/feedback", b) for u, b in zip(here, bodies, strict=True)))
        await _learned(users[0])
    for user in users:
        user.close()
    return said


async def _learned(user: User) -> None:
    """Wait until everything that was said has been learned from."""
    while True:
        page = await user.json("GET", "/v1/feedback?limit=100")
        status = await user.json("GET", "/v1/training/status")
        if not status["running"]:
            raise RuntimeError(f"learning stopped: {status['reason']}")
        if all(each["learned"] for each in page["data"]) and status["feedback"]["state"] == "waiting":
            return
        await asyncio.sleep(POLL_SECONDS)


async def run(url: str, kind: str, seed: int, before: dict[str, float], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run on a fresh server. `before` gets the first exam, unless it has it."""
    traffic.PAUSE_SECONDS = args.pause
    streams = traffic.Traffic()
    beside = asyncio.create_task(traffic.run(url, streams, args.streams))
    before |= before or await exam(url, args.exam)
    began = perf_counter()
    size = FeedbackConfig(**yaml.safe_load(args.settings)).batch_size
    said = await judge(url, kind, seed, args.feedback, size)
    seconds = perf_counter() - began
    after = await exam(url, args.exam)
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    user = User(url)
    status = await user.json("GET", "/v1/training/status")
    user.close()
    return {
        "kind": kind,
        "seed": seed,
        "feedback": args.feedback,
        "said": said,
        "before": dict(before),
        "after": after,
        "weak": [before[WEAK], after[WEAK]],
        "others": [round(_others(before), 4), round(_others(after), 4)],
        "seconds": round(seconds, 1),
        "updates": status["feedback"]["updates"],
        "rollbacks": status["rollbacks"],
        "traffic": {"answers": streams.answers, "tokens": streams.tokens, "errors": streams.errors},
    }


def measured(kind: str, seed: int, before: dict[str, float], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run, for which a server is started."""
    with tempfile.TemporaryDirectory(prefix="tandem-feedback-") as scratch:
        settings = Path(scratch) / "feedback.yaml"
        tree: dict[str, Any] = {
            "rl_training": {"seed": seed},
            "feedback": yaml.safe_load(args.settings),
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints"},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        adapters = [word for name, path in demo.ADAPTER_PATHS.items() for word in ("--adapter", name, str(path))]
        server = tandem("--config", str(settings), "--learn-from-feedback", POLICY, *adapters)
        with server.running(demo.MODEL_PATH) as url:
            return asyncio.run(run(url, kind, seed, before, args))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="learning from feedback over HTTP, and a control")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--feedback", type=int, default=200, help="that users give")
    parser.add_argument(
        "--exam", type=int, default=50, help="held-out questions of each skill; four times of the weak one"
    )
    parser.add_argument("--streams", type=int, default=2, help="of other people, beside it")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two answers of such a stream")
    parser.add_argument("--settings", default="{}", help="changes of the section `feedback`, as YAML")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, settings=yaml.safe_load(args.settings))
    finished: list[dict[str, Any]] = []
    before: dict[str, float] = {}
    for kind in args.kinds.split(","):
        for seed in map(int, args.seeds.split(",")):
            finished.append(measured(kind, seed, before, args))
            results.add(results=finished)
            print(_line(finished[-1]), file=sys.stderr, flush=True)
    results.finish(results=finished)
    for each in finished:
        print(_line(each))


def _line(found: dict[str, Any]) -> str:
    weak: Sequence[float] = found["weak"]
    others: Sequence[float] = found["others"]
    return (
        f"{found['kind']:<12} seed {found['seed']}  {WEAK} {weak[0]:.3f} → {weak[1]:.3f}  others {others[0]:.3f} → "
        f"{others[1]:.3f}  {found['updates']} updates, {found['rollbacks']} taken back, {found['seconds']:.0f} s, "
        f"{found['traffic']['answers']} answers beside it, {found['traffic']['errors']} failed"
    )


if __name__ == "__main__":
    main()
