"""Reward models: adapters with a score head. A score is the head's product with the hidden state of a last token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from operator import mul

from mlx_tandem.adapters.registry import Entry
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.embeddings import EmbeddingOptions, embedding_request
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.types import EngineInfo

OPTIONS = EmbeddingOptions("last", normalize=False)
"""The form of the hidden states that heads read."""


def head_of(entry: Entry | None, name: str, param: str) -> array[float]:
    """Return the score head of an adapter. Raises InvalidRequest naming `param` for one without, and for the base."""
    if entry is None or not entry.info.score_head:
        raise InvalidRequest(f"{name[:140]!r} is no reward model: it has no score head", param=param)
    return array("f", entry.info.score_head)


def scoring_request(
    info: EngineInfo, texts: Sequence[Sequence[int]], entry: Entry, *, priority: int = 0, background: bool = False
) -> Prompted:
    """Return the request for the hidden states by which texts, as token ids, are scored.

    With `background` it runs in learning's share of the device.
    """
    return embedding_request(info, texts, entry.ref, OPTIONS, priority=priority, background=background)


def scores(answers: Answers, head: array[float]) -> list[float]:
    """Return the score of each text."""
    return [math.fsum(map(mul, head, array("f", prompt.embedding))) for prompt in answers.prompts]


class RewardModels:
    """The reward models of a server, which scoring functions name."""

    def __init__(self, front: Front):
        self._front = front

    def check(self, name: str) -> None:
        """Raise InvalidRequest naming `scoring_function` unless `name` is a reward model that is loaded."""
        self._entry(name)

    async def scores(self, name: str, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each prompt with its completion, which are read in learning's share of the device.

        An answer is read to the token that ends it, which is added where the answer was cut off. Raises TandemError.
        """
        front, entry = self._front, self._entry(name)
        texts = [closed(front, sequence) for sequence in sequences]
        prompted = scoring_request(front.client.check_ready(), texts, entry, background=True)
        return scores(await front.answers(prompted), head_of(entry, name, "scoring_function"))

    def _entry(self, name: str) -> Entry:
        try:
            entry = self._front.models.registry.entry(name)
        except NotFound:
            raise InvalidRequest(
                f"the reward model {name[:140]!r} is not loaded: start the server with --adapter, or load it by POST "
                "/v1/adapters",
                param="scoring_function",
            ) from None
        head_of(entry, name, "scoring_function")
        return entry


def closed(front: Front, sequence: Sequence[int]) -> list[int]:
    """Return a prompt with its completion, and behind it a token that ends an answer unless it ends with one."""
    ends = _ends(front)
    return [*sequence] if not ends or sequence[-1] in ends else [*sequence, ends[0]]


def to_last_end(front: Front, conversation: Sequence[int]) -> list[int]:
    """Return a conversation without the spaces that its template writes behind the token that ends the last answer."""
    ends = frozenset(_ends(front))
    last = max((i for i, token in enumerate(conversation) if token in ends), default=len(conversation) - 1)
    behind = front.tokenizer.decode(conversation[last + 1 :], show_special=True)
    return [*conversation] if behind.strip() else [*conversation[: last + 1]]


def _ends(front: Front) -> list[int]:
    """Return the tokens that end an answer, the tokenizer's own first."""
    tokenizer, ends = front.tokenizer, front.client.check_ready().eos_token_ids
    named = tokenizer.special_tokens.get(tokenizer.special_texts().get("eos_token", ""))
    return [*ends] if named is None else [named, *ends]
