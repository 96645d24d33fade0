"""Parsers of thoughts: every family's form, however it is cut, and when the prompt has begun the thought."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.generation.answer_reading import AnswerReading
from mlx_tandem.generation.parsers import Parser
from mlx_tandem.generation.reasoning.table import FORMS, HARMONY
from tests.unit.generation.reading_tools import Heard, cuts, heard, joined, text_of
from tests.unit.generation.tools.test_families import TOOLS
from tests.unit.text_tools import byte_level


def parser(name: str, *, opened: bool = False, calls: str = "none") -> Parser:
    reading = AnswerReading(byte_level(), "", calls=calls, thoughts=name)
    make = reading.parser(TOOLS if calls != "none" else None, opened=opened)
    assert make is not None
    return make(0)


def written(name: str, thought: str, answer: str) -> str:
    if name == HARMONY:
        return (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"
            "<|return|>"
        )
    form = FORMS[name]
    return f"{form.open}\n{thought}\n{form.close}\n\n{answer}"


@pytest.mark.parametrize("name", FORMS)
def test_a_familys_form(name: str) -> None:
    text = written(name, "two sums", "So 4.")
    expected: Heard = [("thought", "two sums"), ("text", "So 4.")]
    opened = FORMS[name].always_opened
    if opened:
        text = text.removeprefix(FORMS[name].open)
    assert heard(parser(name, opened=opened), [text]) == expected
    assert heard(parser(name, opened=opened), text) == expected


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {HARMONY}))
def test_a_thought_that_the_prompt_began(name: str) -> None:
    form = FORMS[name]
    assert form.is_opened(f"<|im_start|>assistant\n{form.open}\n")
    assert not form.is_opened(f"<|im_start|>assistant\n{form.open}\n\n{form.close}\n\n")
    assert form.is_opened("<|im_start|>assistant\n") == form.always_opened
    found = heard(parser(name, opened=True), f"hm\n{form.close}\nYes")
    assert found == [("thought", "hm"), ("text", "Yes")]
    assert heard(parser(name, opened=True), "cut off") == [("thought", "cut off")]


PIECES = (
    "x",
    " ",
    "\n",
    "<think>",
    "</think>",
    "<th",
    "ink>",
    "</",
    "<tool_call>",
    "[THINK]",
    "[/THINK]",
    "Here",
    " is my thought process:",
    " is my response:",
    "Here's my thought process:",
    "<|channel>thought\n",
    "<channel|>",
    "<response>",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|tool_calls_section_begin|>",
    '<tool_call>{"name": "now"}</tool_call>',
)
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize("call", ["<tool_call>", '<tool_call>{"name": "now"}</tool_call>'])
def test_a_thought_ends_in_the_piece_in_which_a_call_begins(call: str) -> None:
    said = heard(parser("think", opened=True, calls="hermes"), [f"a{call}b</think>c"])
    assert said == [("thought", f"a{call}b"), ("text", "c")]


@pytest.mark.promise("E3")
@pytest.mark.parametrize("name", FORMS)
@given(text=texts, opened=st.booleans(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_every_split_says_the_same(name: str, text: str, opened: bool, data: st.DataObject) -> None:
    whole = heard(parser(name, opened=opened), [text])
    assert heard(parser(name, opened=opened), data.draw(cuts(text))) == whole
    assert heard(parser(name, opened=opened), text) == whole
    assert heard(parser(name, opened=opened, calls="hermes"), data.draw(cuts(text))) == heard(
        parser(name, opened=opened, calls="hermes"), [text]
    )
    kinds = [event[0] for event in whole]
    if name != HARMONY:
        assert kinds in ([], ["thought"], ["text"], ["thought", "text"]), "thoughts come first, and nowhere else"
        begins = opened or text.lstrip().startswith(FORMS[name].opens)
        assert begins or FORMS[name].frame or text_of(whole) == text


@pytest.mark.promise("E2")
@pytest.mark.parametrize("name", sorted(FORMS.keys() - {HARMONY}))
def test_the_work_is_linear_in_the_text(name: str) -> None:
    for part in (*FORMS[name].marks, " ", "\n", "x", FORMS[name].open[:-1], FORMS[name].close[:-1]):
        made = parser(name)
        text = part * (6000 // len(part))
        for at in range(0, len(text), 5):
            list(made.push(text[at : at + 5]))
        list(made.flush())
        assert made.scan.scanned <= 30 * len(text), part  # type: ignore[attr-defined]


@pytest.mark.parametrize("space", ["", "\n", " \n\n"])
def test_white_space_around_a_thought_means_nothing(space: str) -> None:
    text = f"{space}<think>{space}a b{space}</think>{space}c d{space}"
    assert heard(parser("think"), text) == [("thought", "a b"), ("text", f"c d{space}")]
    assert heard(parser("think"), f"{space}no thought") == [("text", f"{space}no thought")]


def test_calls_are_looked_for_behind_the_thought() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    found = heard(parser("think", calls="hermes"), f"<think>{call}</think>\n\n{call}")
    assert found == [("thought", call), ("call", "now", "{}")]


UNCLOSED = [
    ("hm <tool_call>{now}</tool_call> hm", [("thought", "hm <tool_call>{now}</tool_call> hm")]),
    ("I call <tool_call> now", [("thought", "I call <tool_call> now")]),
    (
        'hm\n<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "weather", "arguments": {"city": "</th"}}',
        [("thought", "hm"), ("call", "now", "{}"), ("call", "weather", '{"city": "</th"}')],
    ),
    ('<tool_call>{"name": "now"}</tool_call> Done.', [("call", "now", "{}"), ("text", "Done.")]),
    ('I use <tool_call> so: <tool_call>{"name": "now"}', [("thought", "I use <tool_call> so:"), ("call", "now", "{}")]),
]


@pytest.mark.parametrize(("text", "expected"), UNCLOSED, ids=str)
def test_a_call_ends_a_thought_without_an_end(text: str, expected: Heard) -> None:
    assert heard(parser("think", calls="hermes", opened=True), [text]) == expected
    assert heard(parser("think", calls="hermes", opened=True), text) == expected


def test_a_mention_of_a_call_does_not_keep_a_thought_back() -> None:
    reader = parser("think", calls="hermes", opened=True)
    said = [*reader.push("I could use <tool_call> for"), *reader.push(" this, or not."), *reader.push(" So:")]
    assert joined(said) == [("thought", "I could use <tool_call> for this, or not. So:")]


def test_an_empty_section_in_a_thought_does_not_keep_it_back() -> None:
    text = "Answer within <tool_call></tool_call> tags. And so on"
    reader = parser("think", calls="hermes", opened=True)
    said = [event for at in range(0, len(text), 6) for event in reader.push(text[at : at + 6])]
    assert joined(said) == [("thought", text)]


AROUND = [
    ("<think>a</think>b <think>c</think>", False, [("thought", "a"), ("text", "b <think>c</think>")]),
    ("Write <think>a</think>.", False, [("text", "Write <think>a</think>.")]),
    ("<think>\na", True, [("thought", "a")]),
    ("a <think> b</think>c", True, [("thought", "a <think> b"), ("text", "c")]),
    ("<think>a</think>\n<think>b</think>\nc", False, [("thought", "ab"), ("text", "c")]),
    ("a</think>\n</think>\n\nb", True, [("thought", "a"), ("text", "b")]),
    ("<think></think>a", False, [("text", "a")]),
]


@pytest.mark.parametrize("text", ["<think>Use <tool_call>.</think>Hi", '<think><tool_call>{"name": "now"}</think>Hi'])
def test_the_end_of_a_thought_counts_behind_what_may_be_a_call(text: str) -> None:
    thought, answer = text.removeprefix("<think>").split("</think>")
    for size in (1, 2, 5, 9, 100):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert heard(parser("think", calls="hermes"), pieces) == [("thought", thought), ("text", answer)]


def test_calls_behind_the_one_that_ends_a_thought_go_on_with_its_numbers() -> None:
    calls = (
        '<tool_call>{"name": "now"}</tool_call>\n{"name": "now", "arguments": {}}<tool_call>{"name": "now"}</tool_call>'
    )
    found = heard(parser("think", calls="hermes", opened=True), f"a {calls}")
    assert [event[0] for event in found if event[0] == "call"] == ["call", "call"]
    assert text_of(found) == '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize(("text", "opened", "expected"), AROUND, ids=str)
def test_thoughts_are_at_the_beginning_only(text: str, opened: bool, expected: Heard) -> None:
    assert heard(parser("think", opened=opened), [text]) == expected
    assert heard(parser("think", opened=opened), text) == expected


def test_marks_around_an_answer_are_left_out_only_there() -> None:
    text = "<think>a</think><response>b </response> c</response>\n"
    assert heard(parser("granite_tags"), text) == [("thought", "a"), ("text", "b </response> c")]


def test_a_call_ends_a_thought_of_kimi() -> None:
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    found = heard(parser("kimi_k2", calls="kimi_k2", opened=True), f"hm {call}<|tool_call_end|>")
    assert found == [("thought", "hm"), ("call", "now", "{}")]


def test_messages_of_harmony_keep_their_channels_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    )
    expected: Heard = [("thought", "Hm."), ("text", "I look."), ("call", "now", "{}")]
    assert heard(parser(HARMONY, calls="openai"), text) == expected
    assert heard(parser(HARMONY), text) == [("thought", "Hm."), ("text", "I look.\n{}")], "no tools were offered"


TEMPLATES = {
    "{{ tools }}<tool_call>\n{'name': tool_call.name}": ("hermes", "none"),
    "{{ tools }}<tool_call>\n<function=example> </think>": ("qwen3_coder", "think"),
    "{{ tools }}<arg_key> </think> <tool_call>": ("glm45", "think"),
    "[AVAILABLE_TOOLS] [TOOL_CALLS] [": ("mistral", "none"),
    "[TOOL_CALLS] [ARGS] [THINK] [/THINK]": ("mistral_args", "mistral"),
    "<|tool_calls_section_begin|> </think>": ("kimi_k2", "kimi_k2"),
    "<minimax:tool_call> </think>": ("minimax_m2", "think"),
    "<|tool_call> <tool_call|> <|channel> <channel|>": ("gemma4", "gemma4"),
    "<|start|>assistant<|channel|>analysis<|message|>": ("openai", HARMONY),
    "<｜tool▁calls▁begin｜> ```json </think>": ("deepseek_v3", "think"),
    "<｜tool▁calls▁begin｜> </think>": ("deepseek_v31", "think"),
    "<|tool_call_start|>": ("lfm2", "none"),
    "<|start_header_id|> \"parameters\"": ("llama3_json", "none"),
    "nothing": ("none", "none"),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_tells_the_forms(template: str) -> None:
    reading = AnswerReading(byte_level(), template)
    assert (reading.calls, reading.thoughts) == TEMPLATES[template]
    named = AnswerReading(byte_level(), template, calls="none", thoughts="none")
    assert named.parser(TOOLS) is None


def test_names_of_vllm_for_the_same_forms() -> None:
    reading = AnswerReading(byte_level(), "", calls="glm47", thoughts="qwen3")
    assert (reading.calls, reading.thoughts) == ("glm45", "think")
