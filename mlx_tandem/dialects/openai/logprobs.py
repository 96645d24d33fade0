"""Logprobs in the forms of chats, of text completions, and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import TokenLogprob

LOWEST = -9999.0
"""The smallest logprob that is written, which also stands for minus infinity. JSON has no infinity."""


class LogprobShape(Protocol):
    """A writer of one choice's logprobs in the form of a dialect."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return the logprobs of the choice's next tokens. The first token of a prompt has None for a logprob."""
        ...


def token_name(token: int) -> str:
    """Return a token's id in vLLM's notation."""
    return f"token_id:{token}"


class ChatLogprobs:
    """The logprobs of a chat's choice. With `as_ids`, ids stand in for the tokens' texts, but not for their bytes."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return the logprobs of the choice's next tokens."""
        content = [
            self._entry(token, lp.model) | {"top_logprobs": [self._entry(t, p) for t, p in lp.top]}
            for token, lp in zip(tokens, logprobs, strict=False)
            if lp is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        name = token_name(token) if self._as_ids else raw.decode("utf-8", "replace")
        return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(raw)}


class TextLogprobs:
    """The logprobs of a text completion's choice, with the tokens' offsets in its text.

    With `as_ids`, ids stand in for the tokens' texts. The offsets still count the characters of the text. A token that
    begins inside of a character has the offset of this character.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False):
        self._text = tokenizer.token_text
        self._name = token_name if as_ids else self._text
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # of the text of all tokens so far, without a character that is not complete

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return the logprobs of the choice's next tokens."""
        offsets = [self._offset(self._bytes(token)) for token in tokens]
        top: list[dict[str, float] | None] = []
        for token, lp in zip(tokens, logprobs, strict=False):
            if lp is None:
                top.append(None)
                continue
            alternatives: dict[str, float] = {}
            for t, p in (*lp.top, (token, lp.model)):  # Two tokens may have the same text: the more likely one counts.
                alternatives.setdefault(self._name(t), max(p, LOWEST))
            top.append(alternatives)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if lp is None else max(lp.model, LOWEST) for lp in logprobs],
            "tokens": [self._name(t) for t in tokens],
            "top_logprobs": top,
        }

    def _offset(self, raw: bytes) -> int:
        """Return the number of characters before the one in which these next bytes of the text begin."""
        self._length += len(self._decoder.decode(raw[:1]))
        pending = self._decoder.getstate()[0].decode(errors="replace")
        offset = self._length + len(pending) - (1 if raw or pending else 0)
        self._length += len(self._decoder.decode(raw[1:]))
        return offset


def prompt_scores(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[TokenLogprob], k: int
) -> list[dict[int, dict[str, Any]] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt, its own entry and those of the k most likely ones.

    The first token has no logprob, and None stands for its entries.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": tokenizer.token_text(token)}

    result: list[dict[int, dict[str, Any]] | None] = [None]
    for token, lp in zip(prompt[1:], scores, strict=True):
        own = {token: entry(token, lp.model, lp.rank)}
        result.append(own | {t: entry(t, p, i) for i, (t, p) in enumerate(lp.top[:k], 1) if t != token})
    return result
