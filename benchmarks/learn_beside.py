"""What do running streams notice of learning beside them, and does each side get its share of the device?

    python benchmarks/learn_beside.py --json-out benchmarks/results/learn_beside.json
    python benchmarks/learn_beside.py --shape qwen3-8b --dtype bfloat16

Greedy streams of the built-in model and its adapters run for a while: with nothing beside them; with updates of about
2,048 tokens posted without a pause, which the duty cycle holds to 30 % of the device; and with 10 and 30 such updates a
minute. The modes take turns round by round. Texts must be the same in all of them; every update publishes a version.
On a device so fast that between two updates of that size there is mostly nothing to learn, `--full-tokens` makes those
of 70:30 larger.

With `--shape`, a random model is served, its streams are of the base and of the adapter that learns, and texts are not
compared: they are another version's, and in less than float32 the number of rows picks the kernels. Every round is in
the file when it ends; `--modes`, `--seconds` and `--repeats` bound how long that takes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml
from partial import Results, stop_cleanly
from rich.table import Table
from servers import tandem
from streams import TARGETS, call, greedy, trajectories, with_adapters

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import Client, run_loop
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.bench.stats import spread
from mlx_tandem.cli.bench.workloads import Load
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.outputs import argument

WINDOW_SECONDS = 10.0
MODES: dict[str, float | None] = {"idle": None, "70:30": 0.0, "10 a minute": 6.0, "30 a minute": 2.0}
"""Seconds from the start of one update to the start of the next; 0: without a pause; None: no updates."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="streams beside learning")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each mode in a round")
    parser.add_argument("--warm-up-seconds", type=float, default=3.0, help="the same before the first round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES), help="idle is always one of them")
    parser.add_argument("--update-tokens", type=int, default=2048)
    parser.add_argument("--full-tokens", type=int, help="of an update of 70:30; else the same")
    parser.add_argument("--shape", help="a random model of this shape instead of the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    if unknown := set(args.modes.split(",")) - set(MODES):
        parser.error(f"--modes: {', '.join(unknown)} is none of {', '.join(MODES)}")
    stop_cleanly()
    sizes = {"update_tokens": args.update_tokens, "full_tokens": args.full_tokens or args.update_tokens}
    results = Results(args.json_out, shape=args.shape or "demo", streams=args.streams, **sizes)
    with tempfile.TemporaryDirectory(prefix="tandem-beside-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        tree = {
            "rl_training": {"enabled": True, "learning_rate": 1e-6, "trajectory_buffer_size": 1000},
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints", "interval": 1000},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        model, options, targets = demo.MODEL_PATH, with_adapters(), TARGETS
        if args.shape:
            model = write_model(Path(scratch) / args.shape, SHAPES[args.shape], weights=False)
            options, targets = ["--random-weights", "--dtype", args.dtype], (None, "policy")
        with tandem("--config", str(settings), *options).started(model) as server:
            results.add(device=server.device())
            _say(f"ready after {server.start_s:.1f} s")
            load = Load(server.url, prompt_tokens=32, max_tokens=args.max_tokens, validate=not args.shape)
            run_loop(measure(load, targets, args, results))
    results.finish()
    result = results.found
    report(result)
    if result["failed"] or result["different"]:
        fail("running streams failed or changed")


async def measure(load: Load, targets: Sequence[str | None], args: argparse.Namespace, results: Results) -> None:
    """Run all rounds."""
    streams, repeats = args.streams, args.repeats
    modes = [mode for mode in MODES if mode in {"idle", *args.modes.split(",")}]
    client = await Client.open(load)
    learner = Updates(load.url)
    began = perf_counter()
    await learner.post(0.0, began + 0.1, args.update_tokens)  # the adapter that learns has a version from here on
    _say(f"first update after {perf_counter() - began:.1f} s")
    bodies = greedy(client, streams, targets)
    want: dict[int, Any] = {}
    bad = {"failed": 0, "different": 0}

    async def stream(i: int, until: float, gaps: list[float]) -> int:
        """Send one client's requests one after the other; return its tokens."""
        tokens = 0
        while perf_counter() < until:
            done = await client.send(client.connection(i), bodies[i])
            bad["failed"] += done.problem is not None
            if done.problem is None:
                if load.validate:
                    bad["different"] += want.setdefault(i, done.answer()) != done.answer()
                gaps += done.gaps()
                tokens += done.tokens
        return tokens

    rounds: list[dict[str, Any]] = []
    for repeat in range(-1, repeats):  # the first round, in which steps are compiled, is not counted
        for mode in modes[:: -1 if repeat % 2 else 1]:
            gaps: list[float] = []
            began = perf_counter()
            until = began + (args.seconds if repeat >= 0 else args.warm_up_seconds)
            size = results.found["update_tokens" if MODES[mode] else "full_tokens"]
            beside = asyncio.create_task(learner.post(MODES[mode], until, size))
            tokens = sum(await asyncio.gather(*(stream(i, until, gaps) for i in range(streams))))
            took = perf_counter() - began
            seconds, shares = await beside
            if repeat < 0:
                _say(f"warm-up  {mode}  {tokens} tokens, {len(seconds)} updates in {took:.1f} s")
                continue
            inter = spread(gaps, 1e3)
            rounds.append(
                {
                    "mode": mode,
                    "repeat": repeat,
                    "tokens_per_s": round(tokens / took, 1),
                    "inter_token_ms": inter,
                    "updates_per_minute": round(60 * len(seconds) / took, 1),
                    "update_s": round(statistics.median(seconds), 3) if seconds else None,
                    "training_share": shares,
                }
            )
            _say(f"round {repeat + 1}  {rounds[-1]}")
            measured = {mode: _median(rounds, mode) for mode in modes if _has(rounds, mode)}
            results.add(rounds=rounds, modes=measured, published=(await learner.status())["publishes"], **bad)
    client.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _has(rounds: list[dict[str, Any]], mode: str) -> bool:
    """Return whether a round of the mode has an idle round beside it."""
    idle = {r["repeat"] for r in rounds if r["mode"] == "idle"}
    return any(r["mode"] == mode and r["repeat"] in idle for r in rounds)


def _median(rounds: list[dict[str, Any]], mode: str) -> dict[str, float]:
    """Return medians over the rounds; ratios are to the idle mode of the same round."""
    idle = {r["repeat"]: r for r in rounds if r["mode"] == "idle"}
    own = [r for r in rounds if r["mode"] == mode and r["repeat"] in idle]

    def ratio(place: str) -> float:
        pairs = [(r["inter_token_ms"][place], idle[r["repeat"]]["inter_token_ms"][place]) for r in own]
        return float(round(statistics.median(a / max(b, 1e-3) for a, b in pairs), 3))

    shares = [s for r in own for s in r["training_share"]]
    return {
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in own),
        "of_idle": round(statistics.median(r["tokens_per_s"] / idle[r["repeat"]]["tokens_per_s"] for r in own), 3),
        "p50_of_idle": ratio("p50"),
        "p99_of_idle": ratio("p99"),
        "updates_per_minute": statistics.median(r["updates_per_minute"] for r in own),
        "training_share_lowest": min(shares, default=0.0),
        "training_share_highest": max(shares, default=0.0),
    }


class Updates:
    """Posts updates, and reads what share of the device they had."""

    def __init__(self, url: str):
        self._url = url
        self._random = random.Random(0)

    async def post(self, every: float | None, until: float, tokens: int) -> tuple[list[float], list[float]]:
        """Post updates of `tokens` tokens until a time; return the seconds of each, and learning's share in each
        window.
        """
        watching = asyncio.create_task(self._watch(until))
        seconds = []
        due = perf_counter()
        while every is not None and perf_counter() < until:
            body = {"trajectories": trajectories(self._random, tokens), "wait": True}
            asked = perf_counter()
            await call(self._url, "POST", "/v1/training/update", body)
            seconds.append(perf_counter() - asked)
            due += every
            await asyncio.sleep(max(min(due, until) - perf_counter(), 0.0))
        return seconds, await watching

    async def status(self) -> Any:
        """Return the server's status of training."""
        return await call(self._url, "GET", "/v1/training/status")

    async def _watch(self, until: float) -> list[float]:
        shares = []
        before = await self.status()
        while (left := until - perf_counter()) > 0:
            await asyncio.sleep(min(WINDOW_SECONDS, left))
            now = await self.status()
            serving, training = (now[k] - before[k] for k in ("serving_ms", "training_ms"))
            if left >= WINDOW_SECONDS and serving + training > 0:
                shares.append(round(training / (serving + training), 4))
            before = now
        return shares


def report(result: dict[str, Any]) -> None:
    """Show the results."""
    table = Table("mode", "tok/s", "of idle", "p50 of idle", "p99 of idle", "updates/min", "training's share")
    for mode, m in result["modes"].items():
        share = f"{m['training_share_lowest']:.3f} … {m['training_share_highest']:.3f}"
        table.add_row(
            mode,
            f"{m['tokens_per_s']:,.0f}",
            *(f"{m[k]:.2f}" for k in ("of_idle", "p50_of_idle", "p99_of_idle")),
            f"{m['updates_per_minute']:.1f}",
            share,
        )
    show(table)
    show(f"{result['published']} versions published; {result['failed']} failed, {result['different']} different")


if __name__ == "__main__":
    main()
