"""Logprobs as completions and chats show them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
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


@given(st.lists(st.integers(0, 4), max_size=6), st.booleans())
def test_offsets_are_those_of_the_text_whatever_tokens_are_called(tokens: list[int], as_ids: bool) -> None:
    shown = TextLogprobs(TOKENIZER, as_ids=as_ids).take(tokens, [None] * len(tokens))
    assert shown["text_offset"] == [sum(len(TEXTS[t]) for t in tokens[:i]) for i in range(len(tokens))]


def test_the_perplexity_of_what_has_no_probability_is_a_number() -> None:
    answers = Answers(1, 1)
    answers.add([PromptRead(0, 0, (TokenLogprob(-math.inf, -math.inf), TokenLogprob(-1.0, -1.0)))])
    body = json.loads(PerplexityRenderer("base").whole(answers, Usage(3), []))
    assert (body["token_count"], body["avg_nll"], body["ppl"]) == (2, 5000.0, math.exp(700))
