"""What the prefix cache is worth: first tokens cold, on a hit and from the drive, a conversation, and a group.

    python benchmarks/prefix.py --json-out benchmarks/results/prefix.json

Random weights in the shape of the demo model, the engine in this process. Cold prompts and hits alternate; the group is
served with the cache and without, in turn. For the drive the pool holds little more than one prompt, so that each has
left memory when it is asked for again; then the same prompts once more in an engine that was started after. The drive's
files are in the system's memory by then: the plain rate is that of reading the same files whole. What each part found
is in the file when it ends; `--parts` leaves some out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from partial import Results, stop_cleanly
from rich.table import Table

from mlx_tandem.api.engine import Engine
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.console import show
from mlx_tandem.cli.outputs import argument

POSITIONS = 16_384
GROUP = 16
PARTS = ("first_token", "conversation", "group", "drive")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="what the prefix cache is worth")
    parser.add_argument("--shape", default="4m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--blocks", type=int, default=0, help="of the KV pool; 0: as a server would have")
    parser.add_argument("--lengths", default="2048,4096", help="tokens of the prompts")
    parser.add_argument("--group-tokens", type=int, default=512, help="of the prompt that a group shares")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, shape=args.shape, dtype=args.dtype, repeats=args.repeats)
    with tempfile.TemporaryDirectory(prefix="tandem-prefix-") as scratch:
        shape = SHAPES[args.shape]
        random_weights = shape.parameters > 1e9  # too many to write
        model = write_model(Path(scratch) / args.shape, shape, positions=POSITIONS, weights=not random_weights)
        measure(model, args, results, random_weights=random_weights)
    results.finish()
    report(results.found, args)


def measure(model: Path, args: argparse.Namespace, results: Results, *, random_weights: bool) -> None:
    """Measure all parts that were asked for."""
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "random_weights": random_weights,
        "num_blocks": args.blocks,
        "max_loras": 0,
    }
    lengths = [int(n) for n in args.lengths.split(",")]
    parts = args.parts.split(",")
    began = perf_counter()
    with Engine(model, {}, **options) as engine:
        results.add(device=engine.info.device)
        print(f"ready after {perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        if "first_token" in parts:
            for length in lengths:
                rows = [first_tokens(engine, length, args.repeats)]
                results.add(first_token=results.found.get("first_token", []) + rows)
        if "conversation" in parts:
            results.add(conversation=talk(engine, args.turns))
        if "group" in parts:
            with Engine(model, {}, prefix_caching=False, **options) as without:
                results.add(group=rollouts(engine, without, args.group_tokens, args.repeats))
    if "drive" in parts and not random_weights:  # blocks of such a model are not kept
        for length in lengths:
            folder = model.parent / f"kv-{length}"
            rows = [from_drive(model, folder, length, args.repeats, dtype=args.dtype)]
            results.add(drive=results.found.get("drive", []) + rows)


def report(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Show the results."""
    table = Table(title=f"{args.shape}, median of {args.repeats}", title_style="")
    for column in ("", "without", "with", "times"):
        table.add_column(column, justify="right")
    drive = found.get("drive", [])
    for row in found.get("first_token", []):
        name = f"first token of {row['prompt_tokens']:,}"
        table.add_row(name, f"{row['cold_ms']:,.1f} ms", f"{row['hit_ms']:,.1f} ms", f"{row['ratio']:.1f}")
    for row in drive:
        for when, key in (("from the drive", "evicted"), ("after a restart", "restarted")):
            name = f"the same {when}, {row['prompt_tokens']:,}"
            ratio = f"{row[f'{key}_ratio']:.1f}"
            table.add_row(name, f"{row['cold_ms']:,.1f} ms", f"{row[f'{key}_ms']:,.1f} ms", ratio)
    if group := found.get("group"):
        name = f"{GROUP} rollouts of {group['prompt_tokens']:,}"
        table.add_row(name, f"{group['without_ms']:,.0f} ms", f"{group['with_ms']:,.0f} ms", f"{group['ratio']:.1f}")
    show(table)
    for row in drive:
        print(f"reloaded at {row['reload_gb_per_s']:.2f} GB/s; read as plain files: {row['plain_gb_per_s']:.2f} GB/s")
    if talked := found.get("conversation"):
        share = talked["cached_share"]
        print(f"{args.turns} turns: {share:.1%} of the prompts' tokens were there from the second on")


def first_tokens(engine: Engine, length: int, repeats: int) -> dict[str, Any]:
    """Return the times of each prompt's first token, cold and on a hit; the first prompt compiles and is not
    counted.
    """
    rounds = []
    for repeat in range(repeats + 1):
        prompt = _tokens(length, repeat)
        cold, hit = (_first(engine, prompt) for _ in range(2))
        rounds.append({"cold_ms": round(cold, 2), "hit_ms": round(hit, 2)})
    rounds = rounds[1:]
    cold, hit = (statistics.median(r[key] for r in rounds) for key in ("cold_ms", "hit_ms"))
    ratio = round(cold / hit, 2)
    return {"prompt_tokens": length, "cold_ms": cold, "hit_ms": hit, "ratio": ratio, "rounds": rounds}


