"""Compare the speed of this tree with another one; both run at the same time on one machine and take turns by
rounds.

    git worktree add /tmp/before 38e7c19
    python benchmarks/turns.py engine --before /tmp/before --shape 4m --batch 1,8,32
    python benchmarks/turns.py http --before /tmp/before --concurrency 1,16,32,64

`engine` runs `tandem bench engine` of each tree in a process of its own, which waits before every round until it is
its turn. `http` starts the server of each tree and measures both with the client of this tree. `ratio` is the median
over the rounds of this tree's figure divided by the other's in the neighbouring round. `ratio_of_best` compares the
best round of each tree: it says more where the speed of the host changes from round to round.

On a GPU, give `--blocks` and `--chunk-tokens`: the tree that starts second finds less free memory, and would otherwise
take a smaller pool and shorter chunks of prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from partial import Results, stop_cleanly

BEFORE, AFTER = "before", "after"
ENGINE_FIELDS = ("decode_tokens_per_s", "prefill_tokens_per_s")
HTTP_FIELDS = ("tokens_per_s", "ttft_ms")
HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the comparison."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--before", type=Path, required=True, help="folder of the other tree")
    common.add_argument("--repeats", type=int, default=5)
    common.add_argument("--max-tokens", type=int, default=64)
    common.add_argument("--adapters", type=int, default=0)
    common.add_argument("--json-out", type=Path)
    parser = argparse.ArgumentParser(description="this tree beside another one, in turn")
    kinds = parser.add_subparsers(dest="kind", required=True)
    engine = kinds.add_parser("engine", parents=[common])
    engine.add_argument("--shape", default="4m")
    engine.add_argument("--batch", default="1,8,32")
    engine.add_argument("--prompt-tokens", type=int, default=64)
    engine.add_argument("--blocks", type=int, help="of each tree's KV pool; by default as many as fit")
    engine.add_argument("--chunk-tokens", type=int, default=0, help="most prompt tokens of a step")
    engine.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    http = kinds.add_parser("http", parents=[common])
    http.add_argument("--concurrency", default="1,16,32,64")
    http.add_argument("--endpoint", choices=["chat", "completions"], default="chat")
    http.add_argument("--num-requests", type=int, help="of each round")
    args = parser.parse_args()
    if args.kind == "engine" and args.child:
        run_child(args)
        return
    stop_cleanly()
    trees = {BEFORE: args.before.resolve(), AFTER: HERE}
    results = Results(args.json_out, before_commit=commit(trees[BEFORE]), kind=args.kind)
    results.add()  # now, so that a file that cannot be written is reported before anything is measured
    compare = compare_engines if args.kind == "engine" else compare_servers
    found: list[dict[str, Any]] = []
    for found in compare(args, trees):
        results.add(results=found)
    for row in found:
        print(json.dumps({k: v for k, v in row.items() if k != "rounds"}), flush=True)
    results.finish()


def commit(tree: Path) -> str:
    """Return the commit of a tree."""
    asked = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


def environment(tree: Path) -> dict[str, str]:
    """Return the environment in which Python imports the package from `tree`, whatever the present folder is."""
    path = [str(tree), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def ratio(rounds: Mapping[str, list[dict[str, Any]]], field: str) -> float:
    """Return the median ratio of neighbouring rounds, greater than 1 where this tree is faster."""
    pairs = zip(rounds[AFTER], rounds[BEFORE], strict=True)
    ratios = [b[field] / a[field] if field.endswith("_ms") else a[field] / b[field] for a, b in pairs]
    return round(float(statistics.median(ratios)), 3)


def ratio_of_best(rounds: Mapping[str, list[dict[str, Any]]], field: str) -> float:
    """Return the ratio of each tree's best round, in which other work on the host took the least."""
    after, before = ([own[field] for own in rounds[name]] for name in (AFTER, BEFORE))
    found = min(before) / min(after) if field.endswith("_ms") else max(after) / max(before)
    return round(float(found), 3)


