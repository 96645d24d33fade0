"""Every family's parser on what models write well and badly: the same cases for all, whole and however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_tandem.generation.tools.offer import Tools, tools_of
from mlx_tandem.generation.tools.table import PARSERS
from tests.unit.generation.reading_tools import Heard, calls_of, joined, text_of
from tests.unit.generation.tools.writing import ENDS, MARKUP, WRITERS, Call

ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "integer"}}}
OFFERED: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "$defs": {"address": ADDRESS, "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
                "type": "object",
                "properties": {
                    "content": {"type": "string"},
                    "path": {"type": "string"},
                    "count": {"$ref": "#/$defs/count"},
                    "to": {"allOf": [{"$ref": "#/$defs/address"}, {"description": "where it goes"}]},
                    "tags": {"items": {"type": "string"}},
                    "place": {"properties": {"x": {"type": "number"}}},
                    "flag": {"enum": [True, False]},
                    "note": {"description": "anything"},
                    "code": {"oneOf": [{"type": "string"}, {"const": "x"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
MADE = tools_of(OFFERED, None, None)
assert MADE is not None
TOOLS: Tools = MADE

WRITE: Call = ("write", {"path": "a.py", "content": "print(1)\nx = {'a': [1, \"b\"]}\n"})
STOP: Call = ("stop", {})
TYPED: Call = (
    "write",
    {
        "count": 3,
        "to": {"street": "Karl Johan", "number": 7},
        "tags": ["x", "1"],
        "place": {"x": 1.5},
        "flag": True,
        "note": {"free": [1, None]},
        "code": "12",
    },
)
HARMONY_TEXT = "<|channel|>final<|message|>"
"""In harmony, text is a message of its own."""


def read(family: str, text: str, *, cut: bool = False) -> Heard:
    """What a family's parser says of a text, the same whole and in single characters."""
    found: list[Heard] = []
    for pieces in ([text], list(text)):
        parser = PARSERS[family](0, TOOLS)
        said = [event for piece in pieces for event in parser.push(piece)]
        found.append(joined([*said, *parser.flush(cut=cut)]))
    assert found[0] == found[1]
    return found[0]


def prose(family: str, text: str) -> str:
    return f"{HARMONY_TEXT}{text}<|end|>" if family == "openai" else text


@pytest.mark.parametrize("family", PARSERS)
def test_two_calls_behind_text(family: str) -> None:
    begins = family in ("llama3_json", "pythonic")  # calls without a marker are at the beginning
    before = "" if begins else "I write it.\n"
    found = read(family, (prose(family, before) if before else "") + WRITERS[family]([WRITE, STOP]))
    assert calls_of(found) == [WRITE, STOP]
    assert text_of(found) == before


@pytest.mark.parametrize("family", PARSERS)
def test_types_come_from_the_whole_schema(family: str) -> None:
    assert calls_of(read(family, WRITERS[family]([TYPED]))) == [TYPED]


@pytest.mark.promise("E11")
@pytest.mark.parametrize(("family", "end"), [(family, end) for family, ends in ENDS.items() for end in ends])
def test_a_missing_end_loses_nothing(family: str, end: str) -> None:
    written = WRITERS[family]([STOP, WRITE])
    assert written.endswith(end)
    found = read(family, written.removesuffix(end))
    assert calls_of(found) == [STOP, WRITE] and text_of(found) == ""


@pytest.mark.parametrize("family", PARSERS)
def test_markup_inside_of_values_is_a_part_of_them(family: str) -> None:
    """Closers and openers of all families, quotes, brackets and thoughts."""
    for other in WRITERS:
        for mark in MARKUP[other]:
            if family in ("gemma4", "functiongemma") and mark in MARKUP[family]:
                continue  # a family's own marks of texts end them
            if family == "openai":
                continue  # its markers are special tokens that no text can hold
            for content in (f'r = "{mark}"\nx = 1', f"a {mark} b", f"<think>{mark}</think>\n"):
                call: Call = ("write", {"content": content, "path": "p"})
                found = read(family, WRITERS[family]([call]))
                assert calls_of(found) == [call], (mark, content)
                assert text_of(found) == ""


