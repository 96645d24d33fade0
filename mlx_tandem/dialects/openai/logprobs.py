"""Logprobs in the forms that chats, completions and vLLM's `prompt_logprobs` have for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobShape(Protocol):
    """Collects the logprobs of one choice in a dialect's form. None: a token that has none, the first of a prompt."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]: ...


def token_name(token: int) -> str:
    """Return how vLLM writes a token by its id."""
    return f"token_id:{token}"


class ChatLogprobs:
    """`as_ids`: tokens are named by their ids; their bytes are said all the same."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
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
    """`as_ids`: tokens are named by their ids; offsets are those of their text all the same."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False):
        self._text = tokenizer.token_text
        self._name = token_name if as_ids else self._text
        self._offset = 0

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text(token))
        top: list[dict[str, float] | None] = []
        for token, lp in zip(tokens, logprobs, strict=False):
            if lp is None:
                top.append(None)
                continue
            alternatives: dict[str, float] = {}
            for t, p in (*lp.top, (token, lp.model)):  # two tokens may read the same: the more likely one counts
                alternatives.setdefault(self._name(t), max(p, LOWEST))
            top.append(alternatives)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if lp is None else max(lp.model, LOWEST) for lp in logprobs],
            "tokens": [self._name(t) for t in tokens],
            "top_logprobs": top,
        }


def prompt_scores(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[TokenLogprob], k: int
) -> list[dict[int, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, the token itself and the k likeliest."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": tokenizer.token_text(token)}

    result: list[dict[int, dict[str, Any]] | None] = [None]
    for token, lp in zip(prompt[1:], scores, strict=True):
        own = {token: entry(token, lp.model, lp.rank)}
        result.append(own | {t: entry(t, p, i) for i, (t, p) in enumerate(lp.top[:k], 1) if t != token})
    return result
