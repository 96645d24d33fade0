"""Schemas: those of the corpus are compiled or refused by their keyword, and alternatives are told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem import demo
from mlx_tandem.engine.grammars.compiling import open_tokenizer
from mlx_tandem.generation.grammar.alternatives import are_disjoint
from mlx_tandem.generation.grammar.constraint import Constraint
from mlx_tandem.generation.grammar.constraint import Schema as Form
from mlx_tandem.generation.grammar.messages import Answer, Compiled, Refused
from mlx_tandem.generation.grammar.schemas import SchemaError, checked
from mlx_tandem.generation.grammar.worker import Worker
from mlx_tandem.isolation.frames import encode
from tests.json_schemas import REFUSED, SUPPORTED, Schema, supported

WORKER = Worker(open_tokenizer(Path(demo.MODEL_PATH), 1024, (2,)), {})


def answer(schema: Schema) -> Answer:
    return WORKER.answer(encode(Constraint(Form(json.dumps(schema).encode(), ".schema"), "guided_json")))


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
    assert checked(schema) == {"items": {"anyOf": [{"const": 1}, {"const": 2}]}}
    assert json.dumps(schema) == before


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