@pytest.mark.parametrize("family", PARSERS)
@pytest.mark.parametrize(
    "content", ["print(1)\n", "\n", "a\n\n", " a ", "", "\ta", 'say "hi"', "it's", "a\\nb", "{}", "]"]
)
def test_texts_are_kept_to_the_letter(family: str, content: str) -> None:
    call: Call = ("write", {"content": content, "path": "p"})
    written = WRITERS[family]([call])
    if content == "\n" and family == "seed_oss":
        return  # the line break at the beginning of a value belongs to the tag there
    assert calls_of(read(family, written)) == [call]


@pytest.mark.parametrize("family", PARSERS)
def test_parameters_that_the_function_does_not_describe_are_passed_on(family: str) -> None:
    """But for tags that other languages have, too, where only the function tells what is a parameter."""
    if family != "minimax_m2":
        call: Call = ("write", {"path": "a", "unheard": "b", "other": 3})
        assert calls_of(read(family, WRITERS[family]([call]))) == [call]


@pytest.mark.parametrize("family", PARSERS)
def test_a_mention_is_text(family: str) -> None:
    for mark in MARKUP[family]:
        text = f"The marker {mark} begins a call of write, as I said."
        if family == "openai":
            continue  # every marker is a part of its messages
        assert read(family, text) == [("text", text)]


@pytest.mark.parametrize("family", PARSERS)
def test_a_call_that_is_cut_stays_as_it_came(family: str) -> None:
    """By a limit of tokens: what came so far is a beginning of the arguments, and the text has none of it."""
    written = WRITERS[family]([("write", {"path": "a.py", "content": "one two three four"})])
    end = written.index("three")
    found = read(family, written[:end], cut=True)
    assert [event[0] for event in found] == ["call"]
    assert (
        json.dumps({"path": "a.py", "content": "one two "})[:-2].startswith(found[0][2].rstrip())
        and "one" in found[0][2]
    )
    whole = calls_of(read(family, written[:end]))
    assert whole[0][1]["content"].strip() == "one two"


BROKEN = {
    "hermes": '<tool_call>{"path": "a"}</tool_call>',
    "qwen3_coder": "<tool_call>write the file</tool_call>",
    "seed_oss": "<seed:tool_call>write</function>",
    "minimax_m2": "<minimax:tool_call><invoke>write</invoke>",
    "deepseek_v32": "<｜DSML｜function_calls>write",
    "glm45": "<tool_call>write <arg_value>x</arg_value>",
    "kimi_k2": "<|tool_calls_section_begin|>write",
    "deepseek_v3": "<｜tool▁calls▁begin｜>write",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write it",
    "mistral": "[TOOL_CALLS] [1, 2]",
    "mistral_args": "[TOOL_CALLS]write the file",
    "llama3_json": '{"name": "write", "place": "here"}',
    "pythonic": "[write, stop]",
    "lfm2": "<|tool_call_start|>write it",
    "gemma4": "<|tool_call>call:write it<tool_call|>",
    "functiongemma": "<start_function_call>write it<end_function_call>",
    "granite": "<|tool_call|>[write]",
    "openai": "to=functions.write {}",
}


@pytest.mark.parametrize("family", PARSERS)
def test_what_is_no_call_is_text(family: str) -> None:
    assert read(family, BROKEN[family]) == [("text", BROKEN[family])]


@pytest.mark.parametrize("family", [name for name in PARSERS if name not in ("llama3_json", "pythonic", "openai")])
def test_a_call_behind_a_broken_one_is_found(family: str) -> None:
    found = read(family, BROKEN[family] + "\n" + WRITERS[family]([WRITE]))
    assert calls_of(found) == [WRITE]
    assert text_of(found).strip() == BROKEN[family]


XML: Call = (
    "write",
    {
        "content": '<a>\n<parameter name="browser">x</parameter>\n<parameter name="url">y</parameter>\n<parameters>\n',
        "path": "a.xml",
    },
)
INLINE: Call = ("write", {"content": "use <parameter=path> or <arg_key>path</arg_key> here", "path": "a"})

LONG = 10**4000
"""A number longer than the words that models write, which is valid JSON all the same."""

