"""OpenAI's reply shapes for chat and for text completions: whole bodies and stream events.

Event bytes are put together from parts that are encoded once per request; only the text is encoded per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from mlx_tandem.text.output import ChoiceText
from mlx_tandem.text.tokenizer import Tokenizer
from mlx_tandem.types import FinishReason, TokenLogprob

dumps = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobShape(Protocol):
    """Collects the logprobs of one choice in a dialect's form."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]: ...


class ChatLogprobs:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            self._entry(token, lp.model) | {"top_logprobs": [self._entry(t, p) for t, p in lp.top]}
            for token, lp in zip(tokens, logprobs, strict=False)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


class TextLogprobs:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = [self._text(t) for t in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        top: list[dict[str, float]] = []
        for token, lp in zip(tokens, logprobs, strict=False):
            alternatives: dict[str, float] = {}
            for t, p in (*lp.top, (token, lp.model)):  # two tokens may read the same: the more likely one counts
                alternatives.setdefault(self._text(t), max(p, LOWEST))
            top.append(alternatives)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(lp.model, LOWEST) for lp in logprobs],
            "tokens": texts,
            "top_logprobs": top,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Shape:
    """What differs between the two dialects."""

    id_prefix: str
    object: str
    chunk_object: str
    text_open: bytes
    text_close: bytes
    empty: bytes
    opening: bytes | None  # sent before a choice's first text

    def whole(self, index: int, text: str, logprobs: Any, finish: FinishReason) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, tokenizer: Tokenizer) -> LogprobShape:
        raise NotImplementedError


class ChatShape(Shape):
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_open = b',"delta":{"content":'
    text_close = b"}"
    empty = b',"delta":{}'
    opening = b',"delta":{"role":"assistant","content":""}'

    def whole(self, index: int, text: str, logprobs: Any, finish: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, tokenizer: Tokenizer) -> LogprobShape:
        return ChatLogprobs(tokenizer)


class TextShape(Shape):
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    text_open = b',"text":'
    text_close = b""
    empty = b',"text":""'
    opening = None

    def whole(self, index: int, text: str, logprobs: Any, finish: FinishReason) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, tokenizer: Tokenizer) -> LogprobShape:
        return TextLogprobs(tokenizer)


CHAT = ChatShape()
TEXT = TextShape()


class Events:
    """The event bytes of one streamed reply."""

    def __init__(self, shape: Shape, id: str, created: int, model: str, choices: int, with_usage: bool):
        self._start = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            dumps(id),
            dumps(shape.chunk_object),
            created,
            dumps(model),
        )
        self._index = [self._start + b'{"index":%d' % i for i in range(choices)]
        self._heads = [i + shape.text_open for i in self._index]
        self._close = shape.text_close + b',"logprobs":'
        self._end = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._unfinished = b',"finish_reason":null' + self._end
        self._plain = self._close + b"null" + self._unfinished
        self._empty = shape.empty
        self._opening = shape.opening

    def opening(self) -> bytes:
        """Events that come before any text."""
        if self._opening is None:
            return b""
        return b"".join(i + self._opening + b',"logprobs":null' + self._unfinished for i in self._index)

    def text(self, index: int, text: str) -> bytes:
        return self._heads[index] + dumps(text) + self._plain

    def text_with_logprobs(self, index: int, text: str, logprobs: dict[str, Any]) -> bytes:
        return self._heads[index] + dumps(text) + self._close + dumps(logprobs) + self._unfinished

    def finish(self, index: int, choice: ChoiceText, logprobs: dict[str, Any] | None) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._index[index],
            self._empty,
            dumps(logprobs),
            dumps(choice.finish),
            self._end,
        )

    def usage(self, prompt: int, completion: int) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._start, dumps(usage(prompt, completion)))