def ratios_of(rounds: Mapping[str, list[dict[str, Any]]], fields: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return both ratios of each field."""
    each = {"ratio": ratio, "ratio_of_best": ratio_of_best}
    return {name: {field: found(rounds, field) for field in fields} for name, found in each.items()}


class Child:
    """`tandem bench engine` of one tree in a process that measures one round whenever it is told to."""

    def __init__(self, tree: Path, args: argparse.Namespace):
        words = [sys.executable, __file__, "engine", "--child", "--before", str(tree), "--shape", args.shape]
        for name in ("batch", "prompt_tokens", "max_tokens", "adapters", "repeats", "blocks", "chunk_tokens"):
            if getattr(args, name) is not None:
                words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        self.results: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            words, env=environment(tree), cwd=tempfile.gettempdir(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait(self) -> bool:
        """Wait until the child rests before a round, and take its `results` so far; return whether it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith((b'{"rests"', b'{"results"')):
                self.results = json.loads(line)["results"]
                return line.startswith(b'{"results"')
        raise SystemExit("a tree's benchmark has ended without results")

    def go(self) -> None:
        """Let the child measure its next round."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()


def compare_engines(args: argparse.Namespace, trees: Mapping[str, Path]) -> Iterator[list[dict[str, Any]]]:
    """Yield the ratios of each batch and side so far, whenever both trees have run a round."""
    with ExitStack() as stack:
        children, ended = {}, {}
        for name, tree in trees.items():  # one after the other, since each chooses its kernels by timing them
            children[name] = stack.enter_context(Child(tree, args))
            ended[name] = children[name].wait()
        turn = 0
        while not all(ended.values()):
            for name in (BEFORE, AFTER)[:: -1 if turn % 2 else 1]:
                children[name].go()
                ended[name] = children[name].wait()
            turn += 1
            yield [
                {"shape": args.shape, "batch": before["batch"], "side": side}
                | ratios_of(rounds, ENGINE_FIELDS)
                | {"rounds": rounds}
                for before, after in zip(children[BEFORE].results, children[AFTER].results, strict=True)
                for side in before["rounds"]
                for rounds in [{BEFORE: before["rounds"][side], AFTER: after["rounds"][side]}]
            ]


def run_child(args: argparse.Namespace) -> None:
    """Measure with the package that this process imports; rest before every round until a line comes in."""
    from mlx_tandem.cli.bench.engine import Batch, EngineBench, EngineLoad, _make
    from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig

    batches = tuple(Batch(int(rows), args.prompt_tokens) for rows in args.batch.split(","))
    load = EngineLoad(
        batches, args.max_tokens, repeats=args.repeats, sampling="greedy", adapters=args.adapters, peer=False
    )
    kept: dict[str, Any] = {}

    def rest(repeat: int) -> None:
        print(json.dumps({"rests": repeat, "results": kept.get("results", [])}), flush=True)
        sys.stdin.readline()

    with tempfile.TemporaryDirectory(prefix="tandem-turns-") as scratch:
        model, drawn, adapters = _make(Path(scratch), args.shape, load)
        config = EngineConfig(
            model=ModelConfig(path=model, random_weights=drawn),
            cache=CacheConfig(num_blocks=args.blocks) if args.blocks else CacheConfig(),
            scheduler=SchedulerConfig(
                max_num_seqs=max(batch.rows for batch in batches), max_chunk_tokens=args.chunk_tokens
            ),
            lora=LoraConfig(max_loras=args.adapters, max_cpu_lora_gb=64.0),
        )
        EngineBench(config, load, adapters, kept.update, rest).measure()
    print(json.dumps({"results": kept["results"]}), flush=True)


def compare_servers(args: argparse.Namespace, trees: Mapping[str, Path]) -> Iterator[list[dict[str, Any]]]:
    """Yield the ratios of each concurrency so far."""
    from servers import Server
    from streams import with_adapters

    from mlx_tandem import demo

    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls = {}
        for name, tree in trees.items():
            words = (sys.executable, "-m", "mlx_tandem", "serve", "{model}", "--port", "{port}", *with_adapters())
            server = Server(name, words, preload_blas=False, environment=environment(tree))
            urls[name] = stack.enter_context(server.running(demo.MODEL_PATH))
        for concurrency in map(int, args.concurrency.split(",")):
            rounds = asyncio.run(take_turns(args, urls, concurrency))
            found.append(
                {"endpoint": args.endpoint, "concurrency": concurrency}
                | ratios_of(rounds, HTTP_FIELDS)
                | {"rounds": rounds}
            )
            yield found


async def take_turns(
    args: argparse.Namespace, urls: Mapping[str, str], concurrency: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the rounds of both servers."""
    from mlx_tandem.cli.bench.client import Client
    from mlx_tandem.cli.bench.workloads import Load, phases

    clients = {}
    for name, url in urls.items():
        load = Load(
            url,
            modes=("mixed" if args.adapters else "base",),
            concurrency=(concurrency,),
            num_requests=args.num_requests or max(16, 3 * concurrency),
            max_tokens=args.max_tokens,
            sampling="greedy",
            endpoint=args.endpoint,
        )
        clients[name] = await Client.open(load)
        (phase,) = phases(load, clients[name].adapters)
        await clients[name].round(phase.workloads[0], concurrency)  # not counted, since steps are compiled now
    rounds: dict[str, list[dict[str, Any]]] = {BEFORE: [], AFTER: []}
    for repeat in range(args.repeats):
        for name in (BEFORE, AFTER)[:: -1 if repeat % 2 else 1]:
            found = (await clients[name].round(phase.workloads[0], concurrency)).figures()
            if found["errors"]:
                raise SystemExit(f"{name}: {found['first_error']}")
            rounds[name].append({"tokens_per_s": found["tokens_per_s"], "ttft_ms": found["ttft_ms"]["p50"]})
    for client in clients.values():
        client.close()
    return rounds


if __name__ == "__main__":
    main()
