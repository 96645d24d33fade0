"""The client of `tandem bench serve`: connections to one server, and rounds of requests over them.

In a closed loop each client sends its next request when its last one has ended. In an open loop (`rate`) requests
are due at fixed times, whatever the server does. The client shares the machine with the server that it measures, so
it does nothing per token beyond what `stream.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from time import perf_counter
from typing import Any, TypeVar

from mlx_tandem.cli.bench.figures import figures
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.bench.workloads import SAMPLING, Load, Workload
from mlx_tandem.http_client import Connection, HttpError, bearer

T = TypeVar("T")

_WORDS = list(map("".join, product("bdfgklmnprstvz", "aeiou")))


class BenchError(Exception):
    """The measurement is not possible; the message says why."""


@dataclass(frozen=True)
class Sent:
    """One request and its result."""

    body: dict[str, Any]
    stream: Stream


@dataclass
class Round:
    """The requests of one round. `held_back` counts requests that were never sent, since the most allowed were under
    way.
    """

    sent: list[Sent]
    held_back: int = 0

    def figures(self) -> dict[str, Any]:
        """Return the figures of the round."""
        return figures([s.stream for s in self.sent], self.held_back)


def run_loop(main: Awaitable[T]) -> T:
    """Run `main` on uvloop if it is installed, which halves the client's load on the machine that it measures."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as factory

    async def entry() -> T:
        return await main

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(entry())


class Client:
    """Connections to one server, and the requests of one load."""

    def __init__(self, load: Load):
        self.load = load
        self.adapters: list[str] = list(load.adapters or ())
        self.server: Any = None
        self.token_ids = False  # whether the server returns token ids when asked
        self._words_per_token = 1.0
        self._connections: list[Connection] = []
        self._random = random.Random(0)
        self._numbers = count()

    @classmethod
    async def open(cls, load: Load) -> Client:
        """Return a client for the server, which is asked for its adapters and how many words make a prompt token."""
        self = cls(load)
        connection = self.connection(0)
        status, health = await connection.json("GET", "/health")
        self.server = health if status == 200 else None
        if not self.adapters and not load.profile and set(load.modes) - {"base"}:
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
        body = self.body(Workload("calibrate", lambda: None, 1, 1)) | {self._prompt_field: self._prompt(words)}
        status, answer = await self.ask(connection, body)
        if status != 200:
            raise BenchError(f"the server refused a plain request: {status} {str(answer)[:300]}")
        self._words_per_token = words / answer["usage"]["prompt_tokens"]
        if self.load.validate:
            status, answer = await self.ask(connection, body | {"return_token_ids": True})
            self.token_ids = status == 200 and bool(answer["choices"][0].get("token_ids"))

    async def ask(self, connection: Connection, body: dict[str, Any]) -> tuple[int, Any]:
        """Send one request and return the status and body of its reply, which is not streamed."""
        plain = {key: value for key, value in body.items() if key != "stream_options"}
        return await connection.json("POST", self._path, plain | {"stream": False})

    async def send(self, connection: Connection, body: dict[str, Any]) -> Stream:
        """Send one streamed request and return the stream at its end. Errors are recorded in the stream."""
        stream = Stream(keep=self.load.validate)
        try:
            status = await connection.request("POST", self._path, body, stream)
            stream.finish(status, connection.retry_after)
        except HttpError as e:
            stream.fail("connection", str(e))
        except (ValueError, KeyError) as e:
            stream.fail("unreadable", str(e))
        return stream

    async def round(self, workload: Workload, concurrency: int, warm_up: bool = False) -> Round:
        """Run one round and return its requests. A warm-up round is short, and a closed loop."""
        load = self.load
        total = load.num_requests or max(24, 4 * concurrency)
        seconds = load.seconds
        if warm_up:
            total, seconds = min(total, max(2, concurrency)), None
        elif load.rate and seconds:
            total, seconds = max(1, round(load.rate * seconds)), None
        gc.collect()
        gc.disable()
        try:
            if load.rate and not warm_up:
                return await self._open_loop(workload, load.rate, concurrency, total)
            return await self._closed_loop(workload, concurrency, total, seconds)
        finally:
            gc.enable()

    async def _closed_loop(self, workload: Workload, concurrency: int, total: int, seconds: float | None) -> Round:
        sent: list[Sent] = []
        until = perf_counter() + seconds if seconds else None
        numbers: Iterator[int] = count() if until else iter(range(total))

        async def worker(connection: Connection) -> None:
            for _ in numbers:
                if until and perf_counter() >= until:
                    return
                body = self.body(workload)
                sent.append(Sent(body, await self.send(connection, body)))

        await asyncio.gather(*(worker(self.connection(i)) for i in range(concurrency)))
        return Round(sent)

    async def _open_loop(self, workload: Workload, rate: float, most: int, total: int) -> Round:
        found = Round([])
        free = [self.connection(i) for i in range(most)]
        under_way: set[asyncio.Task[None]] = set()

        async def one(connection: Connection, body: dict[str, Any]) -> None:
            found.sent.append(Sent(body, await self.send(connection, body)))
            free.append(connection)

        start = perf_counter()
        for i in range(total):
            await asyncio.sleep(max(0.0, start + i / rate - perf_counter()))
            if not free:
                found.held_back += 1
                continue
            task = asyncio.create_task(one(free.pop(), self.body(workload)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
        return found

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()

    def connection(self, i: int) -> Connection:
        """Return the i-th connection, which carries one request at a time."""
        headers = bearer(self.load.api_key)
        while len(self._connections) <= i:
            self._connections.append(Connection.to(self.load.url, headers, self.load.cacert))
        return self._connections[i]

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.load.endpoint == "chat" else "/v1/completions"

    @property
    def _prompt_field(self) -> str:
        return "messages" if self.load.endpoint == "chat" else "prompt"

    def _prompt(self, words: int) -> object:
        """Return a prompt of made-up words, never the same twice, so that no prefix cache helps any server."""
        text = " ".join(self._random.choices(_WORDS, k=max(1, words)))
        return [{"role": "user", "content": text}] if self.load.endpoint == "chat" else text

    def body(self, workload: Workload) -> dict[str, Any]:
        """Return the body of the next request of this workload."""
        number = next(self._numbers)
        temperature, top_p = workload.sampling or SAMPLING[number % len(SAMPLING)]
        body: dict[str, Any] = {
            self._prompt_field: self._prompt(round(workload.prompt_tokens * self._words_per_token)),
            "max_tokens": workload.max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.load.seeded:
            body["seed"] = number
        if self.token_ids:
            body["return_token_ids"] = True
        if model := workload.choose() or self.load.model:
            body["model"] = model
        return body