SPELLINGS: list[tuple[str, str, list[Call]]] = [
    ("lfm2", "<|tool_call_start|>[\n  stop(),\n]<|tool_call_end|>", [STOP]),
    ("hermes", '<tool_call>[{"name": "stop", "arguments": {}},\n]</tool_call>', [STOP]),
    ("mistral", '[TOOL_CALLS] [{"name": "stop"},]', [STOP]),
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"content": "print("hi", end="x")\nx", "path": "p"}}</tool_call>',
        [("write", {"content": 'print("hi", end="x")\nx', "path": "p"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"path": "a", "' + "b" * 5000 + '": ' + str(LONG) + "}}</tool_call>",
        [("write", {"path": "a", "b" * 5000: LONG})],
    ),
    (
        "functiongemma",
        "<start_function_call>call:write{path:a,content:" + "word and " * 600 + "}<end_function_call>",
        [("write", {"path": "a", "content": ("word and " * 600).strip()})],
    ),
    (
        "hermes",
        "<tool_call>{'name': 'write', 'arguments': {'flag': True, path: 'it's', 'count': None,}}</tool_call>",
        [("write", {"flag": True, "path": "it's", "count": None})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments": "{\\"path\\": \\"a\\"}"}</tool_call>',
        [("write", {"path": "a"})],
    ),
    ("hermes", '<tool_call>{"name": "stop", "arguments": null}</tool_call>', [STOP]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": ""}</tool_call>', [STOP]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "stop", "arguments": {}}}</tool_call>', [STOP]),
    ("hermes", '<tool_call>\n```json\n{"name": "stop"}\n```\n</tool_call>', [STOP]),
    ("hermes", '<tool_call>[{"name": "stop"}, {"name": "stop"}]</tool_call>', [STOP, STOP]),
    ("hermes", '<tool_call>{"name": "stop"}{"name": "stop"}</tool_call>', [STOP, STOP]),
    ("hermes", '<tool_call>{"name": "stop"}<tool_call>{"name": "stop"}', [STOP, STOP]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": {}}}</tool_call>', [STOP]),
    ("hermes", '{"name": "stop", "arguments": {}}', [STOP]),
    ("hermes", "<tool_call>\n<function=stop>\n</function>\n</tool_call>", [STOP]),
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"place": {1, 2}, "note": NaN}}</tool_call>',
        [("write", {"place": [1, 2], "note": None})],
    ),
    ("hermes", '<tool_call>{"name" = "write", "arguments" = {"count" = +3}}</tool_call>', [("write", {"count": 3})]),
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"content": "say "}" and "hi", ok", "path": "p"}}</tool_call>',
        [("write", {"content": 'say "}" and "hi", ok', "path": "p"})],
    ),
    ("qwen3_coder", '<function="stop">\n</function>', [STOP]),
    ("qwen3_coder", "<function=stop >\n</function>", [STOP]),
    ("qwen3_coder", '<tool_call>{"name": "stop", "arguments": {}}</tool_call>', [STOP]),
    ("qwen3_coder", '<tool_call><function=write>{"path": "a"}</function></tool_call>', [("write", {"path": "a"})]),
    ("qwen3_coder", "<tool_call><function=stop></function><function=stop></function></tool_call>", [STOP, STOP]),
    (
        "qwen3_coder",
        "<tool_call><function=write><parameter=path>a<parameter=content>b</function></tool_call>",
        [("write", {"path": "a", "content": "b"})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=write><parameter=tags>['a', 'b']</parameter></function></tool_call>",
        [("write", {"tags": ["a", "b"]})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=write><parameter=path>\na\n</parameter>\n</function>\nDone.",
        [("write", {"path": "a"})],
    ),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"count": 1e999}}</tool_call>', [("write", {"count": None})]),
    ("deepseek_v32", '<｜DSML｜invoke name="stop"/>', [STOP]),
    ("qwen3_coder", "<function=stop>\n</function>\n</tool_call>", [STOP]),
    ("qwen3_coder", WRITERS["qwen3_coder"]([XML]), [XML]),
    ("minimax_m2", WRITERS["minimax_m2"]([XML]), [XML]),
    ("qwen3_coder", WRITERS["qwen3_coder"]([INLINE]), [INLINE]),
    ("glm45", WRITERS["glm45"]([INLINE]), [INLINE]),
    (
        "qwen3_coder",
        '<tool_call><function=write><parameter=to>"{\\"number\\": 7}"</parameter></function></tool_call>',
        [("write", {"to": {"number": 7}})],
    ),
    ("kimi_k2", "<|tool_call_begin|>functions.stop:0<|tool_call_argument_begin|><|tool_call_end|>", [STOP]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>stop<｜tool▁sep｜><｜tool▁call▁end｜>", [STOP]),
    ("mistral_args", "[TOOL_CALLS]stop[ARGS]", [STOP]),
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"path": "a"\n "content": "b"}}</tool_call>',
        [("write", {"path": "a", "content": "b"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "write", "arguments": {"path": "a"}} {"name": "stop", "arguments": {}}]',
        [("write", {"path": "a"}), STOP],
    ),
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments":' + "\n" * 300 + '{"path": "a"' + " " * 300 + "}}</tool_call>",
        [("write", {"path": "a"})],
    ),
    (
        "hermes",
        r'<tool_call>{"name": "write", "arguments": {"path": "C:\apps\vendor\033"}}</tool_call>',
        [("write", {"path": r"C:\apps\vendor\033"})],
    ),
    (
        "pythonic",
        r"[write(path=r'\d+', content='\033[31m\x41', tags=['x', r'\d'])]",
        [("write", {"path": r"\d+", "content": "\x1b[31mA", "tags": ["x", r"\d"]})],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[write(path="a"), mcp:fs/read(path="b")]',
        [("write", {"path": "a"}), ("mcp:fs/read", {"path": "b"})],
    ),
    ("openai", "<|channel|>commentary to=functions.stop<|channel|>commentary json<|message|>{}<|call|>", [STOP]),
    ("openai", "<|channel|>commentary <|constrain|>JSON to=functions.stop<|message|>```json\n{}\n```<|call|>", [STOP]),
    (
        "minimax_m2",
        '<invoke name="write"><parameter name="content">a\n</parameter></invoke>',
        [("write", {"content": "a\n"})],
    ),
    ("glm45", "<tool_call>stop", [STOP]),
    (
        "glm45",
        "<tool_call>write<arg_key>note</arg_key><arg_value>007</arg_value></tool_call>",
        [("write", {"note": "007"})],
    ),
    ("kimi_k2", '<|tool_call_begin|>functions.write:0{"path": "say "hi""}', [("write", {"path": 'say "hi"'})]),
    ("mistral", '[TOOL_CALLS]write{"path": "a"}', [("write", {"path": "a"})]),
    ("mistral", "[TOOL_CALLS][TOOL_CALLS] [{'name': 'stop'}]", [STOP]),
    ("llama3_json", 'I call it: {"name": "stop", "parameters": {}} now.', [STOP]),
    ("llama3_json", "[stop(), stop()]", [STOP, STOP]),
    (
        "pythonic",
        "[write('text', 'a.py', count=07, tags={'a', 'b'}), stop()]",
        [("write", {"content": "text", "path": "a.py", "count": 7, "tags": ["a", "b"]}), STOP],
    ),
    (
        "pythonic",
        '[write(content="""a "b"\nc""", path=\'it\'s\')]',
        [("write", {"content": 'a "b"\nc', "path": "it's"})],
    ),
    ("pythonic", '[write({"path": "a"})]', [("write", {"path": "a"})]),
    ("lfm2", '<|tool_call_start|>{"name": "stop", "arguments": {}}<|tool_call_end|>', [STOP]),
    (
        "gemma4",
        "<|tool_call>:write{content:12,path:a b, c,count:3}<tool_call|>",
        [("write", {"content": "12", "path": "a b, c", "count": 3})],
    ),
    (
        "gemma4",
        "<|tool_call>call:write{content:'it's',path:\"p\"}<tool_call|>",
        [("write", {"content": "it's", "path": "p"})],
    ),
    ("granite", '<|tool_call|>{"name": "stop", "arguments": {}}', [STOP]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}", [STOP]),
    ("openai", " to=stop<|channel|>commentary<|message|><|call|>", [STOP]),
    ("openai", "<|channel|>commentary to=functions.write<|message|>{'path': 'a',}<|call|>", [("write", {"path": "a"})]),
]


