"""How long does a tenant with one request wait beside one with a thousand?

    python benchmarks/tenants.py --json-out benchmarks/results/tenants.json

A server has two named keys of two tenants. One asks one question after another. First nobody else asks, then the other
tenant has a thousand requests open all the while. Reported are the times until the first token, which is how long a
request waits, and until the last, and both against the whole time of a request that is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import BenchError, Client, run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.workloads import Load, phases
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.strict_json import dumps

NAMES = ("one", "many")
FEWEST = 20  # answers of the other tenant that have ended before the first question


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="a tenant with one request beside one with a thousand")
    parser.add_argument("--model", type=Path, default=demo.MODEL_PATH)
    parser.add_argument("--many", type=int, default=1000, help="requests of the other tenant that are open at once")
    parser.add_argument("--questions", type=int, default=20, help="of each round, one after another")
    parser.add_argument("--rounds", type=int, default=3, help="each alone and beside the other tenant")
    parser.add_argument("--batch", type=int, default=64, help="sequences that run at once")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        entries = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in NAMES]
        file.write_bytes(dumps(entries))
        file.chmod(0o600)
        options = ("--max-num-seqs", str(args.batch), "--max-queue-size", str(2 * args.many), "--keys", str(file))
        with tandem(*options).started(args.model) as server:
            load = Load(server.url, prompt_tokens=args.prompt_tokens, max_tokens=args.max_tokens)
            result = run_loop(measure(load, args.many, args.questions, args.rounds))
    if args.json_out:
        write_json(args.json_out, describe() | {"batch": args.batch, "many": args.many} | result)
    report(result)


async def measure(load: Load, many: int, questions: int, rounds: int) -> dict[str, Any]:
    """Return the times of the questions, alone and beside the other tenant, in seconds."""
    one, other = [await Client.open(replace(load, api_key=name)) for name in NAMES]
    found: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    await ask(one, 4)
    for _ in range(rounds):
        found["alone"] += await ask(one, questions)
        found["beside"] += await beside(one, other, many, questions)
    one.close()
    other.close()
    figures = {name: _figures(times) for name, times in found.items()}
    alone = figures["alone"]["total_s"]["p50"]
    return figures | {
        "wait_ratio_p50": round(figures["beside"]["wait_s"]["p50"] / alone, 3),
        "wait_ratio_max": round(figures["beside"]["wait_s"]["max"] / alone, 3),
        "total_ratio_p50": round(figures["beside"]["total_s"]["p50"] / alone, 3),
    }


async def ask(client: Client, questions: int) -> list[dict[str, float]]:
    """Send questions one after another; return the times of each."""
    (workload,) = phases(replace(client.load, concurrency=(1,)), [])[0].workloads
    found = []
    for _ in range(questions):
        stream = await client.send(client.connection(0), client.body(workload))
        if stream.problem:
            raise BenchError(f"a question was not answered: {stream.error}")
        found.append({"wait_s": stream.times[0] - stream.sent, "total_s": stream.finished - stream.sent})
    return found


async def beside(one: Client, other: Client, many: int, questions: int) -> list[dict[str, float]]:
    """Return the times of questions while the other tenant has `many` requests open."""
    (workload,) = phases(replace(other.load, concurrency=(1,)), [])[0].workloads
    is_over = False
    ended = asyncio.Semaphore(0)

    async def again(i: int) -> None:
        while not is_over:
            stream = await other.send(other.connection(i), other.body(workload))
            if stream.problem:
                raise BenchError(f"a request of the other tenant was not answered: {stream.error}")
            ended.release()

    others = [asyncio.create_task(again(i)) for i in range(many)]
    for _ in range(min(FEWEST, many)):
        await ended.acquire()
    found = await ask(one, questions)
    is_over = True
    await asyncio.gather(*others)
    return found


def _figures(times: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the median and the extremes of each time."""
    found = {}
    for name in ("wait_s", "total_s"):
        values = [each[name] for each in times]
        found[name] = {
            "p50": round(statistics.median(values), 4),
            "min": round(min(values), 4),
            "max": round(max(values), 4),
        }
    return found


def report(result: dict[str, Any]) -> None:
    """Show the results."""
    for name in ("alone", "beside"):
        wait, total = result[name]["wait_s"], result[name]["total_s"]
        print(
            f"{name}: first token after {1000 * wait['p50']:,.0f} ms ({1000 * wait['max']:,.0f} at most), "
            f"whole answer after {1000 * total['p50']:,.0f} ms ({1000 * total['max']:,.0f} at most)"
        )
    print(
        f"the wait beside the other tenant is {result['wait_ratio_p50']:.2f} of a whole answer alone "
        f"({result['wait_ratio_max']:.2f} at most), the whole answer {result['total_ratio_p50']:.2f}"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
