"""Logprobs as completions and chats show them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from mlx_tandem.dialects.openai.logprobs import ChatLogprobs, TextLogprobs
from mlx_tandem.dialects.parallm.perplexity import PerplexityRenderer
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import PromptRead, Usage
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import TokenLogprob

TEXTS = ["a", "b", "b", "�", "�"]
"""The text of each token: some read the same."""

TOKENIZER = cast(
    Tokenizer, SimpleNamespace(token_text=TEXTS.__getitem__, token_bytes=lambda t: TEXTS[t].encode() + bytes([t]))
)


@given(st.permutations(range(5)), st.lists(st.floats(-20, 0), min_size=5, max_size=5), st.integers(0, 5))
def test_of_alternatives_that_read_the_same_the_likeliest_counts(
    order: list[int], logprobs: list[float], k: int
) -> None:
    top = tuple(sorted(((t, p) for t, p in zip(order, logprobs, strict=True)), key=lambda pair: -pair[1]))
    own, model = top[-1]
    shown: dict[str, Any] = TextLogprobs(TOKENIZER).take([own], [TokenLogprob(model, model, top[:k])])
    said = (*top[:k], (own, model))
    assert shown["top_logprobs"] == [{TEXTS[t]: max(p for u, p in said if TEXTS[u] == TEXTS[t]) for t, _ in said}]
    chat = ChatLogprobs(TOKENIZER).take([own], [TokenLogprob(model, model, top[:k])])
    assert [entry["logprob"] for entry in chat["content"][0]["top_logprobs"]] == [p for _, p in top[:k]]


PIECES = [b"a", b"bc", "é".encode(), b"", *("😀".encode()[i : i + 1] for i in range(4)), b"\x9f\x98", b"\xe2", b"\xff"]
PIECES += ["\ufffd".encode(), b"\xef\xbf", b"\xbd", b"\xbdx\xe2", b"\xed", b"\xa0"]
"""The bytes of tokens that split characters, complete them, or do not fit."""

SPLITTING = cast(
    Tokenizer,
    SimpleNamespace(token_text=lambda t: PIECES[t].decode(errors="replace"), token_bytes=PIECES.__getitem__),
)


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=8), st.booleans(), st.integers(0, 8))
@example([15, 13], False, 0)
def test_offsets_count_characters_of_the_text(tokens: list[int], as_ids: bool, cut: int) -> None:
    writer = TextLogprobs(SPLITTING, as_ids=as_ids)
    parts = [writer.take(part, [None] * len(part))["text_offset"] for part in (tokens[:cut], tokens[cut:])]
    raw = [PIECES[t] for t in tokens]
    text = b"".join(raw).decode(errors="replace")
    starts = [len(b"".join(raw[:i])) for i in range(len(raw))]
    # The characters of the text by the bytes that they begin with.
    begins: list[int] = []
    for end in range(1, len(b"".join(raw)) + 1):
        grown = len(b"".join(raw)[:end].decode(errors="replace"))
        begins += [end - 1] * (grown - len(begins))
    assert len(begins) == len(text)
    for given_offset, start, piece in zip(parts[0] + parts[1], starts, raw, strict=True):
        if piece:
            assert given_offset == sum(begin <= start for begin in begins) - 1


def test_offsets_after_a_character_of_several_tokens() -> None:
    tokens = [0, 4, 5, 6, 7, 1, 9, 0]  # a, the four bytes of an emoji, bc, a byte of a character that is not ended, a
    assert TextLogprobs(SPLITTING).take(tokens, [None] * len(tokens))["text_offset"] == [0, 1, 1, 1, 1, 2, 4, 5]


def test_the_perplexity_of_what_has_no_probability_is_a_number() -> None:
    answers = Answers(1, 1)
    answers.add([PromptRead(0, 0, (TokenLogprob(-math.inf, -math.inf), TokenLogprob(-1.0, -1.0)))])
    body = json.loads(PerplexityRenderer("base").whole(answers, Usage(3), []))
    assert (body["token_count"], body["avg_nll"], body["ppl"]) == (2, 5000.0, math.exp(700))