@pytest.mark.parametrize(("family", "text", "calls"), SPELLINGS, ids=[text[:40] for _, text, _ in SPELLINGS])
def test_other_spellings(family: str, text: str, calls: list[Call]) -> None:
    assert calls_of(read(family, text)) == calls


def test_the_first_of_two_arguments_before_the_name_counts() -> None:
    found = read(
        "hermes", '<tool_call>{"arguments": {"path": "a"}, "arguments": {"path": "b"}, "name": "write"}</tool_call>'
    )
    assert calls_of(found) == [("write", {"path": "a"})]
    assert text_of(found) == '"arguments": {"path": "b"}'


@pytest.mark.parametrize("first", ['{"path": "a"}', '"{\\"path\\": \\"a\\"}"'], ids=["an object", "a text"])
def test_the_first_of_two_arguments_behind_the_name_counts(first: str) -> None:
    """It may have been said by then, so the second one is neither part of it nor another call."""
    found = read(
        "hermes", f'<tool_call>{{"name": "write", "arguments": {first}, "arguments": {{"path": "b"}}}}</tool_call>'
    )
    assert calls_of(found) == [("write", {"path": "a"})]
    assert text_of(found) == '"arguments": {"path": "b"}'


def test_a_call_that_breaks_off_keeps_what_stands_beside_its_arguments() -> None:
    found = read("hermes", '<tool_call>{"note": "x", "name": "write", "arguments": {"path": "a')
    assert calls_of(found) == [("write", {"path": "a"})]
    assert text_of(found) == '"note": "x"'


