"""Parsers of tool calls: every family's form, however it is cut, whole, broken and hostile."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.generation.tools.offer import Tools, tools_of
from mlx_tandem.generation.tools.table import PARSERS
from mlx_tandem.generation.tools.values import as_json
from tests.unit.generation.reading_tools import calls_of, cuts, heard, text_of

OFFERED: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "share": {"type": "number"},
                    "warm": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "place": {"type": "object"},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
MADE = tools_of(OFFERED, None, None)
assert MADE is not None
TOOLS: Tools = MADE


class Sample(NamedTuple):
    """A text of a family, its calls, and its text besides them."""

    family: str
    text: str
    calls: list[tuple[str, Any]]
    rest: str = ""


OSLO = ("weather", {"city": "Oslo"})
TYPED = ("weather", {"city": 'a "b"\nc', "days": 3, "warm": True, "tags": [1, "x"], "note": None})


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def qwen(*parameters: tuple[str, str], name: str = "weather") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


RAW = (("city", 'a "b"\nc'), ("days", "3"), ("warm", "True"), ("tags", '[1, "x"]'), ("note", "null"))

SAMPLES = [
    Sample("hermes", hermes('{"name": "weather", "arguments": {"city": "Oslo"}}'), [OSLO]),
    Sample(
        "hermes",
        "Now.\n" + hermes('{"arguments": {"city": "Oslo"}, "name": "weather"}', '{"name": "now", "arguments": {}}'),
        [OSLO, ("now", {})],
        "Now.\n",
    ),
    Sample("hermes", '<tool_call>{"name": "now"}</tool_call> Done.', [("now", {})], "Done."),
    Sample(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\\n\\"}</tool_call>", "tags": [1, {"x": null}]}}'
        "</tool_call>",
        [("weather", {"city": 'a\n"}</tool_call>', "tags": [1, {"x": None}]})],
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb \\d"}}</tool_call>',
        [("weather", {"city": "a\nb \\d"})],
    ),
    Sample("hermes", "<tool_call>none</tool_call>", [], "<tool_call>none</tool_call>"),
    Sample("hermes", '<tool_call><tool_call>\n{"name": "now"}\n</tool_call>', [("now", {})]),
    Sample("qwen3_coder", qwen(*RAW), [TYPED]),
    Sample("qwen3_coder", "So: " + qwen(name="now") + "\n" + qwen(("city", "Oslo")), [("now", {}), OSLO], "So: "),
    Sample("qwen3_coder", "<function=weather>\n<parameter=city>\nOslo\n</function>", [OSLO]),
    Sample(
        "qwen3_coder",
        "<function=weather><parameter=city>Oslo<parameter=days>x</parameter></function>",
        [("weather", {"city": "Oslo", "days": "x"})],
    ),
    Sample("qwen3_coder", "<tool_call>\n<function=weather>\nno", [], "<tool_call>\n<function=weather>\nno"),
    Sample(
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
        [OSLO],
    ),
    Sample(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">a "b"\nc</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="warm">true</parameter>\n<parameter name="tags">'
        '[1, "x"]</parameter>\n<parameter name="note">null</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        [TYPED, ("now", {})],
    ),
    Sample(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
        'string="true">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [("weather", {"city": "Oslo", "days": 3})],
    ),
    Sample(
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        [("weather", {"city": "12", "days": 3}), ("now", {})],
    ),
    Sample(
        "glm45",
        '<tool_call>now<arg_key>a</arg_key><arg_value>{"b": [1]}</arg_value><arg_key>c</arg_key>'
        "<arg_value>d e</arg_value></tool_call>",
        [("now", {"a": {"b": [1]}, "c": "d e"})],
    ),
    Sample(
        "kimi_k2",
        "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [OSLO, ("now", {})],
        "Well.",
    ),
    Sample(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [OSLO, ("now", {})],
    ),
    Sample(
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [OSLO],
    ),
    Sample(
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}, '
        '{"name": "now", "arguments": {}}]',
        [OSLO, ("now", {})],
    ),
    Sample(
        "mistral_args",
        'Hm.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        [OSLO, ("now", {})],
        "Hm.",
    ),
    Sample(
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Oslo"}}; {"type": "function", "name": "now", "parameters": {}}',
        [OSLO, ("now", {})],
    ),
    Sample("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', [("now", {})]),
    Sample("llama3_json", '{"name": "Ann", "age": 3}', [], '{"name": "Ann", "age": 3}'),
    Sample(
        "pythonic",
        "[weather(city='a \"b\"\\nc', days=3, warm=True, tags=[1, 'x'], note=None), now()]",
        [TYPED, ("now", {})],
    ),
    Sample(
        "pythonic",
        '<|python_start|>[weather(place={"a": {\'b\': [1.5, -2]}}, city="\\u00e9\\x41\\q")]<|python_end|>',
        [("weather", {"place": {"a": {"b": [1.5, -2]}}, "city": "éA\\q"})],
    ),
    Sample("pythonic", "[now()[0]]", [("now", {})], "[0]]"),
    Sample("pythonic", "[1, 2]", [], "[1, 2]"),
    Sample("lfm2", "<|tool_call_start|>[weather(city='Oslo')]<|tool_call_end|>Checking.", [OSLO], "Checking."),
    Sample(
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a "b"\nc<|"|>,days:3,warm:true,tags:[1,<|"|>x<|"|>],note:null'
        "}<tool_call|><|tool_call>call:now{}<tool_call|>",
        [TYPED, ("now", {})],
    ),
    Sample(
        "gemma4",
        '<|tool_call>call:weather{place:{a:{<|"|>b c<|"|>:[]}}}<tool_call|>',
        [("weather", {"place": {"a": {"b c": []}}})],
    ),
    Sample(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Oslo, {x}<escape>,days:3,note:so so}<end_function_call>",
        [("weather", {"city": "Oslo, {x}", "days": 3, "note": "so so"})],
    ),
    Sample(
        "granite",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now"}]',
        [OSLO, ("now", {})],
    ),
    Sample("granite", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [("now", {})]),
    Sample(
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        [OSLO],
    ),
    Sample("openai", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", [("now", {})]),
    Sample(
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>"
        "commentary<|message|>{ }<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
        [("now", {})],
        "I look.\nDone.",
    ),
    Sample(
        "openai",
        "<|channel|>commentary to=functions.now<|message|>{}<|call|>commentary<|start|>assistant<|channel|>final"
        "<|message|>Done.<|return|>",
        [("now", {})],
        "Done.",
    ),
    Sample("openai", "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>", [], "{}"),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.family} {sample.text[:24]}")
def test_a_familys_form(sample: Sample) -> None:
    found = heard(PARSERS[sample.family](0, TOOLS), [sample.text])
    assert calls_of(found) == sample.calls
    assert text_of(found) == sample.rest
    assert heard(PARSERS[sample.family](0, TOOLS), sample.text) == found


@pytest.mark.parametrize("note", ["null", "nul", "n", "", "nullable", "no", "Null"])
def test_a_text_that_may_be_null(note: str) -> None:
    """Only the word itself is null; what it begins with, or goes on from, is a text."""
    text = qwen(("note", note))
    for pieces in ([text], text):
        found = calls_of(heard(PARSERS["qwen3_coder"](0, TOOLS), pieces))
        assert found == [("weather", {"note": None if note == "null" else note})]


def test_every_family_has_a_sample() -> None:
    assert {sample.family for sample in SAMPLES} == set(PARSERS)


@pytest.mark.promise("E3")
@pytest.mark.parametrize("family", PARSERS)
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_every_split_says_the_same(family: str, data: st.DataObject) -> None:
    """Of texts that are made of the family's own parts in any order, so that most calls are broken."""
    text = data.draw(hostile(family))
    whole = heard(PARSERS[family](0, TOOLS), [text])
    assert heard(PARSERS[family](0, TOOLS), data.draw(cuts(text))) == whole
    assert heard(PARSERS[family](0, TOOLS), text) == whole
    if not any(event[0] == "call" for event in whole) and family != "openai":
        assert text_of(whole) == text, "what is no call is text"


