"""Does memory stay within the budget that was made at start, and does anything grow with traffic?

    python benchmarks/memory.py --json-out benchmarks/results/memory.json

Mixed requests (short and long prompts, base and adapters, several choices, streams and whole replies, cancelled and
wrong ones) come at four times the rate that a closed loop got answered. Now and then come bursts of prompts that begin
with the same few thousand tokens: steps whose rows together read as much as the budget's activations are made for.
Reported are statuses, the device's highest memory against the budget of `tandem serve --dry-run`, and how device memory
and both processes' RSS went on after the first tenth of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
from collections import Counter
from time import perf_counter
from typing import Any

import numpy as np
from partial import stop_cleanly
from servers import Running, tandem

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.console import fail
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import Connection, HttpError

FACTOR = 4
SAMPLES = 200  # samples of memory over the run
CLOSE = 1.02  # memory may exceed the budget by this factor
SERIES = ("active", "peak", "kept", "compiled_steps", "front_rss", "engine_rss")
BURST, EVERY = 24, 1000  # requests that come one behind the other with the same deep context
DEEP = [20 + i * i % 880 for i in range(6000)]

EXTRAS: list[dict[str, Any]] = [{}, {}, {"top_p": 0.9, "top_k": 40}, {"logprobs": 5}, {"presence_penalty": 0.5}]
WRONG: list[dict[str, Any]] = [
    {"temperature": 9},
    {"model": "nobody"},
    {"max_tokens": -1},
    {"max_tokens": 100_000},
    {"prompt": [10**9]},
    {"n": 99},
    {"surprise": {"a": [1]}},
]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="memory of a server under four times its load")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=32, help="sequences that run at once")
    parser.add_argument("--queue", type=int, default=32, help="choices that may wait")
    parser.add_argument("--blocks", type=int, default=700, help="of the pool: few, so that it is full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    options = [f"--max-num-seqs={args.batch}", f"--max-queue-size={args.queue}", f"--num-blocks={args.blocks}"]
    options += ["--max-loras=3", "--max-lora-rank=16", "--memory-pressure-threshold=0.98", "--write-timeout-s=20"]
    options += [word for name, path in demo.ADAPTER_PATHS.items() for word in ("--adapter", name, str(path))]
    with tandem(*options).started(demo.MODEL_PATH) as server:
        result = run_loop(Soak(server, args.seed).run(args.requests))
    if args.json_out:
        write_json(
            args.json_out, describe() | {"batch": args.batch, "queue": args.queue, "blocks": args.blocks} | result
        )
    report(result)
    if bad := {s: n for s, n in result["statuses"].items() if s == "broken" or (s[:1] == "5" and s != "503")}:
        fail(f"statuses that must not be: {bad}")
    if result["peak_of_budget"] > CLOSE:
        fail("the budget was exceeded")


class Soak:
    """Random requests to one server."""

    def __init__(self, server: Running, seed: int):
        self._server = server
        self._random = random.Random(seed)
        self._free: list[Connection] = []
        self._watch = Connection.to(server.url)
        self._statuses: Counter[str] = Counter()
        self._without_retry_after = 0
        self._sent = self._made = 0
        self._samples: list[dict[str, float]] = []

    async def run(self, requests: int) -> dict[str, Any]:
        """Send the requests and return statuses and memory."""
        _, health = await self._watch.json("GET", "/health")
        rate = await self._answered_per_second(max(64, min(400, requests // 10)))
        self._statuses.clear()
        self._without_retry_after = 0
        began = perf_counter()
        tasks = set()
        for i in range(requests):
            await asyncio.sleep(max(0.0, began + i / (FACTOR * rate) - perf_counter()))
            task = asyncio.create_task(self._one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            self._sent += 1
            if i % max(requests // SAMPLES, 1) == 0:
                await self._sample()
        await asyncio.gather(*tasks)
        seconds = perf_counter() - began
        await self._sample()
        _, metrics = await self._watch.json("GET", "/v1/engine/metrics")
        engine, memory = metrics["engine"], health["engine"]["memory"]
        total = sum(memory[part] for part in ("weights", "activations", "learning", "pool", "adapter_slots"))
        return {
            "requests": requests,
            "seconds": round(seconds, 1),
            "answered_per_s_alone": round(rate, 2),
            "offered_per_s": round(requests / seconds, 2),
            "statuses": dict(self._statuses),
            "refusals_without_retry_after": self._without_retry_after,
            "budget": memory | {"total": total},
            "peak": engine["peak_memory"],
            "peak_of_budget": round(engine["peak_memory"] / total, 4),
            "restarts": metrics["restarts"],
            "step_failures": engine["step_failures"],
            "preemptions": engine["preemptions"],
            "drift": {
                f"last {requests - begin:,} requests": {name: drift(self._samples, name, begin) for name in SERIES}
                for begin in (requests // 10, requests // 2)
            },
            "samples": self._samples,
        }

    async def _answered_per_second(self, requests: int) -> float:
        """Return the rate of a closed loop with as many clients as choices may run."""
        left, began = requests, perf_counter()

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self._one()

        await asyncio.gather(*(client() for _ in range(16)))
        return requests / (perf_counter() - began)

    async def _one(self) -> None:
        body, kind = self._body()
        connection = self._free.pop() if self._free else Connection.to(self._server.url)
        asking = connection.request("POST", "/v1/completions", body)
        try:
            if kind == "cancelled":
                await asyncio.wait_for(asking, self._random.uniform(0.0, 0.3))
                self._statuses["ended before its cancel"] += 1
            else:
                status = await asking
                self._statuses[str(status)] += 1
                self._without_retry_after += status in (429, 503) and connection.retry_after is None
        except TimeoutError:
            self._statuses["cancelled"] += 1
        except HttpError:
            self._statuses["broken"] += 1
        self._free.append(connection)

    def _body(self) -> tuple[dict[str, Any], str]:
        rng = self._random
        self._made += 1
        if (self._made + EVERY // 2) % EVERY < BURST:
            return self._deep(), "plain"
        long = rng.random() < 0.1
        length = rng.randint(500, 3000) if long else rng.randint(2, 60)
        same = rng.random() < 0.5  # begins like others
        start = list(range(20, 20 + min(length, 400))) if same else []
        prompt = start + [rng.randrange(20, 900) for _ in range(length - len(start))]
        body: dict[str, Any] = {
            "model": rng.choice(["base", *demo.ADAPTER_PATHS]),
            "prompt": prompt,
            "max_tokens": rng.choice([1, 8, 16, 64]),
            "n": 1 if long else rng.choice([1, 1, 1, 2, 4]),
            "stream": rng.random() < 0.5,
            "temperature": rng.choice([0.0, 0.7, 1.0]),
        }
        body |= rng.choice(EXTRAS) or ({"logit_bias": {"30": 2.0}} if rng.random() < 0.2 else {})
        kind = rng.random()
        if kind < 0.05:
            return body | rng.choice(WRONG), "wrong"
        return body, "cancelled" if kind < 0.13 else "plain"

    def _deep(self) -> dict[str, Any]:
        prompt = [*DEEP, *(self._random.randrange(20, 900) for _ in range(8))]
        return {"prompt": prompt, "max_tokens": 16, "n": 4, "temperature": 0.7, "ignore_eos": True}

    async def _sample(self) -> None:
        _, metrics = await self._watch.json("GET", "/v1/engine/metrics")
        front, engine = await asyncio.to_thread(self._rss)
        stats = metrics["engine"]
        self._samples.append(
            {
                "requests": self._sent,
                "active": stats["active_memory"],
                "peak": stats["peak_memory"],
                "kept": stats["kept_memory"],
                "compiled_steps": stats["compiled_steps"],
                "front_rss": front,
                "engine_rss": engine,
            }
        )

    def _rss(self) -> tuple[int, int]:
        """Return the bytes of the front, and of all processes that it started."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
        rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
        pid = self._server.pid
        front = sum(size for own, _, size in rows if own == pid)
        return 1024 * front, 1024 * sum(size for _, parent, size in rows if parent == pid)


