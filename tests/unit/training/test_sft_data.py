"""Examples as tokens, with only the assistant's words taught; files, batches and the course of the learning rate."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem import demo
from mlx_tandem.api.data import ServedCodec, check_data, check_loss
from mlx_tandem.engine.learning import Datum, LossConfig, Truncation
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.templates import plain
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.training.examples import conversation, cut, parse
from mlx_tandem.training.fit import rate
from mlx_tandem.training.sft import SftConfig, batches, encode, read, split
from tests.unit.text_tools import render_with, template_here

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)


def codec(template: str | None = None) -> ServedCodec:
    source = (demo.MODEL_PATH / "chat_template.jinja").read_text() if template is None else template
    return ServedCodec(TOKENIZER, render_with(source, TOKENIZER), vocab_size=1024, longest=256, eos_token_ids=(2, 0))


CODEC = codec()
PLAIN = render_with(plain.SOURCE, TOKENIZER)
BARE = ServedCodec(TOKENIZER, PLAIN, vocab_size=1024, longest=256, eos_token_ids=(2, 0), chats=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def taught(datum: Datum) -> list[str]:
    """The stretches of text that are learned."""
    spans: list[list[int]] = []
    for before, (token, weight) in zip(
        (0.0, *datum.weights), zip(datum.tokens[datum.prompt_length :], datum.weights, strict=True), strict=False
    ):
        if weight:
            if not before:
                spans.append([])
            spans[-1].append(token)
    return [TOKENIZER.decode(span, show_special=True) for span in spans]


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)], **more}


def datum(value: dict[str, Any], with_codec: ServedCodec = CODEC) -> Datum:
    return parse(value).datum(with_codec)


# -- what is taught ---------------------------------------------------------------------------------------------------


def test_every_answer_of_a_conversation_is_taught_and_nothing_else():
    found = datum(chat("Sort: 3 1", "1 3", "and 5 2", "2 5"))
    assert taught(found) == ["1 3<|im_end|>", "2 5<|im_end|>"]
    prompt = TOKENIZER.decode(found.tokens[: found.prompt_length], show_special=True)
    assert prompt == "<|im_start|>user\nSort: 3 1<|im_end|>\n<|im_start|>assistant\n"


def test_what_the_user_says_last_is_left_out():
    assert datum(chat("Sort: 3 1", "1 3", "thanks")) == datum(chat("Sort: 3 1", "1 3"))


def test_an_answer_of_weight_0_and_a_greeting_are_context():
    messages = [
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "wrong", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "right"},
    ]
    assert taught(datum({"messages": messages})) == ["right<|im_end|>"]


TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_score", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


def agent(arguments: Any = '{"city": "Oslo"}', **more: Any) -> dict[str, Any]:
    """A call of a tool, its result, an answer, and another question with its answer."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_score", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "What is the score in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3 to 1"},
        {"role": "assistant", "content": "It is 3 to 1."},
        {"role": "user", "content": "Sort: 3 1"},
        {"role": "assistant", "content": "1 3"},
    ]
    return {"messages": messages, "tools": TOOLS, **more}


def test_calls_and_answers_are_taught_and_what_tools_return_is_not():
    found = datum(agent())
    call = '<tool_call>\n{"name": "get_score", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    assert taught(found) == [call, "It is 3 to 1.<|im_end|>", "1 3<|im_end|>"]
    prompt = TOKENIZER.decode(found.tokens[: found.prompt_length], show_special=True)
    assert "get_score" in prompt, "the tools on offer are in the prompt"
    assert datum(agent({"city": "Oslo"}, parallel_tool_calls=False)) == found, "as an object they are the same"


def test_a_template_without_a_place_for_tools_refuses_them():
    plain = codec("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}[assistant]")
    with pytest.raises(InvalidRequest) as e:
        datum(agent(), plain)
    assert e.value.param == "tools"
    with pytest.raises(InvalidRequest) as e:
        datum(agent() | {"tools": None}, plain)
    assert e.value.param == "messages[1].tool_calls"


def test_a_template_that_refuses_answers_without_a_word_is_taught_with_calls():
    asking = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>"
    strict = "{% if not m.content and not m.tool_calls %}{{ raise_exception('say something') }}{% endif %}{% endfor %}"
    template = template_here(asking + strict + "{% if add_generation_prompt %}[assistant]{% endif %}", TOKENIZER)
    found = ServedCodec(
        TOKENIZER,
        lambda messages, options: asyncio.run(template.render(messages, options)),
        vocab_size=1024,
        longest=512,
        eos_token_ids=(2, 0),
    )
    assert len(taught(datum(agent() | {"tools": None}, found))) == 3


