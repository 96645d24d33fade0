"""The stage in which a server is idle, and the Mac may sleep: its engine must survive, and clocks must go on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.result import Failed, Figures, Outcome
from mlx_tandem.cli.own_server import ROOM, started_server
from mlx_tandem.http_client import Connection

POLL_SECONDS = 0.5
"""Seconds between two readings of the clocks."""

AWAKE = 5.0
"""Most seconds by which the clock of the day and that of the time awake may differ if the machine has not slept."""

ANSWER_SECONDS = 60.0
"""Most seconds that an answer may take."""


def waits(bench: Bench) -> Outcome:
    """Send a request to a server, wait, and send it again. This stage does not put the machine to sleep."""
    with started_server(*ROOM, own_session=False) as url:
        before = asyncio.run(_ask(url))
        day, awake = time.time(), time.monotonic()
        while abs(time.time() - day) < bench.sizes.idle and time.monotonic() - awake < bench.sizes.idle:
            time.sleep(POLL_SECONDS)
        day, awake = time.time() - day, time.monotonic() - awake
        after = asyncio.run(_ask(url))
    slept = day - awake
    figures: Figures = {
        "seconds": round(day, 1),
        "awake_s": round(awake, 1),
        "answer_before_ms": round(before["seconds"] * 1e3, 1),
        "answer_after_ms": round(after["seconds"] * 1e3, 1),
        "engine_restarts": after["restarts"],
    }
    said = f"{day:.0f} s without a request, {f'{slept:.0f} of them asleep' if slept > AWAKE else 'awake'}"
    if after["restarts"] != before["restarts"]:
        raise Failed(f"{said}: the engine was started again", "Requests that ran would have failed.", figures)
    if after["text"] != before["text"]:
        raise Failed(f"{said}: the same question has another answer", "Please report it.", figures)
    if slept < -AWAKE:
        return Outcome(f"{said}: the clock of the day went back by {-slept:.0f} s", figures)
    return Outcome(f"{said}: the engine lives, and answers in {figures['answer_after_ms']} ms", figures)


async def _ask(url: str) -> dict[str, Any]:
    """Return the text of an answer, its seconds, and how often the engine was started again."""
    connection = Connection.to(url)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, models = await connection.json("GET", "/v1/models")
            body = {"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "Sort down: 5 3 9 1"}]}
            started = time.perf_counter()
            status, answer = await connection.json(
                "POST", "/v1/chat/completions", body | {"temperature": 0, "max_tokens": 8}
            )
            seconds = time.perf_counter() - started
            if status != 200:
                raise Failed(f"the server answers with {status}: {answer}"[:300])
            _, health = await connection.json("GET", "/health")
    finally:
        connection.close()
    text = answer["choices"][0]["message"]["content"]
    return {"text": text, "seconds": seconds, "restarts": health["engine_restarts"]}
