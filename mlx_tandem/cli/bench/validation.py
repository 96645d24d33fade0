"""Routed validation: every answer given under load is asked for again with nothing else running, and must be equal.

Requests carry a seed, and what a server answers to one may depend on nothing but the request and the adapter it names:
text and, where the server gives them, token ids.
"""

from __future__ import annotations

import random
from typing import Any

from mlx_tandem.cli.bench.client import Client, Round
from mlx_tandem.cli.http import HttpError

SHOWN = 20  # differences that are described; all are counted

Answer = tuple[str, list[int] | None]


class Validation:
    """Collects answers with `note` and asks for them again with `check`."""

    def __init__(self, client: Client):
        self._client = client
        self._answers: list[tuple[dict[str, Any], Answer]] = []

    def note(self, done: Round) -> None:
        """Remember what was answered. Refused and failed requests have no answer that could be checked."""
        self._answers += [(s.body, s.stream.answer()) for s in done.sent if s.stream.problem is None]

    async def check(self, sample: int | None = None) -> dict[str, Any]:
        """All answers, or an even sample, one after another. What differs is listed."""
        chosen = self._answers
        if sample is not None and sample < len(chosen):
            chosen = random.Random(0).sample(chosen, sample)
        differences = []
        for body, answer in chosen:
            if problem := await self._compare(body, answer):
                differences.append(problem)
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