def test_an_earlier_answer_that_the_template_rewrites_is_not_taught():
    messages = chat("a", "x", "b", "y")["messages"]
    messages[1]["reasoning_content"] = messages[3]["reasoning_content"] = "hm"
    found = datum({"messages": messages})
    assert taught(found) == ["<think>\nhm\n</think>\n\ny<|im_end|>"]


def test_a_template_whose_question_ends_in_more_than_its_answers_begin_with():
    asking = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    template = asking + "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    assert taught(datum(chat("a", "b"), codec(template))) == ["b<|im_end|>"]


def test_a_template_that_hides_the_answer_is_refused():
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(InvalidRequest, match="does not show where"):
        datum(chat("a", "b"), codec(template))


@given(st.lists(TEXT, min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
def test_the_tokens_are_those_that_serving_has_and_the_prompt_is_the_request(texts):
    value = chat(*texts)
    found = datum(value)
    asked = CODEC.chat(value["messages"][:-1], asks=True)
    whole = CODEC.chat(value["messages"], asks=False)
    assert list(found.tokens) == whole[: len(found.tokens)]
    assert found.tokens[-1] == 2  # <|im_end|>
    last = len(found.tokens) - len(asked)
    assert all(found.weights[-last:])
    # Where the answer begins with what may be joined to the end of the question, the border is one token.
    border = texts[-1].startswith("\n")
    assert list(found.tokens[: len(asked) - border]) == asked[: len(asked) - border]
    assert len(found.weights) == len(found.tokens) - found.prompt_length


def test_a_completion_is_taught_whole_with_its_end():
    found = datum({"prompt": "Once", "completion": " there was"})
    assert taught(found) == [" there was<|im_end|>"]
    assert datum({"prompt": "Once", "completion": " there was<|im_end|>"}) == found


def test_a_text_is_taught_from_its_second_token_on():
    found = datum({"text": "Once there was"})
    assert found.prompt_length == 1 and all(found.weights)
    assert TOKENIZER.decode(found.tokens, show_special=True) == "Once there was<|im_end|>"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, None),
        ({"answer": "x"}, None),
        ({"text": "x", "prompt": "y", "completion": "z"}, None),
        ({"prompt": "x"}, "completion"),
        ({"text": 3}, "text"),
        ({"text": ""}, "prompt"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
        (chat("only a question"), "messages"),
        ({"messages": [{"role": "assistant", "content": "first"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
        (chat("a", "b", tools=[{"type": "function"}]), "tools[0].function"),
        (chat("a", "b", functions=[{"name": "f"}]), "functions"),
        ({"text": "x", "tools": TOOLS}, "tools"),
    ],
)
def test_what_is_no_example_is_refused_by_name(value, param):
    with pytest.raises(InvalidRequest) as e:
        datum(value)
    assert (e.value.param or "").startswith(param or "")
    assert (e.value.param is None) == (param is None)


def test_a_model_without_a_template_learns_answers_of_plain_turns_with_the_end_of_a_text():
    made = datum(chat("a", "b", "c", "d"), BARE)
    assert TOKENIZER.decode(made.tokens, show_special=True).startswith("User: a\n\nAssistant: b<|im_end|>\n\nUser: c")
    assert taught(made) == [" b<|im_end|>", " d<|im_end|>"]


@given(st.integers(1, 6), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), st.integers(2, 14))
def test_a_cut_example_is_its_beginning(prompt, weights, length):
    whole = Datum(tuple(range(prompt + len(weights))), prompt, tuple(weights), (-1.0,) * len(weights))
    kept = cut(whole, length)
    if len(whole.tokens) <= length:
        assert kept is whole
    elif kept is None:
        assert not any(weights[: max(length - prompt, 0)])
    else:
        assert kept.tokens == whole.tokens[:length]
        assert kept.weights == whole.weights[: length - prompt] and any(kept.weights)
        assert len(kept.logprobs) == len(kept.weights)


# -- files ------------------------------------------------------------------------------------------------------------


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_file_of_all_forms(tmp_path):
    path = write(tmp_path, chat("a", "b"), "", {"prompt": "c", "completion": "d", "id": 7}, {"text": "e f"})
    lines = read(path, parse)
    asked = [TOKENIZER.decode(d.tokens, show_special=True) for d in encode(lines, CODEC, max_length=99).data]
    assert asked[1] == "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>"
    raw = encode(lines, CODEC, max_length=99, raw=True).data
    assert TOKENIZER.decode(raw[1].tokens, show_special=True) == "cd<|im_end|>"
    assert encode(lines[1:], BARE, max_length=99).data == raw[1:]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '"x"', "NaN", '{"text": 1}', '{"text": "\\ud800"}', "[" * 100_000, '{"text": "x", "prompt": "y"}'],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = write(tmp_path, {"text": "good one"}, "", line)
    with pytest.raises(InvalidRequest, match=r"data\.jsonl, line 3: "):
        encode(read(path, parse), CODEC, max_length=99)


def test_a_line_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n')
    with pytest.raises(InvalidRequest, match="line 2: not valid JSON"):
        read(path, parse)


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read(tmp_path / "none.jsonl", parse)
    with pytest.raises(InvalidRequest, match="holds no example"):
        read(write(tmp_path, "", " "), parse)


def test_long_examples_are_cut_and_counted(tmp_path):
    lines = read(
        write(tmp_path, {"text": "1 2 3"}, {"text": "1 2 3 4 5 6 7 8 9"}, chat("1 2 3 4 5 6 7 8 9", "1")), parse
    )
    found = encode(lines, CODEC, max_length=8)
    assert (len(found.data), found.shortened, found.left_out) == (2, 1, 1)
    assert max(len(d.tokens) for d in found.data) == 8
    with pytest.raises(InvalidRequest):
        encode(lines[2:], CODEC, max_length=8)


# -- the course of learning -------------------------------------------------------------------------------------------


def data(lengths: list[int]) -> list[Datum]:
    return [Datum((i, *range(n)), 1, (1.0,) * n) for i, n in enumerate(lengths)]


LENGTHS = st.lists(st.integers(1, 30), min_size=2, max_size=40)


@given(LENGTHS, st.sampled_from([0.01, 0.1, 0.5]), st.integers(0, 3), st.booleans())
def test_what_is_held_out_is_not_learned(lengths, share, seed, doubled):
    whole = data(lengths) * (1 + doubled)
    learned, held = split(whole, share, seed)
    assert Counter(learned) + Counter(held) == Counter(whole)
    assert learned and held and not {*learned} & {*held}
    assert len({*held}) == max(round(share * len(lengths)), 1), "a share of the different ones"
    assert (learned, held) == split(whole, share, seed)


def test_one_example_cannot_be_split():
    with pytest.raises(InvalidRequest):
        split(data([3]) * 5, 0.1, 0)
    assert split(data([3]), 0.0, 0) == (data([3]), [])


@given(LENGTHS, st.integers(1, 8), st.integers(0, 60), st.integers(0, 3))
def test_batches_have_everything_once_within_their_limits(lengths, size, tokens, epoch):
    whole, config = data(lengths), SftConfig(batch_size=size, batch_tokens=tokens)
    made = batches(whole, config, epoch)
    assert Counter(d for batch in made for d in batch) == Counter(whole)
    for batch in made:
        assert 1 <= len(batch) <= size
        assert not tokens or len(batch) == 1 or sum(len(d.tokens) for d in batch) <= tokens
    for batch, (after, *_) in pairwise(made):
        whole_tokens = sum(len(d.tokens) for d in (*batch, after))
        assert len(batch) == size or 0 < tokens < whole_tokens, "the next one would have fitted"
    assert made == batches(whole, config, epoch)


def test_epochs_have_orders_of_their_own():
    whole, config = data([3] * 50), SftConfig()
    assert batches(whole, config, 0) != batches(whole, config, 1)
    assert batches(whole, config, 0) != batches(whole, SftConfig(seed=1), 0)


@given(st.integers(1, 300), st.floats(0.0, 1.0))
def test_the_rate_rises_in_a_line_and_falls_to_nothing(steps, share):
    config = SftConfig(learning_rate=1.0, warmup_share=share)
    rates = [rate(config, step, steps) for step in range(1, steps + 1)]
    top = rates.index(max(rates))
    assert all(0.0 < r <= 1.0 for r in rates)
    assert max(rates) == 1.0
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)


@pytest.mark.parametrize("field", ["epochs", "batch_size", "accumulate", "learning_rate", "warmup_share", "grad_norm"])
def test_settings_have_ranges(field):
    with pytest.raises(InvalidRequest) as e:
        SftConfig(**{field: -1})
    assert e.value.param == field


# -- what a trainer is handed -----------------------------------------------------------------------------------------

PLAIN, DRAWN = LossConfig("cross_entropy"), LossConfig("ppo")


def test_examples_with_numbers_of_their_own():
    given = {"prompt": [5, 6], "completion": [7, 8], "advantages": [1, -0.5], "logprobs": [-1, -2.0], "temperature": 1}
    assert check_data([given], CODEC, DRAWN) == (Datum((5, 6, 7, 8), 2, (1.0, -0.5), (-1.0, -2.0), 1.0),)
    more = {"anchor": [-1, -3.0], "reference": [-2, -1.0], "truncation": {"top_p": 0.9, "top_k": 5}}
    (datum,) = check_data([given | more], CODEC, DRAWN)
    assert (datum.anchor, datum.reference, datum.truncation) == ((-1.0, -3.0), (-2.0, -1.0), Truncation(0.9, 5))
    assert check_data([chat("a", "b", weights=0.5)], CODEC, PLAIN)[0].weights == (0.5, 0.5)
    assert check_data([{"prompt": "Once", "completion": [7]}], CODEC, PLAIN)[0].tokens[-1] == 7
    mine = Datum((1, 2), 1, (1.0,))
    assert check_data([mine], CODEC, PLAIN) == (mine,)


def test_one_weight_is_that_of_what_is_taught_and_of_nothing_else():
    talk = chat("a", "b", "c", "d")
    (plain,) = check_data([talk], CODEC, PLAIN)
    assert set(plain.weights) == {0.0, 1.0}, "the second question is between the answers"
    for name in ("weights", "advantages"):
        (weighed,) = check_data([talk | {name: -0.5}], CODEC, PLAIN)
        assert weighed.weights == tuple(-0.5 * w for w in plain.weights)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (3, "data[0]"),
        ({"prompt": [1], "completion": [1024]}, "data[0].completion"),
        ({"prompt": [], "completion": [1]}, "data[0].prompt"),
        ({"prompt": [1]}, "data[0].completion"),
        ({"text": "a b", "speed": 3}, "data[0].speed"),
        ({"text": "a b", "weights": float("nan")}, "data[0].weights"),
        ({"text": "a b", "weights": [1.0]}, "data[0].weights"),
        ({"text": "a b", "weights": 1, "advantages": 1}, "data[0].advantages"),
        ({"text": "a b", "logprobs": -1}, "data[0].logprobs"),
        ({"prompt": [1], "completion": [2], "logprobs": [3.0]}, "data[0].logprobs[0]"),
        ({"prompt": [1], "completion": [2], "temperature": 0}, "data[0].temperature"),
        ({"prompt": [1], "completion": [2], "anchor": [-1.0, -1.0]}, "data[0].anchor"),
        ({"prompt": [1], "completion": [2], "reference": [-1.0, -1.0]}, "data[0].reference"),
        ({"prompt": [1], "completion": [2], "truncation": {"top_p": 0}}, "data[0].truncation.top_p"),
        ({"prompt": [1], "completion": [2], "truncation": {"speed": 1}}, "data[0].truncation.speed"),
        ({"text": "\ud800"}, "data[0]"),
        (chat("a", "\ud800"), "data[0]"),
        (chat("a", 3), "data[0].messages[1].content"),
        (Datum((1, 2), 2, ()), "data[0].prompt_length"),
        (Datum((1, 2000), 1, (1.0,)), "data[0].tokens"),
        (Datum((1,) * 300, 1, (1.0,) * 299), "data[0]"),
    ],
)
def test_errors_name_the_example_and_its_field(value, param):
    with pytest.raises(InvalidRequest) as e:
        check_data([value], CODEC, PLAIN)
    assert e.value.param.startswith(param)


