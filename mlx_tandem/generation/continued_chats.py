"""Conversations that go on after tokens which are kept: the kept tokens stay as they are, and what is new follows.

Text that is rendered and tokenised again may come out as other tokens than those that were drawn, and a policy must be
trained on the tokens that it drew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mlx_tandem.errors import Conflict
from mlx_tandem.generation.chats import ChatRequest
from mlx_tandem.generation.front import Front

THOUGHTS = frozenset(("reasoning_content", "reasoning", "thinking"))
"""Fields of the assistant's messages that have its thoughts."""


class Kept(NamedTuple):
    """A conversation up to an answer: its tokens with the answer's, and how the prompt of the answer was written."""

    tokens: Sequence[int]
    answer: Sequence[int]  # the last of them
    messages: int  # before the answer; 0: it was no conversation
    prompt: bytes  # digest of the conversation before the answer as the template writes it


def digest(prompt: Sequence[int]) -> bytes:
    """Return a digest of a prompt, by which it is recognised."""
    return hashlib.blake2b(b"".join(t.to_bytes(4, "little") for t in prompt), digest_size=16).digest()


async def rendered(front: Front, asked: ChatRequest, count: int, *, asks: bool) -> list[int]:
    """Return the first `count` messages as token ids; with `asks` the beginning of an answer follows."""
    part = replace(asked, messages=asked.messages[:count], adds_prompt=asks, continues=False)
    return (await part.chat(front, cut=True)).prompt


async def continued(front: Front, asked: ChatRequest, whole: Sequence[int], kept: Kept) -> list[int]:
    """Return the prompt of a conversation that goes on: the kept tokens, then what has been said since the answer.

    `whole` is the conversation as the template writes it. Raises Conflict when it does not go on after the answer.
    """
    if list(whole[: len(kept.tokens)]) == list(kept.tokens) and len(whole) > len(kept.tokens):
        return list(whole)
    place = kept.messages
    if not place:
        raise _conflict("the prompt must begin with the tokens of the trajectory so far: its prompt, then its answer")
    if len(asked.messages) <= place:
        raise _conflict(
            f"messages has {len(asked.messages)} entries; needed are the {place} before the last answer, the answer, "
            "and what is new"
        )
    answer = asked.messages[place]
    if not isinstance(answer, dict) or answer.get("role") != "assistant":
        raise _conflict(f"messages[{place}] must be the last answer, with the role assistant")
    before = await rendered(front, asked, place, asks=True)
    if digest(before) != kept.prompt:
        raise _conflict(f"the {place} messages before the last answer, or the tools, are not those of the trajectory")
    _check_answer(front, answer, kept.answer, place)
    # Many templates leave out thoughts once the user has spoken again. The kept tokens have them anyway.
    plain = replace(asked, messages=[_without_thoughts(message) for message in asked.messages])
    whole = await rendered(front, plain, len(plain.messages), asks=True)
    through = await rendered(front, plain, place + 1, asks=False)
    if whole[: len(through)] != through:
        raise _conflict(
            "this model's chat template writes earlier messages differently once the conversation has gone on: end the "
            "trajectory with its reward, and begin another one"
        )
    ends = front.client.check_ready().eos_token_ids
    end = next((i for i in reversed(range(len(through))) if through[i] in ends), len(through))
    if end < len(through) and kept.tokens[-1] in ends:
        end += 1  # the answer has its end already
    return [*kept.tokens, *whole[end:]]


def _without_thoughts(message: object) -> object:
    """Return a message without the reasoning of the assistant."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    return {key: value for key, value in message.items() if key not in THOUGHTS}


def _check_answer(front: Front, message: dict[str, object], tokens: Sequence[int], place: int) -> None:
    """Raise Conflict for an answer that says something else than its tokens. Tool calls are not compared."""
    content = message.get("content")
    if isinstance(content, str) and content.strip() not in front.tokenizer.decode(tokens, show_special=True):
        raise _conflict(f"messages[{place}] is not the answer that was given")


def _conflict(message: str) -> Conflict:
    return Conflict(f"trajectory_id: {message}", param="messages", code="conversation_changed")
