"""Routed validation: repeats every request that was answered under load, alone, and compares the answers.

Requests carry a seed, and a server's answer may depend on nothing but the request and the adapter it names. Text is
compared and, if the server sends them, token ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from mlx_tandem.cli.bench.client import Client, Round
from mlx_tandem.cli.bench.left import Left
from mlx_tandem.http_client import HttpError

SHOWN = 20
"""Differences that are described; all are counted."""

TENTHS = 10
"""Number of progress reports during the check."""

Answer = tuple[str, list[int] | None]
"""Text and token ids of an answer."""


class Validation:
    """Collects answers with `note` and repeats their requests with `check`."""

    def __init__(self, client: Client):
        self._client = client
        self._answers: list[tuple[dict[str, Any], Answer]] = []

    def note(self, done: Round) -> None:
        """Remember the answers of a round. Refused and failed requests have none."""
        self._answers += [(s.body, s.stream.answer()) for s in done.sent if s.stream.problem is None]

    async def check(
        self, sample: int | None = None, progress: Callable[[str], None] = lambda line: None
    ) -> dict[str, Any]:
        """Repeat all requests, or a random sample, one after another; return how many answers differ, and which.

        `progress` gets a line at the beginning and after each tenth.
        """
        chosen = self._answers
        if sample is not None and sample < len(chosen):
            chosen = random.Random(0).sample(chosen, sample)
        differences = []
        progress(f"asking again for {len(chosen):,} of {len(self._answers):,} answers, one at a time")
        left = Left(len(chosen))
        for i, (body, answer) in enumerate(chosen, 1):
            if problem := await self._compare(body, answer):
                differences.append(problem)
            still = left.after()
            if i * TENTHS // len(chosen) > (i - 1) * TENTHS // len(chosen):
                progress(f"asked again: {i:,} of {len(chosen):,}, {len(differences)} different, {still}")
        return {
            "answers": len(self._answers),
            "checked": len(chosen),
            "different": len(differences),
            "compared": "text and token ids" if self._client.token_ids else "text",
            "adapters": len({body.get("model") for body, _ in chosen}),
            "differences": differences[:SHOWN],
        }

    async def _compare(self, body: dict[str, Any], answer: Answer) -> dict[str, Any] | None:
        try:
            status, alone = await self._client.ask(self._client.connection(0), body)
        except HttpError as e:
            status, alone = 0, str(e)
        named = {key: body[key] for key in ("model", "seed", "temperature", "top_p") if key in body}
        if status != 200:
            return named | {"under_load": answer[0], "alone": f"{status} {str(alone)[:200]}"}
        choice = alone["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        if (text, choice.get("token_ids")) == answer:
            return None
        return named | {"under_load": answer[0], "alone": text}
