"""OpenAI's reply shapes for chat and for text completions: whole bodies and stream events.

Event bytes are put together from parts that are encoded once per request; only the text is encoded per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from mlx_tandem.generation.output import ChoiceText
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import FinishReason, TokenLogprob

Details = dict[str, Any]
"""Members of a choice beside its text."""

dumps = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
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


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """`cached`: tokens of the prompt that were not computed for this request."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


class Shape:
    """What differs between the two dialects."""

    id_prefix: str
    object: str
    chunk_object: str
    text_open: bytes
    text_close: bytes
    empty: bytes
    opening: bytes | None  # sent before a choice's first text
    one_prompt: bool  # what is said of the prompt stands beside the choices, else in each of them

    def whole(self, index: int, text: str, finish: FinishReason) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, tokenizer: Tokenizer, as_ids: bool) -> LogprobShape:
        raise NotImplementedError


class ChatShape(Shape):
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_open = b',"delta":{"content":'
    text_close = b"}"
    empty = b',"delta":{}'
    opening = b',"delta":{"role":"assistant","content":""}'
    one_prompt = True

    def whole(self, index: int, text: str, finish: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def logprobs(self, tokenizer: Tokenizer, as_ids: bool) -> LogprobShape:
        return ChatLogprobs(tokenizer, as_ids)


class TextShape(Shape):
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    text_open = b',"text":'
    text_close = b""
    empty = b',"text":""'
    opening = None
    one_prompt = False

    def whole(self, index: int, text: str, finish: FinishReason) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def logprobs(self, tokenizer: Tokenizer, as_ids: bool) -> LogprobShape:
        return TextLogprobs(tokenizer, as_ids)


CHAT = ChatShape()
TEXT = TextShape()


class Events:
    """The event bytes of one streamed reply."""

    def __init__(self, shape: Shape, names: tuple[str, int, str, str | None], choices: int, with_usage: bool):
        """`names`: the reply's id, when it began, its model and its fingerprint."""
        id, created, model, fingerprint = names
        self._start = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,"choices":[' % (
            dumps(id),
            dumps(shape.chunk_object),
            created,
            dumps(model),
            dumps(fingerprint),
        )
        self._index = [self._start + b'{"index":%d' % i for i in range(choices)]
        self._heads = [i + shape.text_open for i in self._index]
        self._text_close = shape.text_close
        self._end_with(b',"usage":null}\n\n' if with_usage else b"}\n\n")
        self._empty = shape.empty
        self._opening = shape.opening

    def _end_with(self, rest: bytes) -> None:
        """Set what comes behind the choices of an event."""
        self._rest = rest
        self._end = b"}]" + rest
        self._unfinished = b',"finish_reason":null' + self._end
        self._plain = self._text_close + b',"logprobs":null' + self._unfinished

    def count(self, counts: dict[str, Any]) -> None:
        """Say this usage in the events from here on."""
        self._end_with(b',"usage":%b}\n\n' % dumps(counts))

    def opening(self, details: Details) -> bytes:
        """Events that come before any text; `details` of the prompt stand beside the choices."""
        if self._opening is None:
            return b""
        end = b',"logprobs":null,"finish_reason":null}]' + _members(details) + self._rest
        return b"".join(i + self._opening + end for i in self._index)

    def text(self, index: int, text: str) -> bytes:
        return self._heads[index] + dumps(text) + self._plain

    def text_with(self, index: int, text: str, details: Details) -> bytes:
        """`details`: "logprobs", which may be None, and whatever else the choice says with this text."""
        head = self._heads[index] + dumps(text) + self._text_close
        return head + _members({"logprobs": None} | details) + self._unfinished

    def finish(self, index: int, choice: ChoiceText, details: Details) -> bytes:
        own = {"logprobs": None} | details | {"finish_reason": choice.finish}
        return self._index[index] + self._empty + _members(own) + self._end

    def outcomes(self, details: Sequence[Details]) -> bytes:
        """What is known of the choices only after all have ended, in one event."""
        choices = [
            b'{"index":%d%b%b}' % (i, self._empty, _members({"logprobs": None, "finish_reason": None} | own))
            for i, own in enumerate(details)
        ]
        return self._start + b",".join(choices) + b"]" + self._rest

    def usage(self, counts: dict[str, Any]) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._start, dumps(counts))


def _members(details: Details) -> bytes:
    """Members that follow others in a JSON object."""
    return b"," + dumps(details)[1:-1] if details else b""
