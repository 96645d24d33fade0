"""Schemas that are made to harm: each is refused by its field or enforced, and requests beside it are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving import RunningServer


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def wide(names: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(names)}}


LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
HOSTILE: dict[str, dict[str, Any]] = {
    "deep": deep(60),
    "a loop of references": LOOP,
    "it refers to itself": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "a reference to elsewhere": {"$ref": "http://192.0.2.1/schema"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "a reference to nothing": {"$ref": "#/$defs/nothing"},
    "many alternatives": {"enum": [f"v{i}" for i in range(100_000)]},
    "a pattern with nested repetition": {"type": "string", "pattern": "^(a+)+$"},
    "a pattern that repeats very often": {"type": "string", "pattern": "^a{0,1000000000}$"},
    "a pattern that looks back": {"type": "string", "pattern": "(a)\\1"},
    "very many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "very long": {"type": "string", "minLength": 10**9},
    "many properties": wide(5000),
    "a keyword without a grammar": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    "the opposite": {"not": {"type": "string"}},
    "a type that does not exist": {"type": "text"},
    "types that are a number": {"type": 5},
    "bounds that contradict": {"type": "integer", "minimum": 3, "maximum": 2},
    "references that multiply": {
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"const": 1}},
        "$ref": "#/$defs/d0",
    },
}


def begins(text: str, schema: dict[str, Any]) -> bool:
    """Whether an answer is what this schema allows, as far as it came."""
    if "pattern" in schema:
        return set(text.strip().strip('"')) <= set("a")
    if schema.get("type") == "array":
        return text.lstrip()[:1] == "["
    if schema.get("type") == "object":
        return text.lstrip()[:1] == "{"
    if schema.get("type") == "string":
        return text.lstrip()[:1] == '"'
    return "enum" not in schema or any(json.dumps(v).startswith(text.strip()) for v in schema["enum"])


@pytest.mark.promise("E5")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas(server: RunningServer, name: str) -> None:
    """None is answered with free text."""
    schema = HOSTILE[name]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = server.chat("Say hello.", model="tandem-demo", max_tokens=8, response_format=form)
    if reply.status_code == 200:
        (choice,) = reply.json()["choices"]
        assert begins(choice["message"]["content"], schema), choice
    else:
        error = reply.json()["error"]
        assert reply.status_code == 400, reply.text
        assert (error["param"] or "").startswith("response_format"), error
    assert server.chat("hi", model="tandem-demo", max_tokens=2).status_code == 200
