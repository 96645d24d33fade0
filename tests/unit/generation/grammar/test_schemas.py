"""Schemas: those of the corpus are compiled or refused by their keyword, and alternatives are told apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from mlx_tandem import demo
from mlx_tandem.engine.grammars.compiling import compiled, open_tokenizer
from mlx_tandem.generation.grammar import schemas
from mlx_tandem.generation.grammar.alternatives import are_disjoint
from mlx_tandem.generation.grammar.constraint import Call, Calls, Constraint
from mlx_tandem.generation.grammar.constraint import Schema as Form
from mlx_tandem.generation.grammar.messages import Answer, Compiled, Refused
from mlx_tandem.generation.grammar.schemas import SchemaError, checked
from mlx_tandem.generation.grammar.worker import Worker
from mlx_tandem.isolation.frames import encode
from tests.json_schemas import INT, REFUSED, SUPPORTED, Schema, supported

END = 2
TOKENIZER = open_tokenizer(Path(demo.MODEL_PATH), 1024, (END,))
BACKEND = Backend.from_file(str(Path(demo.MODEL_PATH) / "tokenizer.json"))
WORKER = Worker(TOKENIZER, {})


def answer(schema: Schema, *, is_lenient: bool = False) -> Answer:
    form = Form(json.dumps(schema).encode(), ".schema", is_lenient)
    return WORKER.answer(encode(Constraint(form, "guided_json")))


@pytest.mark.parametrize("category", SUPPORTED)
def test_schemas_of_the_corpus_are_compiled(category: str) -> None:
    refused = {
        json.dumps(schema): made for schema in SUPPORTED[category] if isinstance(made := answer(schema), Refused)
    }
    assert not refused


def test_the_corpus_is_large_and_right() -> None:
    assert len(supported()) >= 300
    for _, schema in supported():
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)


@pytest.mark.promise("E5")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_its_place(name: str) -> None:
    schema, where = REFUSED[name]
    made = answer(schema)
    assert isinstance(made, Refused)
    assert made.where == f".schema{where}"
    assert made.message and "\n" not in made.message


def test_keywords_inside_of_values_and_names_are_no_keywords() -> None:
    fine: tuple[Schema, ...] = (
        {"type": "object", "properties": {"not": {"type": "string"}, "if": True, "uniqueItems": True}},
        {"enum": [{"not": 1}, {"$ref": "x"}]},
        {"const": {"uniqueItems": True}},
        {"default": {"not": {}}, "type": "integer"},
        {"$defs": {"unused": {"not": {}}}, "type": "integer"},
    )
    for schema in fine:
        assert isinstance(answer(schema), Compiled), schema


def test_the_given_schema_is_not_changed() -> None:
    schema: dict[str, Any] = {"items": {"uniqueItems": False, "format": "color", "oneOf": [{"const": 1}, {"const": 2}]}}
    before = json.dumps(schema)
    assert checked(schema) == {"items": {"oneOf": [{"const": 1}, {"const": 2}]}}
    assert json.dumps(schema) == before


def written(schema: Schema, random: Random) -> str | None:
    """Return a text that the grammar of a schema allows, of random tokens; None if it does not end soon."""
    made = answer(schema)
    assert isinstance(made, Compiled), (schema, made)
    matcher, tokens = compiled(TOKENIZER, made.grammar), []
    for _ in range(250):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(1024) if bits >> token & 1]
        token = random.choice(allowed)
        if token == END or (matcher.is_accepting() and random.random() < 0.3):
            return BACKEND.decode(tokens, skip_special_tokens=False)
        assert matcher.consume_token(token)
        tokens.append(token)
    return None


def valid(schema: Schema, value: Any) -> bool:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


@pytest.mark.parametrize("category", SUPPORTED)
def test_what_a_grammar_allows_is_valid(category: str) -> None:
    """Random texts of a part of the corpus, and of all schemas in it that are rewritten."""
    random, ended = Random(1), 0
    schemas = SUPPORTED[category] if category == "idle" else SUPPORTED[category][::6]
    for schema in schemas:
        for _ in range(3):
            if (text := written(schema, random)) is not None:
                ended += 1
                assert valid(schema, json.loads(text)), (schema, text)
    assert ended >= len(schemas)


IDLE: dict[str, list[Any]] = {
    "minLength": [0.0, 1, 1.0],
    "maxItems": [0, 1.0, 2.0],
    "minItems": [1.0],
    "minProperties": [1.0],
    "maxProperties": [1, 2.0],
    "if": [True, {"type": "string"}, {"required": ["p"]}],
    "then": [True, {}, False, {"type": "object"}],
    "else": [True, {"title": "x"}, False],
    "minContains": [0, 2.0],
    "maxContains": [0],
    "uniqueItems": [True, False],
    "propertyNames": [True, {}, {"type": "string"}, {"enum": ["p", "q.q", 1]}, {"pattern": "^p"}, {"type": "integer"}],
    "additionalProperties": [True, False, {"type": "integer"}],
    "properties": [{}, {"p": {"type": "integer"}}],
    "patternProperties": [{}, {"q": {"type": "integer"}}],
    "dependentRequired": [{}, {"p": []}, {"p": ["q.q"]}],
    "dependentSchemas": [{}, {"p": True}, {"p": False}],
    "unevaluatedProperties": [True, False, {}],
    "not": [False, {"type": "null"}],
    "format": ["color", "date"],
}
"""Keywords that say something or nothing, which depends on those beside them."""

SCHEMAS = st.lists(st.sampled_from([(k, v) for k, values in IDLE.items() for v in values]), max_size=5).map(dict)
SOME_VALUES = [None, 1, "", "p", "2020-01-01", [], [1], [1, 1], [1, 2, 3], {}, {"p": 1}, {"q.q": "a"}, {"qxq": 1}]
SOME_VALUES += [{"p": "x", "q.q": 2}, {"p": 1, "pp": 2, "r": None}]


@settings(max_examples=400, deadline=None)
@given(SCHEMAS)
def test_what_is_left_out_or_rewritten_changes_no_meaning(schema: dict[str, Any]) -> None:
    try:
        made = checked(schema)
    except SchemaError:
        return
    for value in SOME_VALUES:
        assert valid(made, value) == valid(schema, value), (value, made)


@settings(max_examples=200, deadline=None)
@given(SCHEMAS)
def test_a_lenient_schema_allows_what_the_whole_one_allows(schema: dict[str, Any]) -> None:
    made = checked(schema, is_lenient=True)
    for value in SOME_VALUES:
        assert valid(made, value) or not valid(schema, value), (value, made)


def allows(schema: Schema, text: str) -> bool:
    """Return whether the grammar of a lenient schema matches a text as a whole."""
    made = answer(schema, is_lenient=True)
    assert isinstance(made, Compiled), (schema, made)
    matcher, ids = compiled(TOKENIZER, made.grammar), BACKEND.encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


BROKEN: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "text"}, "b": INT}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"type": "any"}, "b": INT}, "required": True},
    {"type": "object", "properties": {"a": 3, "b": INT}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"$ref": "https://x.org/s"}, "b": INT}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}, "b": INT}},
    {"type": "object", "properties": {"a": {"oneOf": [{"$ref": "#/x"}, {"type": "null"}]}, "b": INT}},
    {"type": "object", "properties": {"a": {"pattern": "(?=a)"}, "b": INT}, "$schema": "https://x.org/s"},
    {"type": "object", "properties": {"b": INT}, "patternProperties": {"(?=a)": {}}, "anyOf": [3]},
    {"type": "object", "properties": {"b": INT}, "oneOf": [{}, {}], "not": {"required": ["c"]}, "if": {}, "then": {}},
    {"type": "object", "properties": {"b": INT}, "minProperties": 9, "propertyNames": {"minLength": 3}, "$id": 5},
]
"""Schemas with a mistake, or with what cannot be enforced, from which `b` can be read all the same."""


@pytest.mark.parametrize("schema", BROKEN)
def test_of_what_cannot_be_enforced_the_rest_is(schema: Any) -> None:
    assert isinstance(answer(schema), Refused)
    assert allows(schema, '{"b": 5}')
    assert not allows(schema, '{"b": "x"}')


def test_a_lenient_contradiction_leaves_any_object() -> None:
    for schema in ({"$ref": "#"}, {"type": "object", "properties": {"a": False}, "required": ["a"]}):
        call = Call("f(", Form(json.dumps(schema).encode(), "tools", is_lenient=True), ")")
        made = WORKER.answer(encode(Constraint(Calls((call,)), "tools")))
        assert isinstance(made, Compiled)
        ids = BACKEND.encode('f({"x": [1]})').ids
        assert compiled(TOKENIZER, made.grammar).try_consume_tokens(ids) == len(ids)


@given(st.sets(st.text("ab.é\n", max_size=4), max_size=5), st.text("ab.é\n", max_size=4))
def test_a_pattern_of_every_text_but_some(texts: set[str], text: str) -> None:
    pattern = re.sub(r"\\u\{(\w+)\}", lambda m: rf"\U{int(m[1], 16):08x}", schemas._other_than(texts))
    assert bool(re.fullmatch(pattern, text)) == (text not in texts)
    assert all(not re.fullmatch(pattern, each) for each in texts)


def test_as_many_tools_as_a_request_may_have_are_compiled() -> None:
    """Most tools of some servers take no arguments, or any object."""
    forms = [Form(text, f"tools[{i}]", is_lenient=i % 2 > 0) for i, text in enumerate([b'{"type":"object"}'] * 1024)]
    calls = tuple(Call(f"<f{i}>", form, ";") for i, form in enumerate(forms))
    assert isinstance(WORKER.answer(encode(Constraint(Calls(calls), "tools"))), Compiled)
    wrong = Form(b'{"type":"object","properties":{"a":false},"required":["a"]}', "tools[1024]")
    for strict in (True, False):
        last = Call("<g>", wrong if strict else Form(wrong.json, wrong.where, is_lenient=True), ";")
        made = WORKER.answer(encode(Constraint(Calls((*calls[:9], last)), "tools")))
        assert isinstance(made, Refused if strict else Compiled)
        assert not strict or made.where == "tools[1024]"  # type: ignore[union-attr]


@pytest.mark.promise("E5")
def test_a_schema_may_be_deep_and_is_refused_when_it_is_too_deep() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    text = '{"type":"array","items":' * 5000 + "true" + "}" * 5000
    made = WORKER.answer(encode(Constraint(Form(text.encode()), "guided_json")))
    assert isinstance(made, Refused) and "deep" in made.message


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, 1.0, 0.5]), st.sampled_from("ab")
)
SIMPLE = st.one_of(
    st.builds(lambda v: {"const": v}, VALUES),
    st.builds(lambda v: {"enum": v}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(
        lambda t: {"type": t}, st.sampled_from(["string", "integer", "number", "boolean", "null", ["integer", "null"]])
    ),
)
OBJECTS = st.builds(
    lambda properties, required: {"type": "object", "properties": properties, "required": required},
    st.dictionaries(st.sampled_from("pq"), SIMPLE, max_size=2),
    st.lists(st.sampled_from("pq"), unique=True),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(SIMPLE, OBJECTS), min_size=2, max_size=3),
    st.one_of(VALUES, st.dictionaries(st.sampled_from("pq"), VALUES)),
)
def test_no_value_is_valid_under_two_alternatives_that_are_told_apart(alternatives: list[Any], value: Any) -> None:
    if are_disjoint(alternatives, lambda part: part):
        valid = [jsonschema.Draft202012Validator(a).is_valid(value) for a in alternatives]
        assert sum(valid) <= 1, (alternatives, value)


def test_a_chain_of_references_without_an_end_is_refused() -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(SchemaError):
        checked(loop | {"oneOf": [{"$ref": "#/$defs/a"}, {"const": 1}]})
