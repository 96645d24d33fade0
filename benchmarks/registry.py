"""Many adapters on few slots: a thousand registered, sixteen on the device, Zipf traffic, every answer checked.

    python benchmarks/registry.py --json-out benchmarks/results/registry.json

The same requests go to a server with few slots and to one that holds all adapters on the device, round by round in
turn. Every adapter is asked for once before, so that both have read all of them. Memory is reported per adapter, and
how much longer a server takes to start with ten thousand registered than with three.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table
from servers import Running, tandem

from mlx_tandem.cli.bench.client import BenchError, Client, run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.shapes import SHAPES, write_adapter, write_model
from mlx_tandem.cli.bench.stats import median
from mlx_tandem.cli.bench.validation import Validation
from mlx_tandem.cli.bench.workloads import Load, Workload, phases
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.outputs import argument, write_json


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="many registered adapters on few slots")
    parser.add_argument("--shape", default="0.13m")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-requests", type=int, default=256, help="of one round")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--validation-sample", type=int, help="check no more answers than this per server")
    parser.add_argument("--registered", type=int, default=10_000, help="for the time to start")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory(prefix="tandem-registry-") as scratch:
        model = write_model(Path(scratch) / args.shape, shape)
        root = Path(scratch) / "adapters"
        for i in range(args.adapters):
            write_adapter(root / f"a{i}", shape, rank=args.rank, seed=i + 1)
        options = ["--adapter-root", str(root), "--max-lora-rank", str(args.rank), "--max-cpu-lora-gb", "16"]
        with contextlib.ExitStack() as stack:
            servers = {
                name: stack.enter_context(tandem(*options, "--max-loras", str(slots)).started(model))
                for name, slots in (("few slots", args.slots), ("all resident", args.adapters))
            }
            load = Load(
                url="",
                modes=("zipf",),
                concurrency=(args.concurrency,),
                num_requests=args.num_requests,
                max_tokens=args.max_tokens,
                adapters=tuple(f"a{i}" for i in range(args.adapters)),
                zipf_exponent=args.zipf,
                validate=True,
            )
            result = run_loop(traffic(servers, load, args.repeats, args.validation_sample))
        result["start"] = start_times(model, root / "a0", Path(scratch), args.registered, args.repeats)
    result = describe() | {"shape": args.shape, "rank": args.rank, "slots": args.slots} | result
    if args.json_out:
        write_json(args.json_out, result)
    report(result, args.adapters)
    if result["different"]:
        fail("answers differ from their adapter alone")


async def traffic(servers: dict[str, Running], load: Load, repeats: int, sample: int | None) -> dict[str, Any]:
    """Send the same requests to all servers and return their figures."""
    clients: dict[str, tuple[Client, Workload, Validation]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, server in servers.items():
        client = await Client.open(replace(load, url=server.url))
        workload = phases(load, client.adapters)[0].workloads[0]
        clients[name] = client, workload, Validation(client)
        before, began = server.rss(), perf_counter()
        await touch(client, workload)
        seconds = perf_counter() - began
        await client.round(workload, load.concurrency[0], warm_up=True)
        found[name] = {"first_uses_per_s": round(len(client.adapters) / seconds, 1), "rounds": []}
        found[name] |= {"rss_before": before, "rss_after": server.rss()}
        progress(f"{name}: {len(client.adapters)} adapters read, {found[name]['first_uses_per_s']} per second")
    for repeat in range(repeats):
        for name in list(clients)[:: 1 if repeat % 2 else -1]:
            client, workload, validation = clients[name]
            done = await client.round(workload, load.concurrency[0])
            validation.note(done)
            found[name]["rounds"].append(done.figures())
            progress(f"round {repeat + 1}/{repeats}  {name}: {found[name]['rounds'][-1]['tokens_per_s']:,.0f} tok/s")
    for name, (client, _, validation) in clients.items():
        status, listed = await client.connection(0).json("GET", "/v1/adapters")
        if status != 200:
            raise BenchError(f"GET /v1/adapters: {status}")
        figures = {key: value for key, value in listed.items() if key != "adapters"}
        grown = (found[name]["rss_after"] - found[name]["rss_before"]) / max(1, figures["loaded"])
        found[name] |= {"registry": figures, "rss_per_adapter": round(grown), "median": median(found[name]["rounds"])}
        progress(f"{name}: asking again, one at a time")
        found[name]["validation"] = await validation.check(sample)
        client.close()
    few, every = (found[name]["rounds"] for name in servers)
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(few, every, strict=True)]
    return {
        "servers": found,
        "ratio": round(statistics.median(ratios), 3),
        "different": sum(server["validation"]["different"] for server in found.values()),
        "load": asdict(load) | {"adapters": len(load.adapters or ())},
    }


async def touch(client: Client, workload: Workload) -> None:
    """Ask every adapter for one token."""
    names = iter(client.adapters)

    async def worker(i: int) -> None:
        for name in names:
            body = client.body(workload) | {"model": name, "max_tokens": 1}
            stream = await client.send(client.connection(i), body)
            if stream.problem:
                raise BenchError(f"{name}: {stream.error}")

    await asyncio.gather(*(worker(i) for i in range(client.load.concurrency[0])))


def start_times(model: Path, template: Path, scratch: Path, registered: int, repeats: int) -> dict[str, Any]:
    """Return the seconds from the start of the process until it is ready, in turn. All folders hold the same files."""
    found: dict[str, list[float]] = {}
    for count in (3, registered):
        for i in range(count):
            folder = scratch / str(count) / f"a{i}"
            folder.mkdir(parents=True)
            for file in template.iterdir():
                os.link(file, folder / file.name)
    for repeat in range(repeats):
        for count in (3, registered)[:: 1 if repeat % 2 else -1]:
            with tandem("--adapter-root", str(scratch / str(count))).started(model) as server:
                found.setdefault(str(count), []).append(round(server.start_s, 2))
                progress(f"started with {count} registered in {server.start_s:.2f} s")
    few, many = (statistics.median(found[str(count)]) for count in (3, registered))
    return {"registered": registered, "seconds": found, "difference_s": round(many - few, 2)}


def report(result: dict[str, Any], adapters: int) -> None:
    """Show the results."""
    table = Table(title=f"{result['shape']}, {adapters} adapters of rank {result['rank']}, Zipf", title_style="")
    for column in (
        "server",
        "slots",
        "tok/s",
        "inter-token p99",
        "MB per adapter",
        "of process",
        "checked",
        "different",
    ):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, server in result["servers"].items():
        figures: dict[str, Any] = server["registry"]
        table.add_row(
            name,
            str(figures["slots"]),
            f"{server['median']['tokens_per_s']:,.0f}",
            f"{server['median']['inter_token_ms']['p99']:.1f} ms",
            f"{figures['loaded_bytes'] / max(1, figures['loaded']) / 1e6:.2f}",
            f"{server['rss_per_adapter'] / 1e6:.2f}",
            f"{figures['slot_bytes'] / max(1, figures['slots']) / 1e6:.2f}",
            f"{server['validation']['different']} of {server['validation']['checked']}",
        )
    show(table)
    start = result["start"]
    print(f"few slots / all resident: {result['ratio']:.2f}")
    print(f"{start['registered']:,} registered start {start['difference_s']:.2f} s later than 3")


def progress(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
