"""Do running streams, the front's memory and its health notice a load of long texts to tokenise?

    python benchmarks/tokenize_load.py --json-out benchmarks/results/tokenize_load.json

Greedy streams of the built-in model and its adapters run undisturbed, and again while clients ask for the token ids and
pieces of a megabyte of words each, one request after the other. The inter-token times of the two runs are compared
round by round; `/livez` is asked all the while. The texts come from a process of their own with the lowest priority,
since it is the server that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from servers import Running, tandem
from streams import greedy, with_adapters

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import Client, run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.stats import spread
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.bench.workloads import Load
from mlx_tandem.cli.console import fail
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import Connection

WORDS = "the quick brown fox jumps over a lazy dog and 12 others, while Sphinx of black quartz judges my vow.".split()
PROBE_EVERY = 0.05  # seconds
LOOK_EVERY = 0.5  # seconds, at memory


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="running streams beside long texts to tokenise")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=768)
    parser.add_argument("--clients", type=int, default=24, help="that ask for token ids")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="of each text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json-out", type=argument)
    parser.add_argument(
        "--load-on", help=argparse.SUPPRESS
    )  # the server that this process is to load, until it is ended
    args = parser.parse_args()
    if args.load_on:
        os.nice(19)
        run_loop(put_load(args.load_on, args.clients, args.bytes))
        return
    with tandem(*with_adapters(), "--max-num-seqs", str(args.streams)).started(demo.MODEL_PATH) as server:
        load = Load(server.url, prompt_tokens=32, max_tokens=args.max_tokens)
        result = run_loop(measure(server, load, args.streams, args.clients, args.bytes, args.repeats))
    if args.json_out:
        write_json(args.json_out, describe() | result)
    report(result)
    if result["failed"] or set(result["statuses"]) - {"200", "429", "503"}:
        fail("streams or texts failed")


async def put_load(url: str, clients: int, size: int) -> None:
    """Ask for ever, and write the status and milliseconds of each request on a line."""
    text = " ".join(random.Random(0).choices(WORDS, k=size // 4))[:size]
    body = {"prompt": text, "return_token_strs": True}

    async def ask() -> None:
        connection = Connection.to(url)
        while True:
            began = perf_counter()
            status = await connection.request("POST", "/tokenize", body)
            print(json.dumps([status, round((perf_counter() - began) * 1e3)]), flush=True)

    await asyncio.gather(*(ask() for _ in range(clients)))


async def measure(server: Running, load: Load, streams: int, clients: int, size: int, repeats: int) -> dict[str, Any]:
    """Return the figures of undisturbed and disturbed streams."""
    client = await Client.open(load)
    bodies = greedy(client, streams)
    watch = Watch(server)

    async def run() -> list[Stream]:
        return await asyncio.gather(*(client.send(client.connection(i), body) for i, body in enumerate(bodies)))

    await run()  # not counted, since steps are compiled now
    memory_before = watch.memory()
    rounds: list[dict[str, float]] = []
    late: dict[str, list[float]] = {"undisturbed": [], "disturbed": []}
    texts: list[tuple[int, float]] = []
    failed = 0
    for repeat in range(repeats):
        p99: dict[str, float] = {}
        for name in ("undisturbed", "disturbed")[:: 1 if repeat % 2 else -1]:
            async with watch.probing(late[name]):
                if name == "undisturbed":
                    done = await run()
                else:
                    async with texts_beside(server.url, clients, size, texts):
                        done = await run()
            good = [s for s in done if s.problem is None]
            failed += len(done) - len(good)
            p99[name] = spread([gap for s in good for gap in s.gaps()], 1e3)["p99"]
        # Few short streams may get all their tokens at once: gaps below a microsecond count as one.
        rounds.append(p99 | {"ratio": round(p99["disturbed"] / max(p99["undisturbed"], 1e-3), 3)})
        progress(f"round {repeat + 1}/{repeats}  inter-token p99 {p99}  ratio {rounds[-1]['ratio']:.3f}")
    client.close()
    return {
        "streams": streams,
        "clients": clients,
        "bytes": size,
        "failed": failed,
        "rounds": rounds,
        "p99_ratio": statistics.median(r["ratio"] for r in rounds),
        "livez_ms": {name: spread(ms) | {"max": round(max(ms), 1)} for name, ms in late.items()},
        "statuses": Counter(str(status) for status, _ in texts),
        "text_ms": spread([ms for status, ms in texts if status == 200]),
        "memory_mb": {"before": memory_before, "peak": watch.peak},
    }


@asynccontextmanager
async def texts_beside(url: str, clients: int, size: int, texts: list[tuple[int, float]]) -> AsyncIterator[None]:
    """Have a process put load on the server from its first answer on; add its answers to `texts`."""
    words = [sys.executable, __file__, "--load-on", url, "--clients", str(clients), "--bytes", str(size)]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        lines = [await process.stdout.readline()]
        yield
    finally:
        process.kill()
        await process.wait()
    lines += (await process.stdout.read()).splitlines()
    texts += [tuple(json.loads(line)) for line in lines if line]


class Watch:
    """Watches the server's health and memory."""

    def __init__(self, server: Running):
        self._server = server
        self._connection = Connection.to(server.url)
        self.peak: dict[str, float] = {}
        """Megabytes of the front, of the processes beside it for templates and texts, and of both together."""

    def memory(self) -> dict[str, float]:
        """Return the memory of the front and of the processes for texts, in MB."""
        listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,rss=,args="], capture_output=True, text=True, check=True)
        front = beside = 0.0
        for line in listed.stdout.splitlines():
            pid, parent, rss, command = line.split(None, 3)
            if int(pid) == self._server.pid:
                front = int(rss) / 1e3
            elif int(parent) == self._server.pid and re.search(r"mlx_tandem\.generation\.", command):
                beside += int(rss) / 1e3
        now = {"front": round(front, 1), "beside": round(beside, 1), "together": round(front + beside, 1)}
        self.peak = {name: max(size, self.peak.get(name, 0.0)) for name, size in now.items()}
        return now

    @asynccontextmanager
    async def probing(self, late: list[float]) -> AsyncIterator[None]:
        """Ask for `/livez` all the while, and add the milliseconds of each answer to `late`."""
        tasks = [asyncio.create_task(self._probe(late)), asyncio.create_task(self._look())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, late: list[float]) -> None:
        while True:
            began = perf_counter()
            await self._connection.request("GET", "/livez")
            late.append((perf_counter() - began) * 1e3)
            await asyncio.sleep(PROBE_EVERY)

    async def _look(self) -> None:
        while True:
            await asyncio.to_thread(self.memory)
            await asyncio.sleep(LOOK_EVERY)


def report(result: dict[str, Any]) -> None:
    """Show the results."""
    print(f"texts: {dict(result['statuses'])}, {result['text_ms']['p50']:,.0f} ms each")
    print(f"inter-token p99, disturbed / undisturbed: {result['p99_ratio']:.3f} (median of {len(result['rounds'])})")
    for name, ms in result["livez_ms"].items():
        print(f"/livez {name}: p50 {ms['p50']:.1f} ms, p99 {ms['p99']:.1f} ms, at most {ms['max']:.1f} ms")
    print(f"memory in MB: {result['memory_mb']}")


def progress(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
