"""Measure when a stream's first byte comes while a long prompt is read, and what is kept for a client that leaves.

    python benchmarks/first_byte.py --json-out benchmarks/results/first_byte.json

Streams of every dialect are sent prompts of 7,000 tokens of which nothing is cached, one after the other: from the
request to the first byte, and to the end of an answer of one token. The former includes that the prompt is tokenised,
the latter that it is read. Then clients leave when the server says that 70 % of their prompts are read, which it says
twice a second, and ask again at once: the share of the prompt that is found.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table
from servers import tandem

from mlx_tandem.cli.bench.client import run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.console import show
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import Connection

ONE = {"stream": True, "temperature": 0.0}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": ONE | {"max_tokens": 1},
    "/v1/chat/completions": ONE | {"max_tokens": 1},
    "/v1/messages": ONE | {"max_tokens": 1, "model": "base"},
    "/v1/responses": ONE | {"max_output_tokens": 1, "model": "base", "store": False},
    "/api/chat": {"stream": True, "options": {"temperature": 0.0, "num_predict": 1}, "model": "base"},
}


class Timed(Connection):
    """A connection that notes when the first byte of an answer has come; 0: none has."""

    first = 0.0

    def data_received(self, data: bytes) -> None:
        """Note the time of the first byte."""
        self.first = self.first or perf_counter()
        super().data_received(data)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="first bytes while long prompts are read, and what is kept of them")
    parser.add_argument("--shape", default="4m")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of a prompt, about")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--leave", type=float, default=0.7, help="part of a prompt after which clients leave")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-first-") as scratch:
        model = write_model(Path(scratch) / args.shape, SHAPES[args.shape], positions=args.tokens + 1024)
        with tandem().running(model) as url:
            results = run_loop(measure(url, args.tokens, args.repeats, args.leave))
    if args.json_out:
        write_json(
            args.json_out, describe() | {"shape": args.shape, "tokens": args.tokens, "leave": args.leave} | results
        )
    table = Table(title=f"{args.shape}, prompts of {args.tokens} tokens, median of {args.repeats}", title_style="")
    for column in ("route", "first byte", "the latest", "answer of one token"):
        table.add_column(column, justify="right")
    for row in results["routes"]:
        times = (row["first_byte_ms"], max(r["first_byte_ms"] for r in row["rounds"]), row["answer_ms"])
        table.add_row(row["route"], *(f"{ms:,.1f} ms" for ms in times))
    show(table)
    shares = [", ".join(f"{left[what]:.1%}" for left in results["left"]) for what in ("read", "found")]
    show("of the prompts of clients that left, {} had been read, and {} were found".format(*shares))


async def measure(url: str, tokens: int, repeats: int, leave: float) -> dict[str, Any]:
    """Return the times of each route, and what clients found who had left."""
    seeds = iter(range(10_000))
    await _ask(url, "/v1/completions", tokens, next(seeds))  # every shape is traced before it is timed
    rounds: dict[str, list[dict[str, float]]] = {path: [] for path in ROUTES}
    for _ in range(repeats):
        for path, own in rounds.items():
            own.append(await _ask(url, path, tokens, next(seeds)))
    routes = [
        {"route": path} | {key: round(statistics.median(r[key] for r in own), 2) for key in own[0]} | {"rounds": own}
        for path, own in rounds.items()
    ]
    return {"routes": routes, "left": [await _come_back(url, tokens, next(seeds), leave) for _ in range(repeats)]}


async def _ask(url: str, path: str, tokens: int, seed: int) -> dict[str, float]:
    """Return the milliseconds until the first byte and the end of an answer of one token."""
    connection = Timed.to(url)
    assert isinstance(connection, Timed)
    began = perf_counter()
    status = await connection.request("POST", path, ROUTES[path] | _prompt(path, tokens, seed))
    ended = perf_counter()
    connection.close()
    if status != 200:
        raise RuntimeError(f"{path} answered {status}")
    return {"first_byte_ms": round((connection.first - began) * 1e3, 2), "answer_ms": round((ended - began) * 1e3, 1)}


async def _come_back(url: str, tokens: int, seed: int, leave: float) -> dict[str, float]:
    """Return the shares of a prompt that had been read when its client left, and that it found when it asked again."""
    path = "/v1/chat/completions"
    body = ROUTES[path] | _prompt(path, tokens, seed)
    leaving, connection = Connection.to(url), Connection.to(url)
    before = await _computed(connection)
    asking = asyncio.create_task(leaving.request("POST", path, body))
    while (read := await _computed(connection) - before) < leave * tokens:
        await asyncio.sleep(0.02)
    if asking.done():
        raise RuntimeError("the answer came before the client left")
    asking.cancel()  # which closes the connection
    await asyncio.wait({asking})
    _, reply = await connection.json("POST", path, body | {"stream": False})
    connection.close()
    usage = reply["usage"]
    cached, whole = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
    return {"read": round(read / whole, 4), "found": round(cached / whole, 4)}


async def _computed(connection: Connection) -> int:
    """Return the number of tokens in all steps so far, as the engine said it last."""
    _, metrics = await connection.json("GET", "/v1/engine/metrics")
    return int(metrics["engine"]["step_tokens_sum"])


def _prompt(path: str, tokens: int, seed: int) -> dict[str, Any]:
    """Return the field with a prompt of about so many tokens, in which a syllable with its space is one token."""
    rng = random.Random(seed)
    text = " ".join(rng.choice("bdfgkl") + rng.choice("aeiou") for _ in range(tokens))
    if path == "/v1/completions":
        return {"prompt": text}
    return {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}


if __name__ == "__main__":
    main()
