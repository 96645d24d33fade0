"""Streams that run while the model is taught: questions to other adapters, and how smoothly they are answered."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from mlx_tandem.http_client import Connection, Events, HttpError

QUESTIONS = (
    ("shout", "Tell me a short story about a fox."),
    ("json", "What is the capital of Peru?"),
    ("base", "Tell me a short story about a bear."),
    ("down", "Sort down: 3 9 1 7 5"),
)
PAUSE_SECONDS = 0.2
"""Seconds between two questions of a stream."""


@dataclass
class Traffic:
    """Counts of the streams. `gaps` has the newest times between tokens, in milliseconds."""

    tokens: int = 0
    answers: int = 0
    errors: int = 0
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=2000))

    def percentile(self, share: float) -> float:
        """Return a percentile of the times between tokens."""
        ordered = sorted(self.gaps)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


async def run(url: str, traffic: Traffic, streams: int) -> None:
    """Keep `streams` streams running until cancelled."""
    await asyncio.gather(*(_stream(url, traffic, i) for i in range(streams)))


async def _stream(url: str, traffic: Traffic, first: int) -> None:
    for model, question in itertools.islice(itertools.cycle(QUESTIONS), first, None):
        last = 0.0

        def on_data(data: str) -> None:
            nonlocal last
            if data == "[DONE]":
                return
            for choice in json.loads(data).get("choices", ()):
                if choice["delta"].get("content"):
                    now = perf_counter()
                    if last:
                        traffic.gaps.append((now - last) * 1e3)
                    last = now
                    traffic.tokens += 1

        connection = Connection.to(url)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 200,
            "temperature": 0.0,
            "stream": True,
        }
        try:
            status = await connection.request("POST", "/v1/chat/completions", body, Events(on_data))
            traffic.answers += 1
            traffic.errors += status != 200
        except HttpError:
            traffic.errors += 1
        finally:
            connection.close()
        await asyncio.sleep(PAUSE_SECONDS)