def drift(samples: list[dict[str, float]], name: str, begin: int) -> dict[str, float]:
    """Return how memory changed after the first `begin` requests: a straight line's slope, and the last fifth
    against the first.
    """
    rest = [s for s in samples if s["requests"] > begin]
    at = np.array([s["requests"] for s in rest], float)
    values = np.array([s[name] for s in rest], float)
    if len(rest) < 10:
        return {}
    fifth = len(rest) // 5
    return {
        "per_1000_requests": round(float(np.polyfit(at, values, 1)[0]) * 1000),
        "first_fifth": round(float(np.median(values[:fifth]))),
        "last_fifth": round(float(np.median(values[-fifth:]))),
    }


def report(result: dict[str, Any]) -> None:
    """Show the results."""
    budget = result["budget"]["total"]
    print(f"{result['requests']:,} requests, {result['offered_per_s']:,.1f}/s offered, statuses {result['statuses']}")
    print(f"peak {result['peak'] / 1e6:,.1f} MB of a budget of {budget / 1e6:,.1f} MB: {result['peak_of_budget']:.3f}")
    print(f"preemptions {result['preemptions']:,}, step failures {result['step_failures']}")
    for part, series in result["drift"].items():
        for name, found in series.items():
            if found:
                unit, of = ("", 1) if name == "compiled_steps" else (" MB", 1e6)
                first, last, slope = (found[key] / of for key in ("first_fifth", "last_fifth", "per_1000_requests"))
                print(f"{part}  {name}: {first:,.1f} → {last:,.1f}{unit}, {slope:+.3f}{unit} per 1,000 requests")


if __name__ == "__main__":
    main()
