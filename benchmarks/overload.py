"""What happens when ten times as many requests come as the server can answer?

    python benchmarks/overload.py --json-out benchmarks/results/overload.json

The peak is found first: a closed loop at rising numbers of clients, up to as many as are let in. Then requests come at
ten times the rate that was answered at the peak, whatever the server says. Reported are statuses, how quickly refusals
come, the tokens of answered requests against the peak before and after, memory, and whether a `Retry-After` is true:
one who was refused and waits as long as he was told is let in, if the others stop coming.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from servers import Running, tandem

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import BenchError, Client, run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.workloads import Load, Workload, phases
from mlx_tandem.cli.console import fail
from mlx_tandem.cli.outputs import argument, write_json

FACTOR = 10
RSS_EVERY = 2.0  # seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="a server that is offered ten times its load")
    parser.add_argument("--model", type=Path, default=demo.MODEL_PATH)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--peak-seconds", type=float, default=10.0, help="at each number of clients")
    parser.add_argument("--batch", type=int, default=32, help="sequences that run at once")
    parser.add_argument("--queue", type=int, default=32, help="requests that may wait")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--promises", type=int, default=10, help="Retry-After headers that are put to the test")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    options = ("--max-num-seqs", str(args.batch), "--max-queue-size", str(args.queue))
    with tandem(*options).started(args.model) as server:
        load = Load(server.url, prompt_tokens=args.prompt_tokens, max_tokens=args.max_tokens)
        result = run_loop(
            measure(server, load, args.batch, args.batch + args.queue, args.peak_seconds, args.seconds, args.promises)
        )
    if args.json_out:
        write_json(args.json_out, describe() | {"batch": args.batch, "queue": args.queue} | result)
    report(result)
    if result["overload"]["errors"]:
        fail(f"{result['overload']['errors']} requests failed: {result['overload']['first_error']}")


async def measure(
    server: Running, load: Load, batch: int, capacity: int, peak_seconds: float, seconds: float, promises: int
) -> dict[str, Any]:
    """Return the figures of the peak and of the overload."""
    client = await Client.open(load)
    (workload,) = phases(replace(load, concurrency=(1,)), [])[0].workloads
    client.load = replace(load, seconds=peak_seconds)
    levels = sorted({max(1, batch // 2), batch, capacity})
    peaks = {}
    for level in levels:
        await client.round(workload, level, warm_up=True)
        peaks[level] = (await client.round(workload, level)).figures()
        progress(f"{level} clients: {peaks[level]['tokens_per_s']:,.0f} tok/s")
    best = max(levels, key=lambda level: peaks[level]["tokens_per_s"])
    admitted = peaks[best]["requests"] / peaks[best]["wall_s"]

    client.load = replace(load, seconds=seconds, rate=FACTOR * admitted)
    rss: list[tuple[float, int]] = []
    watching = asyncio.create_task(watch(server, rss))
    done = await client.round(workload, 4 * capacity)
    watching.cancel()
    overload = done.figures() | {"statuses": Counter(s.stream.problem or "200" for s in done.sent)}
    progress(f"overload: {overload['tokens_per_s']:,.0f} tok/s, {dict(overload['statuses'])}")

    client.load = replace(load, seconds=peak_seconds)
    after = (await client.round(workload, best)).figures()
    progress(f"{best} clients again: {after['tokens_per_s']:,.0f} tok/s")
    kept = [await promise(client, workload, capacity) for _ in range(promises)]
    client.close()
    peak = statistics.fmean([peaks[best]["tokens_per_s"], after["tokens_per_s"]])
    return {
        "clients_at_peak": best,
        "admitted_per_s": round(admitted, 2),
        "offered_per_s": round(FACTOR * admitted, 2),
        "peaks": peaks,
        "peak_after": after,
        "overload": overload,
        "goodput_ratio": round(overload["tokens_per_s"] / peak, 3),
        "rss": [(round(at, 1), size) for at, size in rss],
        "retry_after": {"kept": sum(k["kept"] for k in kept), "of": len(kept), "promises": kept},
    }


async def watch(server: Running, samples: list[tuple[float, int]]) -> None:
    """Record the memory of the server until cancelled."""
    start = perf_counter()
    while True:
        samples.append((perf_counter() - start, await asyncio.to_thread(server.rss)))
        await asyncio.sleep(RSS_EVERY)


async def promise(client: Client, workload: Workload, capacity: int) -> dict[str, Any]:
    """Fill the server, be refused, let nobody else come, wait as told, and come again; return how often that was
    enough.
    """
    full = True
    ended: list[float] = []

    async def other(i: int) -> None:
        while full:
            stream = await client.send(client.connection(i), client.body(workload))
            ended.append(perf_counter())
            if stream.refused:  # the request under test took the place
                return

    others = [asyncio.create_task(other(i)) for i in range(capacity)]
    while len(ended) < capacity:
        await asyncio.sleep(0.01)
    asker = client.connection(capacity)
    deadline = perf_counter() + 60
    while not (refused := await client.send(asker, client.body(workload))).refused:
        if perf_counter() > deadline:
            raise BenchError("a full server refused nothing for a minute")
    full = False
    began = perf_counter()
    wait = float(refused.retry_after or 0)
    await asyncio.sleep(wait)
    again = await client.send(asker, client.body(workload))
    await asyncio.gather(*others)
    free = min((at - began for at in ended if at > began), default=0.0)
    return {"retry_after_s": wait, "kept": again.problem is None, "first_place_free_after_s": round(free, 3)}


def report(result: dict[str, Any]) -> None:
    """Show the results."""
    overload, told = result["overload"], result["retry_after"]
    print(f"peak: {result['clients_at_peak']} clients, {result['admitted_per_s']:,.1f} requests/s answered")
    print(f"overload: {result['offered_per_s']:,.1f} requests/s offered, statuses {dict(overload['statuses'])}")
    if refusals := overload["refusals"]:
        times = refusals["latency_ms"]
        print(
            f"refusals: p50 {times['p50']:.1f} ms, p99 {times['p99']:.1f} ms, Retry-After {refusals['retry_after_s']},"
            f" without one {refusals['without_retry_after']}"
        )
    print(f"goodput / peak: {result['goodput_ratio']:.3f}; not sent by the client: {overload['held_back']}")
    sizes = [size / 1e6 for _, size in result["rss"]]
    print(f"memory: {sizes[0]:,.0f} MB at first, {max(sizes):,.0f} at most, {sizes[-1]:,.0f} at last")
    print(f"Retry-After kept: {told['kept']} of {told['of']}")


def progress(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
