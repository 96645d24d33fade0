from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.generation.output import ChoiceText, TextOptions
from mlx_tandem.types import Delta, TokenLogprob
from tests.unit.text_tools import byte_level

END = byte_level().special_tokens["<|im_end|>"]


def delta(*tokens: int, finish: str | None = None, logprobs: bool = False) -> Delta:
    scores = tuple(TokenLogprob(-float(t), -float(t)) for t in tokens) if logprobs else None
    return Delta(1, 0, tokens, scores, finish)


def choice(*stops: str, min_tokens: int = 0, **options: bool) -> ChoiceText:
    return ChoiceText(byte_level(), TextOptions(stops, **options), {END}, min_tokens)


def test_the_token_that_ends_the_choice_counts_and_is_not_shown():
    ids = byte_level().encode("hello")
    c = choice()
    text = "".join([c.push(delta(i)) for i in ids]) + c.push(delta(END, finish="stop"))
    assert (text, c.count, c.finish, c.stopped) == ("hello", len(ids) + 1, "stop", False)


def test_an_ordinary_token_may_end_the_choice():
    ids = byte_level().encode("hello world")
    c = ChoiceText(byte_level(), TextOptions(), {ids[-1]})
    text = c.push(delta(*ids, finish="stop"))
    assert text == byte_level().decode(ids[:-1])


def test_the_last_token_of_a_choice_at_its_length_is_shown():
    ids = byte_level().encode("hello")
    c = choice()
    assert c.push(delta(*ids, finish="length")) == "hello"


def test_a_token_that_could_have_ended_a_choice_at_its_length_is_shown():
    """The length has ended it, and not this token."""
    ids = byte_level().encode("hello world")
    c = ChoiceText(byte_level(), TextOptions(), {ids[-1]})
    assert (c.push(delta(*ids, finish="length")), c.finish) == ("hello world", "length")


def test_half_a_character_at_the_end_is_flushed():
    ids = byte_level().encode("a🦊")[:-1]
    c = choice()
    assert c.push(delta(*ids, finish="length")) == byte_level().decode(ids)


def test_a_stop_string_ends_the_choice_before_the_engine_knows():
    ids = byte_level().encode("one two")
    c = choice("e t")
    text = "".join([c.push(delta(i, logprobs=True)) for i in ids if c.finish is None])
    assert (text, c.finish, c.stopped) == ("on", "stop", True)
    assert c.count < len(ids)


def test_tokens_behind_a_stop_string_in_the_same_delta_do_not_count():
    ids = byte_level().encode("abxcd")
    c = choice("x")
    assert c.push(delta(*ids, logprobs=True, finish="length")) == "ab"
    kept = len(byte_level().encode("abx"))
    assert (c.count, len(c.last_tokens), len(c.last_logprobs)) == (kept, kept, kept)
    assert (c.finish, c.stopped) == ("stop", False)


@given(st.text("ab<é🦊 ", max_size=20), st.lists(st.text("ab<é🦊", min_size=1, max_size=3), max_size=3), st.data())
@settings(max_examples=200)
def test_any_grouping_of_tokens_gives_the_same_text(text, stops, data):
    ids = byte_level().encode_plain(text)
    one_by_one = choice(*stops)
    expected = "".join([one_by_one.push(delta(i)) for i in ids if one_by_one.finish is None])
    expected += one_by_one.push(delta(finish="length")) if one_by_one.finish is None else ""
    grouped = choice(*stops)
    shown = ""
    rest = ids
    while grouped.finish is None:
        k = data.draw(st.integers(1, max(len(rest), 1)))
        part, rest = rest[:k], rest[k:]
        shown += grouped.push(delta(*part, finish=None if rest else "length"))
    assert (shown, grouped.finish, grouped.count) == (expected, one_by_one.finish, one_by_one.count)


def test_a_stop_string_does_not_end_a_choice_before_its_min_tokens():
    ids = byte_level().encode("b") * 5
    assert len(ids) == 5
    for least in range(6):
        c = choice("b", min_tokens=least)
        text = "".join(c.push(delta(i)) for i in ids if c.finish is None)
        assert (text, c.count, c.finish) == ("b" * least, min(least + 1, 5), "stop" if least < 5 else None)
        again = choice("b", min_tokens=least)
        assert again.push(delta(*ids)) == text


def test_what_ended_the_choice_is_shown_when_asked_for():
    ids = byte_level().encode("hello world")
    c = choice("lo w", include_stop=True)
    assert "".join(c.push(delta(i)) for i in ids if c.finish is None) == "hello w"
    hidden = choice(include_stop=True)
    assert hidden.push(delta(*ids, END, finish="stop")) == "hello world"
    shown = choice(include_stop=True, show_special=True)
    assert shown.push(delta(*ids, END, finish="stop")) == "hello world<|im_end|>"
    special = choice(show_special=True)
    assert special.push(delta(END, *ids, END, finish="stop")) == "<|im_end|>hello world"


def test_half_a_character_at_the_end_may_complete_a_stop_string():
    ids = byte_level().encode("a🦊")[:-1]
    c = choice("\ufffd")
    assert (c.push(delta(*ids, finish="length")), c.finish, c.stop) == ("a", "stop", "\ufffd")
