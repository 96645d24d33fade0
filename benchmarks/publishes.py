"""Does anybody notice that a new version is published every second, and did each token come from the version it names?

    python benchmarks/publishes.py --json-out benchmarks/results/publishes.json

Streams of the built-in model run all the time: greedy ones of the base, of adapters and of one version of the policy,
whose answers may not change; sampled ones of the policy and of an alias that is pointed to each new version, pinned to
the version that they began with; and sampled ones that go on under newer versions as they come. They run alone, beside
updates that publish nothing, and beside updates that each publish a version. Afterwards, when nothing is learned any
more, every pinned answer is asked for again from the version that it names, and mlx-lm computes the logprob of every
token of all answers under the versions that they name.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml
from replay import Kind, Reply, compare
from rich.table import Table
from servers import tandem
from streams import TARGETS, call, greedy, tokens, trajectories, with_adapters

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import BenchError, Client, run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.stats import spread
from mlx_tandem.cli.bench.workloads import Load
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import Connection

POLICY, ALIAS = "policy", "live"
SETTINGS = {"enabled": True, "adapter": POLICY, "lora_rank": 8, "lora_alpha": 16.0, "learning_rate": 3e-4}
UPDATE_TOKENS, UPDATE_LENGTHS = 128, (8, 8)
WARM_UP = 5  # versions before the one that greedy streams stay with
WHOLE_PROMPT = 8  # tokens that are never read in two chunks, between which a version could be published
MODES = ("idle", "updates", "publishes")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="streams beside the publishing of versions")
    parser.add_argument("--publishes", type=int, default=120)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=12.0, help="of the modes without publishes in a round")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-publishes-") as scratch:
        settings, checkpoints = Path(scratch) / "learn.yaml", Path(scratch) / "checkpoints"
        tree = {"rl_training": SETTINGS, "checkpointing": {"checkpoint_dir": str(checkpoints)}}
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings), *with_adapters()).running(demo.MODEL_PATH) as url:
            load = Load(url, prompt_tokens=32, max_tokens=args.max_tokens, validate=True)
            result, replies = run_loop(measure(load, args.streams, args.publishes, args.seconds, args.repeats))
        result |= compare(replies, checkpoints)
    if args.json_out:
        write_json(args.json_out, describe() | result)
    report(result)
    wrong = {key: result[key] for key in ("failed", "different", "mixed") if result[key]}
    wrong |= {kind: found["over"] for kind, found in result["replay"].items() if found["over"]}
    if result["contents"] < result["versions"]:
        wrong["versions of one content"] = result["versions"] - result["contents"]
    if wrong:
        fail(f"streams failed, or their answers are not those of the versions that they name: {wrong}")


class Streams:
    """The streams and their replies."""

    def __init__(self, client: Client, count: int, pinned: str):
        self._client = client
        self._random = random.Random(1)
        kinds: list[tuple[Kind, str | None]] = [("greedy", target) for target in (*TARGETS, pinned)]
        kinds += [("pinned", ALIAS), ("pinned", POLICY), ("followed", POLICY)]
        self._kinds = [kinds[i % len(kinds)][0] for i in range(count)]
        named = [target for _, target in kinds]
        details = {"logprobs": 0, "return_token_ids": True}
        self._bodies = [body | details for body in greedy(client, count, named)]
        self._right: dict[int, list[int]] = {}  # the right greedy answers
        self.replies: list[Reply] = []
        self.failed = 0
        self.different: Counter[str] = Counter()

    async def alone(self, when: str) -> None:
        """Send the greedy requests one after the other. The first time, their answers are remembered as the right
        ones.
        """
        for i, kind in enumerate(self._kinds):
            if kind == "greedy" and (reply := await self._send(i, [])):
                right = self._right.setdefault(i, reply.tokens)
                self.different[when] += right != reply.tokens

    async def beside(self, work: Awaitable[None]) -> tuple[list[float], float]:
        """Run all streams until `work` is done; return the seconds between tokens, and tokens per second."""
        gaps: list[float] = []
        began, before = perf_counter(), len(self.replies)
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(_until(work))
            for i in range(len(self._bodies)):
                tasks.create_task(self._stream(i, working.done, gaps))
        count = sum(len(reply.tokens) for reply in self.replies[before:])
        return gaps, count / (perf_counter() - began)

    async def _stream(self, i: int, is_over: Callable[[], bool], gaps: list[float]) -> None:
        while not is_over():
            reply = await self._send(i, gaps)
            if reply is not None:
                self.replies.append(reply)
                self.different["beside"] += self._right.get(i, reply.tokens) != reply.tokens

    async def _send(self, i: int, gaps: list[float]) -> Reply | None:
        kind, body = self._kinds[i], self._bodies[i]
        if kind != "greedy":
            body = body | {"temperature": 1.0, "seed": self._random.getrandbits(62)}
        if kind == "followed":
            body |= {"swap_policy": "inflight_keep", "prompt": tokens(self._random, WHOLE_PROMPT)}
        return await self.send(kind, body, i, gaps)

    async def send(self, kind: Kind, body: dict[str, Any], i: int, gaps: list[float]) -> Reply | None:
        """Send one request on the i-th connection; return None if it failed."""
        stream = await self._client.send(self._client.connection(i), body)
        reply = Reply.of(kind, body, stream)
        whole = len(reply.tokens) == self._client.load.max_tokens
        if (
            stream.problem is not None
            or not whole
            or not len(reply.logprobs) == len(reply.versions) == len(reply.tokens)
        ):
            print(f"failed: {stream.problem} {stream.error}, {len(reply.tokens)} tokens", file=sys.stderr, flush=True)
            self.failed += 1
            return None
        gaps += stream.gaps()
        return reply

    async def again(self, replies: Sequence[Reply]) -> None:
        """Ask for pinned answers again from the version that they name, while nothing is learned or published."""
        left = iter(replies)

        async def ask(i: int) -> None:
            for reply in left:
                body = reply.body | {"model": f"{POLICY}@{reply.versions[0]}"}
                now = await self.send("pinned", body, i, [])
                self.different["asked again"] += now is not None and now.tokens != reply.tokens

        await asyncio.gather(*(ask(i) for i in range(len(self._bodies))))


async def _until(work: Awaitable[None]) -> None:
    await work


class Teacher:
    """Updates of random completions, as small as the policy still notices, with every version kept as a checkpoint."""

    def __init__(self, url: str):
        self._url = url
        self._random = random.Random(0)
        self._alias = Connection.to(url)
        self._numbers = itertools.count(1)
        self.reports: list[dict[str, Any]] = []  # reports of published versions
        self.alias_ms: list[float] = []

    async def publish(self) -> None:
        """Post one update, whose version is served from then on, also under the alias."""
        report = await self._update({"checkpoint_name": f"published-{next(self._numbers)}"})
        if report["outcome"] != "published":
            raise BenchError(f"an update was {report['outcome']}: {report['reason']}")
        self.reports.append(report)
        began = perf_counter()
        arms = [{"adapter": f"{POLICY}@{report['version']}", "weight": 1}]
        status, answer = await self._alias.json("PUT", f"/v1/aliases/{ALIAS}", {"arms": arms})
        self.alias_ms.append((perf_counter() - began) * 1e3)
        if status >= 300:
            raise BenchError(f"the alias did not move: {status} {answer}")

    async def publish_times(self, count: int) -> None:
        """Publish `count` versions."""
        for _ in range(count):
            await self.publish()

    async def work(self, mode: str, publishes: int, seconds: float) -> None:
        """Publish `publishes` versions; in the other modes, work for `seconds`."""
        if mode == "publishes":
            await self.publish_times(publishes)
        elif mode == "idle":
            await asyncio.sleep(seconds)
        else:
            until = perf_counter() + seconds
            while perf_counter() < until:
                await self._update({"update_inference": False})

    async def _update(self, more: dict[str, Any]) -> dict[str, Any]:
        body = {"trajectories": trajectories(self._random, UPDATE_TOKENS, UPDATE_LENGTHS), "wait": True} | more
        job = await call(self._url, "POST", "/v1/training/update", body)
        if job["status"] != "succeeded":
            raise BenchError(f"an update failed: {job}")
        report: dict[str, Any] = job["report"]
        return report

    def forget(self) -> None:
        """Forget the reports so far."""
        self.reports, self.alias_ms = [], []


async def measure(
    load: Load, count: int, publishes: int, seconds: float, repeats: int
) -> tuple[dict[str, Any], list[Reply]]:
    """Run all rounds; return their figures and the replies."""
    client = await Client.open(load)
    teacher = Teacher(load.url)
    await teacher.publish_times(WARM_UP)
    streams = Streams(client, count, f"{POLICY}@{teacher.reports[-1]['version']}")
    await streams.alone("before")
    await streams.beside(teacher.publish_times(1))  # not counted, since steps are compiled now
    teacher.forget()
    rounds: list[dict[str, Any]] = []
    for repeat in range(repeats):
        share = publishes * (repeat + 1) // repeats - publishes * repeat // repeats
        for mode in MODES[:: 1 if repeat % 2 else -1]:
            gaps, speed = await streams.beside(teacher.work(mode, share, seconds))
            pauses = spread(gaps, 1e3) | {"max": round(max(gaps) * 1e3, 3)}
            rounds.append({"mode": mode, "repeat": repeat, "tokens_per_s": round(speed, 1), "inter_token_ms": pauses})
            print(f"round {repeat + 1}/{repeats}  {rounds[-1]}", file=sys.stderr, flush=True)
    await streams.alone("afterwards")
    replies = streams.replies
    await streams.again([r for r in replies if r.kind == "pinned"])
    client.close()
    several = [r for r in replies if len(set(r.versions)) > 1]
    return {
        "streams": count,
        "max_tokens": load.max_tokens,
        "update_tokens": UPDATE_TOKENS,
        "publishes": len(teacher.reports),
        "requests": dict(Counter(r.kind for r in replies)),
        "failed": streams.failed,
        "different": sum(streams.different.values()),
        "different_by": dict(streams.different),
        "mixed": sum(r.kind != "followed" or r.versions != sorted(r.versions) for r in several),
        "followed": {
            "with_several_versions": len(several),
            "changes": sum(len(set(r.versions)) - 1 for r in several),
        },
        "ready_ms": _times([r["ready_ms"] for r in teacher.reports]),
        "swap_ms": _times([r["swap_ms"] for r in teacher.reports]),
        "alias_over_http_ms": _times(teacher.alias_ms),
        "rounds": rounds,
        "modes": {mode: _median(rounds, mode) for mode in MODES},
    }, replies


def _times(ms: Sequence[float]) -> dict[str, float]:
    return spread(ms) | {"max": round(max(ms), 3)}


def _median(rounds: list[dict[str, Any]], mode: str) -> dict[str, float]:
    """Return medians over the rounds."""
    own = [r for r in rounds if r["mode"] == mode]
    found = {place: statistics.median(r["inter_token_ms"][place] for r in own) for place in ("p50", "p99", "max")}
    longest = max(r["inter_token_ms"]["max"] for r in own)
    return found | {"longest": longest, "tokens_per_s": statistics.median(r["tokens_per_s"] for r in own)}


def report(result: dict[str, Any]) -> None:
    """Show the results."""
    table = Table("beside", "tok/s", "p50", "p99", "longest pause, median of rounds", "longest")
    for mode, m in result["modes"].items():
        table.add_row(mode, *(f"{m[k]:,.1f}" for k in ("tokens_per_s", "p50", "p99", "max", "longest")))
    show(table)
    table = Table("ms", "p50", "p99", "max")
    for what in ("ready_ms", "swap_ms", "alias_over_http_ms"):
        table.add_row(what, *(f"{result[what][k]:.3f}" for k in ("p50", "p99", "max")))
    show(table)
    show(
        f"{result['publishes']} publishes, {result['contents']} contents of {result['versions']} versions; requests "
        f"{result['requests']}, {result['failed']} failed, {result['different']} different, {result['mixed']} mixed"
    )
    for kind, r in result["replay"].items():
        show(f"{kind}: {r['tokens']:,} tokens replayed, largest error {r['largest']:.1e}, {r['over']} over")
    show(f"controls: {result['controls']}")


if __name__ == "__main__":
    main()