def parts(family: str) -> list[str]:
    """The samples of a family, cut behind its markers and at a few other places."""
    made: set[str] = set("x \n{}[]\"<>|:,()='1")
    for sample in SAMPLES:
        if sample.family == family:
            text = sample.text
            made |= {text, text[: len(text) // 2], text[len(text) // 2 :]}
            made |= {text[k : k + n] for n in (3, 9, 20) for k in range(0, len(text), n)}
    return sorted(made)


def hostile(family: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(parts(family)), max_size=9).map("".join)


@pytest.mark.parametrize("family", PARSERS)
def test_plain_text_is_not_touched(family: str) -> None:
    text = "Ünïcode, a < b and c > d.\n\n  # code {x: [1]} | f(x) <b>\n" * 3
    assert heard(PARSERS[family](0, TOOLS), text) == [("text", text)]


@pytest.mark.promise("E2")
@pytest.mark.parametrize("family", PARSERS)
def test_the_work_is_linear_in_the_text(family: str) -> None:
    """Counted in characters that are looked at, for many repetitions of every part of the family's form."""
    for part in parts(family):
        for begin in ("", *parts(family)[-2:]):
            text = begin + part * (3000 // len(part))
            parser = PARSERS[family](0, TOOLS)
            for at in range(0, len(text), 7):
                parser.push(text[at : at + 7])
            parser.flush()
            assert parser.scan.scanned <= 30 * len(text), part


@pytest.mark.parametrize("family", PARSERS)
def test_a_long_piece_is_read_once(family: str) -> None:
    sample = next(sample.text for sample in SAMPLES if sample.family == family)
    size = 4 << 20 if family == "hermes" else 1 << 17
    for text in (sample * (size // 32 // len(sample)), sample[: len(sample) // 2] + "x" * size):
        parser = PARSERS[family](0, TOOLS)
        parser.push(text)
        parser.flush()
        assert parser.scan.scanned <= 4 * len(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(json_values, st.booleans(), st.sampled_from([None, 2]))
@settings(max_examples=300, deadline=None)
def test_json_is_read_as_it_stands(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert as_json(text) == text


@given(st.text("{}[]\",:'()=\\u0n-1.etrufalsnTN \n", max_size=40))
@settings(max_examples=500, deadline=None)
def test_what_is_read_as_a_value_is_json(text: str) -> None:
    made = as_json(text)
    if made is not None:
        json.loads(made, parse_constant=pytest.fail)
