"""`tandem bench serve`: closed-loop streaming load on a running server.

Every round keeps `concurrency` requests under way until all are answered. The modes take turns round by round, so that
what else the machine does meets them alike and their ratios are fair.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.stats import median, spread
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.http import Connection, HttpError

SAMPLING = [(t, p) for t in (0.0, 0.7, 1.0) for p in (1.0, 0.9)]
"""(temperature, top_p), a different pair for neighbouring requests."""
RATIOS = (("mixed", "same"), ("same", "base"), ("mixed", "base"))
T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """What is sent. `adapters` None: those that the server lists."""

    url: str
    modes: tuple[str, ...] = ("base",)
    concurrency: tuple[int, ...] = (1, 8, 32)
    num_requests: int | None = None
    seconds: float | None = None
    prompt_tokens: int = 64
    max_tokens: int = 64
    repeats: int = 3
    adapters: tuple[str, ...] | None = None
    model: str | None = None
    endpoint: str = "completions"
    seeded: bool = True  # some servers leave batching when a request has a seed


class BenchError(Exception):
    """The measurement cannot be made; the message says why."""


def run(load: Load, json_out: Path | None) -> None:
    """Measure, show a table, write the JSON file. Ends the process with status 1 when nothing could be measured."""
    from mlx_tandem.cli.bench.report import serve_table
    from mlx_tandem.cli.console import fail, show

    try:
        result = measure(load, progress=lambda line: print(line, file=sys.stderr, flush=True))
    except (BenchError, HttpError) as e:
        fail(str(e))
    if json_out:
        write(json_out, result)
    show(serve_table(result))


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def measure(load: Load, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """All rounds of `load` as plain data: raw figures per round, medians, ratios between the modes."""
    return run_loop(_measure(load, progress))


def run_loop(main: Awaitable[T]) -> T:
    """Run on uvloop where it exists: it halves what the client costs the machine that it measures."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as factory

    async def entry() -> T:
        return await main

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(entry())


async def _measure(load: Load, progress: Callable[[str], None]) -> dict[str, Any]:
    client = await Client.open(load)
    rounds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for concurrency in load.concurrency:
        for mode in load.modes:
            await client.round(mode, concurrency, warm_up=True)
        for repeat in range(load.repeats):
            turn = repeat % len(load.modes)
            for mode in load.modes[turn:] + load.modes[:turn]:
                figures = await client.round(mode, concurrency)
                rounds.setdefault((concurrency, mode), []).append(figures)
                progress(
                    f"round {repeat + 1}/{load.repeats}  {concurrency:>3} at once  {mode:<5}  "
                    f"{figures['tokens_per_s']:>9,.0f} tok/s  {figures['events_per_s']:>9,.0f} events/s"
                    + (f"  {figures['errors']} errors: {figures['first_error']}" if figures["errors"] else "")
                )
    client.close()
    results = [
        {"concurrency": c, "mode": mode, "median": median(raw), "rounds": raw} for (c, mode), raw in rounds.items()
    ]
    return describe() | {
        "load": asdict(load) | {"adapters": client.adapters},
        "server": client.server,
        "results": results,
        "ratios": ratios(rounds),
    }