@pytest.mark.parametrize(
    "text",
    [
        '{"name": ' * 3000,
        '<tool_call>{"name": "write", "arguments": ' + '{"a": ' * 3000,
        "<tool_call><function=write><parameter=place>" + "[" * 3000 + "</parameter></function></tool_call>",
    ],
)
def test_nesting_is_bounded(text: str) -> None:
    for family in ("hermes", "llama3_json", "qwen3_coder"):
        parser = PARSERS[family](0, TOOLS)
        found = joined([*parser.push(text), *parser.flush()])
        assert all(isinstance(arguments, dict) for _, arguments in calls_of(found))


def test_halves_of_surrogate_pairs_stay_escapes() -> None:
    for arguments in ('{"path": "\\ud800"}', r'"{\"path\": \"\ud800\"}"'):
        found = read("hermes", f'<tool_call>{{"name": "write", "\\udfff": 1, "arguments": {arguments}}}</tool_call>')
        assert found[0][:2] == ("call", "write")
        for event in found:
            "".join(event).encode()


def test_names_of_types_that_people_write_are_understood() -> None:
    properties = {"a": {"type": "float"}, "b": {"type": "int"}, "c": {"type": "str"}, "d": {"type": ["list", "none"]}}
    tools = tools_of(
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}], None, None
    )
    assert tools is not None
    call: Call = ("f", {"a": 3.14, "b": 7, "c": "12", "d": [1]})
    parser = PARSERS["qwen3_coder"](0, tools)
    assert calls_of(joined([*parser.push(WRITERS["qwen3_coder"]([call])), *parser.flush()])) == [call]


def test_a_schema_that_refers_to_itself_is_looked_at_once() -> None:
    union = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "integer"}] * 200}
    for schema in (union, {"type": 5}, {"$ref": "#/$defs/n"}, {"allOf": [[]]}, {"enum": 3}):
        function = {
            "name": "write",
            "parameters": {"$defs": {"n": schema}, "properties": {"count": {"$ref": "#/$defs/n"}}},
        }
        tools = tools_of([{"type": "function", "function": function}], None, None)
        assert tools is not None
        parser = PARSERS["qwen3_coder"](0, tools)
        said = [*parser.push(WRITERS["qwen3_coder"]([("write", {"count": 3})])), *parser.flush()]
        assert calls_of(joined(said)) == [("write", {"count": 3})]


def test_white_space_as_long_as_a_look_ahead_does_not_change_what_is_read() -> None:
    for size in (254, 255, 256, 257, 300):
        read(
            "hermes", '<tool_call>{"name": "write", "arguments": {"path": "x",' + " " * size + 'and more", "count": 1}}'
        )


