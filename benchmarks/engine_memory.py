"""Measure whether the memory of the engine's process stops growing under a mix of all kinds of requests.

    python benchmarks/engine_memory.py --json-out benchmarks/results/engine_memory.json

A server that learns gets cycles of the same mix of requests, whose texts, schemas and adapters are new in each: chats
with many ways to draw, tools and grammars, long prompts, clients that leave, adapters that are loaded and removed, and
answers that are learned from. After each cycle the script waits until no request is open. It then reports the
resident memory of the engine's process, the part of it that is not backed by a file, the number of open libraries, and
the engine's own counters. It reads /proc, which only Linux has.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from partial import stop_cleanly
from servers import Running, tandem

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import Connection

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau".split()
"""The words of all texts."""

AT_ONCE = 12
"""Most requests at once."""

IDLE_SECONDS = 0.2
"""Seconds between two checks of whether the server has nothing to do."""


class Mix:
    """The requests of one cycle, which a seed determines."""

    def __init__(self, url: str, seed: int, adapters: Path):
        self._url = url
        self._seed = seed
        self._rng = random.Random(seed)
        self._adapters = adapters
        self.statuses: Counter[str] = Counter()

    async def run(self, requests: int) -> None:
        """Send so many requests of each kind, some of them at once, and wait until all have ended."""
        kinds = (self.chat, self.chat, self.tools, self.grammar, self.long, self.leaves, self.adapter, self.learns)
        works = [kind for kind in kinds for _ in range(requests)]
        self._rng.shuffle(works)
        seats = asyncio.Semaphore(AT_ONCE)

        async def one(work: Callable[[], Awaitable[None]]) -> None:
            async with seats:
                await work()

        await asyncio.gather(*map(one, works))

    def text(self, words: int) -> str:
        """Return a text that no other request has."""
        return " ".join(self._rng.choice(WORDS) for _ in range(words))

    async def send(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        """Send a request and return its answer, and count its status."""
        connection = Connection.to(self._url)
        try:
            status, answer = await connection.json(method, path, body)
        finally:
            connection.close()
        self.statuses[f"{path.split('/')[2]} {status}"] += 1
        return answer

    def body(self, words: int = 12) -> dict[str, Any]:
        """Return a chat."""
        messages = [{"role": "user", "content": self.text(words)}]
        return {
            "messages": messages,
            "max_tokens": self._rng.randint(1, 48),
            "model": self._rng.choice(["base", "shout"]),
        }

    async def chat(self) -> None:
        """Answer a chat, drawn in some way."""
        ways: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1.0, "n": self._rng.randint(1, 4)},
            {"top_p": 0.9, "top_k": 40, "logprobs": True, "top_logprobs": self._rng.randint(0, 5)},
            {"frequency_penalty": 0.5, "min_p": 0.05, "seed": self._rng.randint(0, 9)},
            {"logit_bias": {"5": -3}, "ignore_eos": True},
        ]
        draw = self._rng.choice(ways)
        await self.send("/v1/chat/completions", self.body(self._rng.randint(2, 60)) | draw)

    async def tools(self) -> None:
        """Answer a chat with a tool of its own that has to be called."""
        names = self._rng.sample(WORDS, 3)
        schema = {"type": "object", "properties": {n: {"type": "string"} for n in names}, "required": names[:1]}
        tool = {"type": "function", "function": {"name": self.text(1), "parameters": schema}}
        await self.send("/v1/chat/completions", self.body() | {"tools": [tool], "tool_choice": "required"})

    async def grammar(self) -> None:
        """Answer a chat with a grammar of its own."""
        pattern = f"({'|'.join(self._rng.sample(WORDS, 4))}){{1,{self._rng.randint(1, 9)}}}"
        await self.send("/v1/chat/completions", self.body() | {"structured_outputs": {"regex": pattern}})

    async def long(self) -> None:
        """Read a long prompt."""
        await self.send(
            "/v1/completions", {"model": "base", "prompt": self.text(self._rng.randint(60, 160)), "max_tokens": 4}
        )

    async def leaves(self) -> None:
        """Begin to read a stream and leave."""
        body = self.body(self._rng.randint(2, 300)) | {"stream": True, "ignore_eos": True, "max_tokens": 200}
        connection = Connection.to(self._url)
        request = connection.request("POST", "/v1/chat/completions", body, lambda data: None)
        try:
            await asyncio.wait_for(request, 0.05 + self._rng.random())
            self.statuses["too quick to leave"] += 1
        except TimeoutError:
            self.statuses["left"] += 1
        finally:
            connection.close()

    async def adapter(self) -> None:
        """Load an adapter under a new name, use it, and remove it."""
        name = f"own-{self._seed}-{self._rng.randrange(1 << 40)}"
        answer = await self.send(
            "/v1/adapters", {"name": name, "path": str(self._rng.choice(sorted(self._adapters.iterdir())))}
        )
        if answer.get("status") == "loaded":
            await self.send("/v1/chat/completions", self.body() | {"model": name})
            await self.send(f"/v1/adapters/{name}", {}, "DELETE")

    async def learns(self) -> None:
        """Answer a prompt several times and learn from it."""
        body = {"model": "policy", "prompt": self.text(6), "n": 4, "max_tokens": self._rng.randint(4, 24)}
        body |= {
            "collect_trajectory": True,
            "scoring_function": [{"function": "length", "options": {"target": 9}}],
            "temperature": 1.0,
        }
        await self.send("/v1/completions", body)


def engine_of(server: Running) -> int:
    """Return the id of the engine's process, which is a child of the server's."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        pid, parent, program = line.split(None, 2)
        if int(parent) == server.pid and "mlx_tandem.engine_main" in program:
            return int(pid)
    raise RuntimeError("the server has no engine")


