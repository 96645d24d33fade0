"""Do running streams notice that adapters are loaded, removed and swapped beside them?

    python benchmarks/hot_swap.py --json-out benchmarks/results/hot_swap.json

Greedy streams of the built-in model and its adapters run undisturbed, and again while a hundred other adapters are
loaded and unloaded and an alias is pointed from one adapter to another and back. The token ids must be the same; the
inter-token times of the two runs are compared round by round, who begins changing.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table
from safetensors.numpy import load_file, save_file
from servers import tandem
from streams import greedy, with_adapters

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import BenchError, Client, run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.stats import spread
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.bench.workloads import Load
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import Connection

ALIAS = "live"
LOADED_AT_ONCE = 8  # swapped adapters that are loaded at once


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="running streams beside adapters that come and go")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=100, help="that are loaded and unloaded in each round")
    parser.add_argument("--max-tokens", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-hot-") as scratch:
        root = Path(scratch)
        make_adapters(root, args.adapters)
        options = [*with_adapters(), "--adapter-root", scratch, "--max-num-seqs", str(args.streams)]
        with tandem(*options).running(demo.MODEL_PATH) as url:
            load = Load(url, prompt_tokens=32, max_tokens=args.max_tokens, validate=True)
            result = run_loop(measure(load, root, args.streams, args.adapters, args.repeats))
    if args.json_out:
        write_json(args.json_out, describe() | result)
    report(result)
    if result["failed"] or result["different"]:
        fail("running streams failed or changed")


def make_adapters(root: Path, number: int) -> None:
    """Write `number` different adapters, so that none is known already when it is loaded."""
    template = demo.ADAPTER_PATHS["shout"]
    tensors = load_file(template / "adapters.safetensors")
    for i in range(number):
        folder = root / f"hot{i}"
        folder.mkdir()
        shutil.copy(template / "adapter_config.json", folder)
        save_file({name: t * (1 + 1e-3 * (i + 1)) for name, t in tensors.items()}, folder / "adapters.safetensors")


async def measure(load: Load, root: Path, streams: int, adapters: int, repeats: int) -> dict[str, Any]:
    """Return the figures of undisturbed and disturbed streams."""
    client = await Client.open(load)
    bodies = greedy(client, streams)

    async def run() -> list[Stream]:
        return await asyncio.gather(*(client.send(client.connection(i), body) for i, body in enumerate(bodies)))

    control = Control(load.url, root, adapters)
    want = [stream.answer() for stream in await run()]  # not counted, since steps are compiled now
    began = perf_counter()
    await run()
    control.interval = 0.9 * (perf_counter() - began) / adapters
    await control.churn(None)  # at full speed, and not counted either
    control.forget()
    rounds: list[dict[str, float]] = []
    failed = different = 0
    for repeat in range(repeats):
        p99: dict[str, float] = {}
        for name in ("undisturbed", "disturbed")[:: 1 if repeat % 2 else -1]:
            if name == "undisturbed":
                done = await run()
            else:
                running = asyncio.ensure_future(run())
                await control.churn(running)
                done = await running
            good = [s for s in done if s.problem is None]
            failed += len(done) - len(good)
            different += sum(s.problem is None and s.answer() != w for s, w in zip(done, want, strict=True))
            p99[name] = spread([gap for s in good for gap in s.gaps()], 1e3)["p99"]
        rounds.append(p99 | {"ratio": round(p99["disturbed"] / p99["undisturbed"], 3)})
        progress(f"round {repeat + 1}/{repeats}  inter-token p99 {p99}  ratio {rounds[-1]['ratio']:.3f}")
    client.close()
    return {
        "streams": streams,
        "adapters": adapters,
        "max_tokens": load.max_tokens,
        "compared": "text and token ids" if client.token_ids else "text",
        "failed": failed,
        "different": different,
        "rounds": rounds,
        "p99_ratio": statistics.median(r["ratio"] for r in rounds),
        "loads_beside_streams": control.beside,
        "changes": {kind: {"count": len(ms), "ms": spread(ms), "max": max(ms)} for kind, ms in control.times.items()},
    }


class Control:
    """Loads, unloads and swaps over one connection, and how long each took in milliseconds."""

    def __init__(self, url: str, root: Path, adapters: int):
        self._connection = Connection.to(url)
        self._root = root
        self._adapters = adapters
        self.interval = 0.0
        self.forget()

    def forget(self) -> None:
        """Forget the times so far."""
        self.beside = 0  # number of loads that began while the streams ran
        self.times: dict[str, list[float]] = {"load": [], "unload": [], "swap": []}

    async def churn(self, streams: asyncio.Future[list[Stream]] | None) -> None:
        """Load and unload each adapter once, spread over the time that the streams take; without streams, at once."""
        start = perf_counter()
        for i in range(self._adapters):
            if streams is not None and not streams.done():
                self.beside += 1
                await asyncio.sleep(max(0.0, start + i * self.interval - perf_counter()))
            await self._do("load", "POST", "/v1/adapters", {"name": f"hot{i}", "path": str(self._root / f"hot{i}")})
            arm = list(demo.ADAPTER_PATHS)[i % 2]
            await self._do("swap", "PUT", f"/v1/aliases/{ALIAS}", {"arms": [{"adapter": arm, "weight": 1}]})
            if i >= LOADED_AT_ONCE:
                await self._unload(i - LOADED_AT_ONCE)
        for i in range(max(0, self._adapters - LOADED_AT_ONCE), self._adapters):
            await self._unload(i)

    async def _unload(self, i: int) -> None:
        await self._do("unload", "DELETE", f"/v1/adapters/hot{i}")

    async def _do(self, kind: str, method: str, path: str, body: object = None) -> None:
        began = perf_counter()
        status, answer = await self._connection.json(method, path, body)
        self.times[kind].append((perf_counter() - began) * 1e3)
        if status >= 300:
            raise BenchError(f"{method} {path}: {status} {str(answer)[:200]}")


def report(result: dict[str, Any]) -> None:
    """Show the results."""
    table = Table(title=f"{result['adapters']} adapters beside {result['streams']} streams, ms", title_style="")
    for column in ("change", "count", "mean", "p50", "p95", "p99", "max"):
        table.add_column(column, justify="left" if column == "change" else "right")
    for kind, row in result["changes"].items():
        times = [*(row["ms"][p] for p in ("mean", "p50", "p95", "p99")), row["max"]]
        table.add_row(kind, str(row["count"]), *(f"{ms:.2f}" for ms in times))
    show(table)
    print(f"streams: {result['failed']} failed, {result['different']} with other {result['compared']}")
    print(f"{result['loads_beside_streams']} of {result['changes']['load']['count']} loads fell beside running streams")
    print(f"inter-token p99, disturbed / undisturbed: {result['p99_ratio']:.3f} (median of {len(result['rounds'])})")


def progress(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