@pytest.mark.parametrize("family", PARSERS)
def test_every_beginning_of_a_call_says_a_beginning_of_it(family: str) -> None:
    """Wherever the text ends, values that came are right, and texts among them may be shorter."""
    name, arguments = ("write", {"path": "a.py", "content": 'x = "y", {1: 2}\n', "count": 12, "note": ["a b"]})
    written = WRITERS[family]([(name, arguments)])
    for end in range(len(written)):
        for cut in (False, True):
            for event in read(family, written[:end], cut=cut):
                if event[0] != "call":
                    continue
                if cut:
                    said = same(event[2]).partition("<")[0].removesuffix("\\n")  # The text may end inside of a tag.
                    assert same(json.dumps(arguments)).startswith(said) or "count" in said, (written[:end], event)
                    continue
                for key, value in json.loads(event[2]).items():
                    whole = next((each for each in ("path", "content") if each == key), "")
                    if whole and value is not None:
                        text = str(arguments[whole])
                        mark = value.removeprefix(text)
                        assert text.startswith(value.rstrip("\\")) or mark.lstrip("\n")[:1] in "<", (
                            written[:end],
                            event,
                        )
                    elif key == "count":
                        assert str(value).partition("<")[0].strip() in ("None", "", "1", "12")


def same(text: str) -> str:
    """A JSON text without its white space."""
    return text.replace(" ", "").replace("\n", "")


FREE = [
    "{ echo hi; }", "[slug]", "[a-z]", "(cd /tmp)", "(see below)", "{name}", "[ -f x ]", "(\\d+)", "{{x}}", "nan",
    "+15551234567", "0x1F", "1_000", "007", "{ margin: 0; padding: 0 }", "[1, 2", "{'a': b}", "text", "-", "true story",
]  # fmt: skip


@pytest.mark.parametrize("value", FREE)
def test_what_may_be_a_text_is_one_unless_it_is_json_or_python(value: str) -> None:
    for family in ("qwen3_coder", "glm45", "minimax_m2"):
        for key in ("note", "free"):
            assert calls_of(read(family, WRITERS[family]([("write", {key: value})]))) == [("write", {key: value})]


@pytest.mark.parametrize(
    ("value", "made"), [("['a', True, None,]", ["a", True, None]), ('{"a": [1.5]}', {"a": [1.5]}), ("12", 12)]
)
def test_what_may_be_a_text_and_is_json_or_python_is_read(value: str, made: Any) -> None:
    assert calls_of(read("qwen3_coder", WRITERS["qwen3_coder"]([("write", {"note": value})]))) == [
        ("write", {"note": made})
    ]


@pytest.mark.parametrize("family", ["hermes", "granite", "llama3_json", "mistral", "mistral_args", "pythonic"])
def test_an_answer_in_json_is_not_kept_back(family: str) -> None:
    for text in ('{"summary": "word word word', '[{"summary": "word word word'):
        parser = PARSERS[family](0, TOOLS)
        assert text_of(joined(parser.push(text))) == text


def test_spaces_in_tags_and_headers_cost_no_more_than_others() -> None:
    for family, text in (
        ("openai", "<|start|>" + " " * 250 + "!<|message|>"),
        ("openai", "<|channel|>" + " " * 250 + "<|constrain|>" + " " * 250 + "x<|message|>"),
        ("qwen3_coder", "<function=" + " " * 250 + '">'),
        ("qwen3_coder", "<tool_call><function=write><parameter=path>\na\n<parameter=" + " " * 250 + '"></function>'),
    ):
        read(family, text * 20)


def test_every_family_is_written() -> None:
    assert WRITERS.keys() == ENDS.keys() == MARKUP.keys() == BROKEN.keys() == PARSERS.keys()


def test_an_empty_section_on_a_line_of_its_own_means_nothing() -> None:
    for text, said in (
        ("<tool_call></tool_call>\nDone.", "Done."),
        ("So.\n<tool_call>\n</tool_call>", "So.\n"),
        ("Write <tool_call></tool_call>.", "Write <tool_call></tool_call>."),
    ):
        assert text_of(read("qwen3_coder", text)) == said


WRAPPED = [
    ('{"path": "a"}', "", {"path": "a"}),
    ("[1]", "", {"arguments": [1]}),
    ("", "", {"arguments": ""}),
    ('{"path": "a"}', '<parameter name="path">b</parameter>', {"arguments": {"path": "a"}, "path": "b"}),
]


@pytest.mark.parametrize(("value", "more", "arguments"), WRAPPED)
def test_arguments_in_one_parameter_that_the_function_does_not_have(value: str, more: str, arguments: Any) -> None:
    inner = f'<parameter name="arguments">{value}</parameter>{more}'
    text = f'<minimax:tool_call><invoke name="write">{inner}</invoke></minimax:tool_call>'
    assert calls_of(read("minimax_m2", text)) == [("write", arguments)]