def resident(pid: int) -> dict[str, float]:
    """Return the resident memory of a process in MB, the part without a file behind it, and its open libraries."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    libraries = {line.split()[-1] for line in maps if line.endswith(".so") or ".so." in line}
    return {
        "rss_mb": round(kilobytes["Rss"] * 1.024e-3, 1),
        "private_mb": round(kilobytes["Anonymous"] * 1.024e-3, 1),
        "libraries": len(libraries),
    }


COUNTERS = ("active_memory", "kept_memory", "compiled_steps", "loaded_adapter_bytes", "cached_blocks")
"""The engine's counters that are reported, with memory in bytes."""


async def until_idle(server: Running) -> tuple[dict[str, Any], dict[str, Any]]:
    """Wait until the server has nothing to do; return the counters of its engine, and the status of learning."""
    connection = Connection.to(server.url)
    try:
        while True:
            _, told = await connection.json("GET", "/v1/engine/metrics")
            _, status = await connection.json("GET", "/v1/training/status")
            if not (told["open_requests"] or told["engine"]["running"] or status["busy"]):
                return told["engine"], status
            await asyncio.sleep(IDLE_SECONDS)
    finally:
        connection.close()


async def measure(server: Running, cycles: int, requests: int, adapters: Path) -> list[dict[str, Any]]:
    """Return the figures after each cycle."""
    pid, found = engine_of(server), []
    for cycle in range(cycles):
        mix, began = Mix(server.url, cycle, adapters), perf_counter()
        await mix.run(requests)
        engine, status = await until_idle(server)
        row: dict[str, Any] = {"cycle": cycle, "seconds": round(perf_counter() - began, 1), **resident(pid)}
        row |= {name: engine[name] for name in COUNTERS} | {"updates": status["updates"]}
        found.append(row | {"statuses": dict(mix.statuses)})
        print(
            f"cycle {cycle}: {row['rss_mb']:,.0f} MB, {row['compiled_steps']} steps, {row['seconds']} s",
            file=sys.stderr,
        )
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="memory of the engine under a mix of everything")
    parser.add_argument("--model", type=Path, default=demo.MODEL_PATH)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--requests", type=int, default=12, help="of each kind, in a cycle")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    root = demo.ADAPTER_PATHS["shout"].parent
    options = ["--max-model-len", "1024", "--num-blocks", "2049", "--max-num-seqs", "16", "--adapter-root", str(root)]
    options += ["--adapter", "shout", str(root / "shout"), "--enable-rl-training", "--update-frequency", "16"]
    with tempfile.TemporaryDirectory() as folder:
        server = tandem(*options, "--checkpoint-dir", folder)
        with server.started(args.model) as running:
            found = run_loop(measure(running, args.cycles, args.requests, root))
    if args.json_out:
        write_json(args.json_out, describe() | {"requests": args.requests, "cycles": found})
    first, last = found[0]["rss_mb"], found[-1]["rss_mb"]
    print(f"{first:,.0f} MB after the first cycle, {last:,.0f} MB after the last of {len(found)}")


if __name__ == "__main__":
    stop_cleanly()
    main()
