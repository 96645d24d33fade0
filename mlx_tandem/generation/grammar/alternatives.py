"""Proving that no value is valid under two alternatives of `oneOf`, which then means the same as `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

Resolve = Callable[[Any], Any]
"""A function that returns the schema to which a schema's `$ref` leads; a schema without one is returned itself."""

_TYPES = frozenset("string integer fraction boolean null array object".split())
"""The types of JSON values that have no value in common. A number is an integer or has a fraction."""


def are_disjoint(alternatives: Sequence[Any], resolve: Resolve) -> bool:
    """Return whether it is certain that every value is valid under at most one of these schemas."""
    found = [resolve(alternative) for alternative in alternatives]
    return all(_exclude(a, b, resolve) for a, b in combinations(found, 2))


def _exclude(a: Any, b: Any, resolve: Resolve) -> bool:
    """Return whether it is certain that no value is valid under both schemas."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a is False or b is False
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return values.isdisjoint(others)
    common = _types(a) & _types(b)
    return not common or (common == {"object"} and _tags_exclude(a, b, resolve))


def _tags_exclude(a: dict[str, Any], b: dict[str, Any], resolve: Resolve) -> bool:
    """Return whether a property that both schemas require has different values in them."""
    ours, theirs = a.get("properties", {}), b.get("properties", {})
    for key in set(a.get("required", ())) & set(b.get("required", ())) & ours.keys() & theirs.keys():
        values, others = _values(resolve(ours[key])), _values(resolve(theirs[key]))
        if values is not None and others is not None and values.isdisjoint(others):
            return True
    return False


def _values(schema: Any) -> frozenset[str] | None:
    """Return the only values that can be valid, written so that equal ones are equal texts; None if not known."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return frozenset({_written(schema["const"])})
    if "enum" in schema:
        return frozenset(map(_written, schema["enum"]))
    return None


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a valid value can have."""
    given = schema.get("type")
    if given is None:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        return _TYPES if values is None else frozenset(map(_type_of, values))
    named = {given} if isinstance(given, str) else set(given)
    return frozenset(named - {"number"} | ({"integer", "fraction"} if "number" in named else set()))


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == int(value) else "fraction"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _written(value: Any) -> str:
    """Return a JSON value as text, in which 1.0 is the number 1 and the order of keys does not matter."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _normal(inner) for key, inner in value.items()}
    return [_normal(inner) for inner in value] if isinstance(value, list) else value
