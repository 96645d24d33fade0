"""The part of a completion that is scored."""

from __future__ import annotations

import pytest

from mlx_tandem.training.rewards.answers import NoOptions, TextOptions, contains, exact_match, gsm8k
from mlx_tandem.training.rewards.messages import Sample
from mlx_tandem.training.rewards.patterns import SchemaOptions, json_schema
from mlx_tandem.training.rewards.said import said, unfenced


@pytest.mark.parametrize(
    ("text", "scored"),
    [
        ("<think>17?</think>\n42", "\n42"),
        ("17?</think>42", "42"),
        ("<think>still 17", ""),
        ("42", "42"),
        ("The tag <think>x</think> opens a thought", "The tag <think>x</think> opens a thought"),
    ],
)
def test_a_leading_thought_is_left_out(text: str, scored: str) -> None:
    assert said(text) == scored


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ('```json\n{"a": 1}\n```', '{"a": 1}\n'),
        ('\n```\n{"a": 1}\n```\n', '{"a": 1}\n'),
        ('{"a": "```"}', '{"a": "```"}'),
        ("```\na\n```\nb\n```", "```\na\n```\nb\n```"),
        ("```json", "```json"),
    ],
)
def test_one_fence_around_all_is_taken_off(text: str, inner: str) -> None:
    assert unfenced(text) == inner


def score(completion: str, answer: object) -> tuple[float, float, float]:
    sample = Sample(prompt="", completion=completion, metadata={"answer": answer})
    texts = TextOptions()
    return gsm8k(sample, NoOptions()), exact_match(sample, texts), contains(sample, texts)


def test_numbers_and_texts_inside_a_thought_do_not_count() -> None:
    assert score("<think>42 perhaps</think>17", "42") == (0.0, 0.0, 0.0)
    assert score("<think>17 perhaps</think>42", "42") == (1.0, 1.0, 1.0)
    assert score("<think>42", "42") == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("text", ["1000", "1,000", "1 000", "1\u202f000", "It costs 1 000 euros", "1000.0"])
def test_a_thousand_is_a_thousand(text: str) -> None:
    assert score(text, "1000")[0] == 1.0


def test_digits_side_by_side_are_numbers_of_their_own() -> None:
    assert score("9 5 3 1", "1")[0] == 1.0
    assert score("5 30", "30")[0] == 1.0


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [
        ("a concatenation", "cat", 0.0),
        ("a concatenation of a cat.", "cat", 1.0),
        ("12", "1", 0.0),
        ("1, 2", "1", 1.0),
        ("C++!", "C++", 1.0),
        ("東京都です", "東京", 1.0),
    ],
)
def test_words_are_found_whole(text: str, wanted: str, found: float) -> None:
    assert score(text, wanted)[2] == found


def test_fenced_json_is_json() -> None:
    sample = Sample(prompt="", completion='<think>hm</think>\n```json\n{"a": 1}\n```', metadata={})
    assert json_schema(sample, SchemaOptions({"type": "object", "required": ["a"]})) == 1.0