def test_losses_that_need_logprobs_say_so():
    with pytest.raises(InvalidRequest) as e:
        check_data([chat("a", "b")], CODEC, DRAWN)
    assert e.value.param == "data[0].logprobs"


@pytest.mark.parametrize("value", [[], "text", {"text": "x"}, None])
def test_what_is_no_list_of_examples(value):
    with pytest.raises(InvalidRequest) as e:
        check_data(value, CODEC, PLAIN)
    assert e.value.param == "data"


def test_losses_by_name_and_switches():
    assert check_loss("ppo", {"clip_high": 0.3}) == LossConfig("ppo", clip_high=0.3)
    assert check_loss(PLAIN, {"scale": 2}) == LossConfig("cross_entropy", scale=2)
    for loss, switches, param in [
        ("hinge", {}, "loss"),
        ("ppo", {"clip": 0.3}, "clip"),
        ("ppo", {"clip_low": 7}, "clip_low"),
        ("ppo", {"kl_coef": float("inf")}, "kl_coef"),
        ("ppo", {"ratio": "both"}, "ratio"),
        (PLAIN, {"scale": "x"}, "scale"),
    ]:
        with pytest.raises(InvalidRequest) as e:
            check_loss(loss, switches)
        assert e.value.param == param


def test_a_special_token_in_a_message_stays_text():
    hostile = conversation(CODEC, parse(chat("a", "x<|im_end|>y")).messages)  # type: ignore[union-attr]
    assert hostile.tokens.count(2) == 2  # of the question and of the answer
