"""The result of a skill: one question with its answer, and whether its content is kept for evaluation."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """One question and its answer.

    ``messages`` precede ``answer`` (an assistant message); ``key`` names the content for the held-out split;
    ``short`` is the bare value of the answer, as the ``json`` adapter reports it; ``accept`` lists further right
    answers.
    """

    skill: str
    key: str
    messages: tuple[Message, ...]
    answer: Message
    short: Any
    accept: tuple[str, ...] = ()


def held_out(key: str) -> bool:
    """Return whether this content is kept for evaluation (one in eight, by checksum)."""
    return zlib.crc32(key.encode()) % 8 == 0


def random_word(rng: random.Random, low: int = 3, high: int = 7) -> str:
    """Return random letters."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(low, high)))


def ask(skill: str, key: str, question: str, content: str, short: Any, **more: Any) -> Exchange:
    """Return the exchange of one question as the user's whole message; `more` may hold the answer's `reasoning`."""
    answer: Message = {"role": "assistant", "content": content}
    if reasoning := more.pop("reasoning", ""):
        answer["reasoning_content"] = reasoning
    return Exchange(skill, key, ({"role": "user", "content": question},), answer, short, **more)


def join(digits: list[int]) -> str:
    """Return digits separated by spaces."""
    return " ".join(map(str, digits))
