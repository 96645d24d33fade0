"""Constraints as grammars: what a matcher of the demo model's tokens accepts and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from mlx_tandem import demo
from mlx_tandem.engine.grammars.compiling import compiled, open_tokenizer
from mlx_tandem.generation.grammar.constraint import (
    Call,
    Calls,
    Constraint,
    OneOf,
    Pattern,
    Rules,
    Schema,
    Thought,
)
from mlx_tandem.generation.grammar.lark import Unwritable, grammar_of
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.limits import MAX_JSON_DEPTH

FOLDER = Path(demo.MODEL_PATH)
BACKEND = Backend.from_file(str(FOLDER / "tokenizer.json"))
OPENED = open_tokenizer(FOLDER, 1024, (2,))
ADDED = Tokenizer.load(FOLDER).added_tokens

Form = Schema | Pattern | OneOf | Rules | Calls


def schema(value: object, where: str = "") -> Schema:
    return Schema(json.dumps(value).encode(), where)


def accepts(form: Form, text: str | list[str], thought: Thought | None = None, compact: bool = False) -> bool:
    """Whether a text matches from its beginning to its end."""
    matcher = compiled(OPENED, grammar_of(Constraint(form, "field", thought, compact), ADDED))
    ids = [i for part in (text if isinstance(text, list) else [text]) for i in BACKEND.encode(part).ids]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


OBJECT = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a":1}', True),
        ('{"a": 1}', True),
        ('{\n  "a": 1\n}', True),
        ('{"a":  1}', False),
        ('{\n\n"a":1}', False),
        (' {"a":1}', False),
        ('{"a":1}\n', False),
        ('{"a":1', False),
        ("{}", False),
    ],
)
def test_whitespace_between_parts_of_json_is_bounded(text: str, valid: bool) -> None:
    assert accepts(OBJECT, text) == valid
    assert accepts(OBJECT, text, compact=True) == (text == '{"a":1}')


FREE: list[tuple[object, str]] = [
    ({}, "[]"),
    (True, "[]"),
    ({"description": "x", "$schema": "https://json-schema.org/draft/2020-12/schema"}, '{"a":}'),
    ({"type": "object", "additionalProperties": True}, '{"a":}'),
    ({"type": "object"}, '{"a":}'),
    ({"type": "array", "items": {}}, "[]"),
]


@pytest.mark.parametrize(("free", "brackets"), FREE, ids=str)
def test_any_json_is_nested_to_a_limit(free: object, brackets: str) -> None:
    opened, closed = brackets[:-1], brackets[-1]
    deepest = opened * MAX_JSON_DEPTH + "1" + closed * MAX_JSON_DEPTH
    assert accepts(schema(free), deepest)
    assert not accepts(schema(free), opened + deepest + closed)
    some = [1, -2.5e-3, "é\n", True, None, [], {}, {"": [{"a": [[]]}]}]
    for value in (some, {"a": some}, 1):
        for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, indent=2, ensure_ascii=False)):
            kind = free.get("type") if isinstance(free, dict) else None
            fits = kind is None or isinstance(value, {"object": dict, "array": list}[kind])
            assert accepts(schema(free), text) == fits


@pytest.mark.parametrize(
    ("regex", "matches", "fails"),
    [
        ("a|bc", ["a", "bc"], ["", "ab", "abc"]),
        ("^ab$", ["ab"], ["xab", "abx"]),
        ("\\d{2}", ["12"], ["1", "123", "٣٣"]),
        ("a/b", ["a/b"], ["a"]),
        ("a\nb", ["a\nb"], ["ab"]),
        ("[^x]*", ["", "日本\n"], ["x"]),
        ('"', ['"'], ["'"]),
    ],
)
def test_a_pattern_matches_the_whole_text(regex: str, matches: list[str], fails: list[str]) -> None:
    for text in matches:
        assert accepts(Pattern(regex), text), text
    for text in fails:
        assert not accepts(Pattern(regex), text), text


def test_a_choice_is_one_of_the_texts_and_none_of_their_beginnings() -> None:
    texts = ("yes", "yes, but", 'say "no"', "back\\slash", "line\nbreak", "日本 😀", "<|im_end|>")
    form = OneOf(texts)
    for text in texts[:-1]:
        assert accepts(form, text), text
    for text in ("", "ye", "yes,", "no", "say", "日"):
        assert not accepts(form, text), text


def test_texts_of_added_tokens_are_spelled_in_what_a_request_asks_for() -> None:
    """They are plain text there, and the tokens themselves are not."""
    spelled = ["a", "<", "think", ">", "b"]
    forms = (OneOf(("a<think>b", "other")), Pattern("a<(think)>b"), Rules('start: "a<think>b"'))
    for form in forms:
        assert accepts(form, spelled), form
        assert not accepts(form, "a<think>b"), form
    assert accepts(schema({"const": "a<think>b"}), ['"', *spelled, '"'])
    assert accepts(schema({"type": "string", "pattern": "^a<think>b$"}), ['"', *spelled, '"'])
    assert accepts(schema({"required": ["<think>"], "type": "object"}), ['{"', "<", "think", '>": ', "1", "}"])


@pytest.mark.parametrize(
    "text",
    ['start: "x" NUMBER+ "y"\nNUMBER: /[0-9]/', 'root ::= "x" number+ "y"\nnumber ::= [0-9]'],
    ids=["lark", "gbnf"],
)
def test_rules_are_those_of_lark_or_gbnf(text: str) -> None:
    assert accepts(Rules(text), "x12y")
    assert not accepts(Rules(text), "xy")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (Rules("start: x\nx[temperature=0.5]: /a+/"), "temperature"),
        (Rules('root ::= "a'), "cannot be read"),
        (Pattern(""), "empty"),
        (Schema(b"{"), "not JSON"),
        (schema(False), "nothing is valid"),
    ],
)
def test_what_has_no_grammar_is_refused_in_words(form: Form, why: str) -> None:
    with pytest.raises(Unwritable, match=why):
        grammar_of(Constraint(form, "field"), ADDED)


HERMES = Calls(
    tuple(
        Call(f'<tool_call>\n{{"name": "{name}", "arguments": ', arguments, "}\n</tool_call>")
        for name, arguments in (
            ("f", OBJECT),
            ("g", schema({"type": "object", "properties": {}, "additionalProperties": False})),
        )
    ),
    separator="\n",
)
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "valid"),
    [(F, True), (G, True), (f"{F}\n{G}\n{F}", True), (f"{F}{G}", False), ("", False), (f"Hm. {F}", False)],
)
def test_calls_have_the_form_of_the_family(text: str, valid: bool) -> None:
    assert accepts(HERMES, text) == valid


def test_a_single_call_stays_alone() -> None:
    single = Calls(HERMES.calls)
    assert accepts(single, F)
    assert not accepts(single, f"{F}\n{G}")


@pytest.mark.parametrize(
    "wrong",
    [
        F.replace('"a"', '"b"'),
        F.replace('"f"', '"h"'),
        G.replace("{}", '{"a": 1}'),
        F.removesuffix("</tool_call>"),
    ],
)
def test_arguments_match_the_schema_of_their_tool(wrong: str) -> None:
    assert not accepts(HERMES, wrong)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("Nothing to call.", True),
        ("", True),
        (F, True),
        (f"Let me look.\n{F}", True),
        (f"{F}\n{G}", True),
        (f"Let me look.\n{F.replace('1', 'true')}", False),
        ("<tool_call>\nnonsense", False),
    ],
)
def test_calls_with_a_trigger_may_be_left_out_and_must_be_right(text: str, valid: bool) -> None:
    optional = Calls(HERMES.calls, separator="\n", trigger="<tool_call>")
    assert accepts(optional, text) == valid


def test_a_list_of_calls_is_opened_and_closed_once() -> None:
    calls = tuple(Call(f'{{"name": "{name}", "arguments": ', OBJECT, "}") for name in "fg")
    listed = Calls(calls, separator=", ", open="CALLS[", close="]")
    one, two = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {"a": 2}}'
    assert accepts(listed, f"CALLS[{one}]") and accepts(listed, f"CALLS[{one}, {two}]")
    assert not accepts(listed, f"{one}, {two}") and not accepts(listed, f"CALLS[{one}][{two}]")
    optional = Calls(calls, separator=", ", open="CALLS[", close="]", trigger="CALLS")
    assert accepts(optional, "hello") and accepts(optional, f"hello CALLS[{one}, {two}]")
    assert not accepts(optional, "hello CALLS x")


@pytest.mark.parametrize("end", ["</think>", "<|im_start|>"], ids=["text", "control token"])
def test_only_the_answer_after_the_thought_is_constrained(end: str) -> None:
    begun, may = Thought(end), Thought(end, begin="<think>")
    for text in (f'Hm, {{"b".{end}{{"a": 1}}', f'{end}\n\n{{"a": 1}}'):
        assert accepts(OBJECT, text, begun), text
    for text in ('{"a": 1}', f"Hm.{end}", "Hm.", f"Hm.{end}{{}}"):
        assert not accepts(OBJECT, text, begun), text
    assert accepts(OBJECT, '{"a": 1}', may)
    assert accepts(OBJECT, f'<think>Hm.{end}\n{{"a": 1}}', may)
    assert not accepts(OBJECT, f'Hm.{end}{{"a": 1}}', may)