def ratios(rounds: dict[tuple[int, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Throughput of one mode over another's: the median over the rounds, each against its neighbour in time."""
    found = []
    for concurrency in sorted({c for c, _ in rounds}):
        row: dict[str, Any] = {"concurrency": concurrency}
        for over, under in RATIOS:
            pairs = zip(rounds.get((concurrency, over), []), rounds.get((concurrency, under), []), strict=False)
            values = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs if b["tokens_per_s"]]
            if values:
                row[f"{over}/{under}"] = round(statistics.median(values), 3)
        if len(row) > 1:
            found.append(row)
    return found


class Client:
    """Connections to one server, and the requests of one load."""

    def __init__(self, load: Load):
        self.load = load
        self.adapters: list[str] = list(load.adapters or ())
        self.server: Any = None
        self._words_per_token = 1.0
        self._connections: list[Connection] = []
        self._random = random.Random(0)
        self._numbers = count()

    @classmethod
    async def open(cls, load: Load) -> Client:
        """Look at the server and find how many words make the wanted number of prompt tokens."""
        self = cls(load)
        connection = self._connection(0)
        status, health = await connection.json("GET", "/health")
        self.server = health if status == 200 else None
        if not self.adapters and set(load.modes) & {"same", "mixed"}:
            status, answer = await connection.json("GET", "/v1/adapters")
            if status != 200:
                raise BenchError(f"the server does not list adapters (GET /v1/adapters: {status}); name them")
            self.adapters = [entry["name"] for entry in answer["adapters"]]
            if not self.adapters:
                raise BenchError("the server has no adapters, and modes other than base need them")
        await self._calibrate(connection)
        return self

    async def _calibrate(self, connection: Connection) -> None:
        words = 128
        body = self._body("base") | {self._prompt_field: self._prompt(words), "max_tokens": 1, "stream": False}
        del body["stream_options"]
        status, answer = await connection.json("POST", self._path, body)
        if status != 200:
            raise BenchError(f"the server refused a plain request: {status} {str(answer)[:300]}")
        self._words_per_token = words / answer["usage"]["prompt_tokens"]

    async def round(self, mode: str, concurrency: int, warm_up: bool = False) -> dict[str, Any]:
        """One round as figures. A warm-up round is short."""
        load = self.load
        total = load.num_requests or max(8, 4 * concurrency)
        if warm_up:
            total = min(total, max(2, concurrency))
        until = perf_counter() + load.seconds if load.seconds and not warm_up else None
        numbers: Iterator[int] = count() if until else iter(range(total))
        streams: list[Stream] = []

        async def worker(connection: Connection) -> None:
            for _ in numbers:
                if until and perf_counter() >= until:
                    return
                body = self._body(mode)
                stream = Stream()
                streams.append(stream)
                try:
                    stream.finish(await connection.request("POST", self._path, body, stream))
                except (HttpError, ValueError, KeyError) as e:
                    stream.finished = perf_counter()
                    stream.error = str(e)

        gc.collect()
        gc.disable()
        try:
            await asyncio.gather(*(worker(self._connection(i)) for i in range(concurrency)))
        finally:
            gc.enable()
        return figures(streams)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _connection(self, i: int) -> Connection:
        while len(self._connections) <= i:
            self._connections.append(Connection.to(self.load.url))
        return self._connections[i]

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.load.endpoint == "chat" else "/v1/completions"

    @property
    def _prompt_field(self) -> str:
        return "messages" if self.load.endpoint == "chat" else "prompt"

    def _prompt(self, words: int) -> object:
        """Made-up words, never the same twice, so that no cache of prompts helps anybody."""
        r = self._random
        text = " ".join(r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(max(1, words)))
        return [{"role": "user", "content": text}] if self.load.endpoint == "chat" else text

    def _body(self, mode: str) -> dict[str, Any]:
        load = self.load
        number = next(self._numbers)
        temperature, top_p = SAMPLING[number % len(SAMPLING)]
        body: dict[str, Any] = {
            self._prompt_field: self._prompt(round(load.prompt_tokens * self._words_per_token)),
            "max_tokens": load.max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.seeded:
            body["seed"] = number
        if mode != "base":
            body["model"] = self.adapters[0 if mode == "same" else number % len(self.adapters)]
        elif load.model:
            body["model"] = load.model
        return body


def figures(streams: list[Stream]) -> dict[str, Any]:
    """What one round came to. Times in milliseconds."""
    good = [s for s in streams if s.error is None and s.events]
    bad = [s.error or "no token came" for s in streams if s.error is not None or not s.events]
    wall = max(s.finished for s in streams) - min(s.sent for s in streams)
    tokens = sum(s.tokens for s in good)
    events = sum(s.events for s in good)
    return {
        "requests": len(streams),
        "errors": len(bad),
        "first_error": bad[0] if bad else None,
        "wall_s": round(wall, 4),
        "tokens": tokens,
        "events": events,
        "prompt_tokens": round(sum(s.prompt_tokens for s in good) / max(1, len(good)), 1),
        "tokens_per_s": round(tokens / wall, 2),
        "events_per_s": round(events / wall, 2),
        "ttft_ms": spread([s.first for s in good], 1e3),
        "inter_token_ms": spread([gap for s in good for gap in s.gaps()], 1e3),
        "latency_ms": spread([s.latency for s in good], 1e3),
    }