def from_drive(model: Path, folder: Path, length: int, repeats: int, **options: Any) -> dict[str, Any]:
    """Return the times of each prompt cold, and after another has taken its place in memory; the first one compiles."""
    blocks = 1 + (length // 16 + 2) * 5 // 4
    options |= {"ssd_cache_dir": str(folder), "num_blocks": blocks, "max_model_len": length + 16}
    prompts = [_tokens(length, 5_000 + i) for i in range(repeats + 2)]
    rounds: list[dict[str, float]] = []
    with Engine(model, {}, **options) as engine:
        _opened(engine)
        for before, prompt in pairwise(prompts):
            cold, evicted = _timed(engine, prompt), _timed(engine, before)
            rounds.append({"cold_ms": cold[0], "evicted_ms": evicted[0], "evicted_cached_tokens": evicted[1]})
    with Engine(model, {}, **options) as engine:
        _opened(engine)
        for row, prompt in zip(rounds, prompts, strict=False):
            row["restarted_ms"], row["restarted_cached_tokens"] = _timed(engine, prompt)
        while (disk := engine.stats.disk) is None or not disk.reload_bytes:
            sleep(0.1)
    rounds = rounds[1:]
    medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    return {
        "prompt_tokens": length,
        **medians,
        "evicted_ratio": round(medians["cold_ms"] / medians["evicted_ms"], 2),
        "restarted_ratio": round(medians["cold_ms"] / medians["restarted_ms"], 2),
        "reload_gb_per_s": round(disk.reload_bytes / disk.reload_seconds / 1e9, 3),
        "plain_gb_per_s": _plain_rate(folder),
        "rounds": rounds,
    }


def _opened(engine: Engine) -> None:
    while (disk := engine.stats.disk) is None or disk.scanning:
        sleep(0.05)


def _timed(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Return the milliseconds to the first token, and how many of the prompt's tokens were cached."""
    started = perf_counter()
    done = engine.generate(prompt, max_tokens=1)
    return round((perf_counter() - started) * 1e3, 2), done.cached_tokens


def _plain_rate(folder: Path) -> float:
    """Return the GB/s at which the segments are read whole, the best of three times."""
    rates = []
    for _ in range(3):
        started = perf_counter()
        size = sum(len(path.read_bytes()) for path in folder.glob("segment-*"))
        rates.append(size / (perf_counter() - started) / 1e9)
    return round(max(rates), 3)


def talk(engine: Engine, turns: int) -> dict[str, Any]:
    """Run a conversation like an agent's: each prompt is the one before, its answer, and the result of a tool."""
    prompt = _tokens(2_000, 1_000)
    rows: list[dict[str, int]] = []
    for turn in range(turns):
        done = engine.generate(prompt, max_tokens=60, ignore_eos=True, seed=turn)
        rows.append({"prompt_tokens": done.prompt_tokens, "cached_tokens": done.cached_tokens})
        prompt = [*prompt, *done.token_ids, *_tokens(100, 2_000 + turn)]
    later = rows[1:]
    share = sum(r["cached_tokens"] for r in later) / max(sum(r["prompt_tokens"] for r in later), 1)
    # The tool's result is new in each turn, so this is the largest share that can be cached.
    new = 101 * len(later) / max(sum(r["prompt_tokens"] for r in later), 1)
    return {"cached_share": round(share, 4), "possible_share": round(1 - new, 4), "turns": rows}


def rollouts(engine: Engine, without: Engine, length: int, repeats: int) -> dict[str, Any]:
    """Return the time until requests with one prompt, sent together, have their answers."""
    rounds = []
    for repeat in range(repeats + 1):
        prompts = [_tokens(length, 3_000 + repeat)] * GROUP
        row: dict[str, float] = {}
        for name, one in (
            (("with", engine), ("without", without))
            if repeat % 2
            else (
                ("without", without),
                ("with", engine),
            )
        ):
            started = perf_counter()
            done = one.generate(prompts, max_tokens=32, ignore_eos=True)
            row[f"{name}_ms"] = round((perf_counter() - started) * 1e3, 1)
            row[f"{name}_computed_tokens"] = sum(d.prompt_tokens - d.cached_tokens for d in done)
        rounds.append(row)
    rounds = rounds[1:]
    medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    ratio = round(medians["without_ms"] / medians["with_ms"], 2)
    return {"prompt_tokens": length, "requests": GROUP, **medians, "ratio": ratio, "rounds": rounds}


def _first(engine: Engine, prompt: list[int]) -> float:
    started = perf_counter()
    engine.generate(prompt, max_tokens=1)
    return (perf_counter() - started) * 1e3


def _tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(count)]


if __name__ == "__main__":
    main()
