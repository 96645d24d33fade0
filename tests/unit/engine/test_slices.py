"""The groups of tokens that llguidance allows at once do not change any mask."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from mlx_tandem import demo
from mlx_tandem.engine.grammars import compiling
from mlx_tandem.engine.grammars.compiling import SLICES, compiled, open_tokenizer
from mlx_tandem.generation.grammar.constraint import Constraint, Schema
from mlx_tandem.generation.grammar.lark import grammar_of
from mlx_tandem.strict_json import dumps

VOCAB = 1024


@pytest.fixture(scope="module")
def sliced() -> LLTokenizer:
    return open_tokenizer(demo.MODEL_PATH, VOCAB, [2])


@pytest.fixture(scope="module")
def plain(sliced: LLTokenizer) -> LLTokenizer:
    return sliced.with_slices([])


def test_tokenizers_are_opened_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given_slices: list[Any] = []

    def opened(*args: Any, slices: Any, **options: Any) -> LLTokenizer:
        given_slices.append(slices)
        return LLTokenizer(*args, slices=slices, **options)

    monkeypatch.setattr(compiling, "LLTokenizer", opened)
    open_tokenizer(demo.MODEL_PATH, VOCAB, [2])
    assert given_slices == [SLICES] and len(SLICES) > len(LLTokenizer.general_slices())


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from([None, "^[a-z ]*$", "^é*x"]), st.integers(0, 2**32))
@settings(max_examples=60)
def test_slices_change_no_mask(
    sliced: LLTokenizer, plain: LLTokenizer, least: int, more: int, pattern: str | None, seed: int
) -> None:
    string = {"type": "string", "minLength": least, "maxLength": least + more}
    schema = {"type": "array", "items": string if pattern is None else {"type": "string", "pattern": pattern}}
    grammar = grammar_of(Constraint(Schema(dumps(schema)), "guided_json"), {})
    fast, slow = compiled(sliced, grammar), compiled(plain, grammar)
    rng = Random(seed)
    for _ in range(30):
        mask = fast.compute_bitmask()
        assert mask == slow.compute_bitmask()
        allowed = [token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1 and token != 2]
        if not allowed:
            break
        token = rng.choice(allowed)
        assert fast.consume_token(token) and slow.consume_token(token)
