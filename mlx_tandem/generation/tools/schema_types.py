"""The types that JSON Schema gives to the parameters of a function, as far as a reader of raw values needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_SCHEMAS = 256
"""Most schemas that references and combinations lead to in the search for the types of one parameter."""

_IMPLIED = {
    "object": ("properties", "patternProperties", "additionalProperties", "required", "propertyNames"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""The keywords that speak of values of one type, which count where `type` is missing."""

_OTHER_NAMES = {
    "int": "integer",
    "float": "number",
    "double": "number",
    "str": "string",
    "text": "string",
    "bool": "boolean",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}
"""Names of types that are not JSON Schema's but that people write."""

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def types_of(schema: Any, root: Mapping[str, Any], seen: set[int] | None = None) -> set[str]:
    """Return the types that a schema allows, as far as it says so. References begin at `root`.

    `seen` has the identities of the schemas that were looked at already, each of which counts once.
    """
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) > _MOST_SCHEMAS:
        return set()
    seen.add(id(schema))
    given = schema.get("type")
    kinds = given if isinstance(given, list) else [given]
    types = {_OTHER_NAMES.get(kind, kind) for kind in kinds if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not types and isinstance(values, list):
        types = {_NAMES.get(type(value), "null") for value in values}
    for inner in _inner(schema, root):
        types |= types_of(inner, root, seen)
    return types or {kind for kind, keywords in _IMPLIED.items() if any(keyword in schema for keyword in keywords)}


def properties_of(
    schema: Any, root: Mapping[str, Any] | None = None, seen: set[int] | None = None
) -> Mapping[str, Any]:
    """Return the schema of each property that an object may have, by name. References begin at `root`."""
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) > _MOST_SCHEMAS:
        return {}
    seen.add(id(schema))
    root = schema if root is None else root
    found: dict[str, Any] = {}
    for inner in _inner(schema, root):
        found |= properties_of(inner, root, seen)
    own = schema.get("properties")
    return found | own if isinstance(own, dict) else found


def _inner(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas that a schema refers to or combines."""
    if isinstance(reference := schema.get("$ref"), str):
        yield _target(reference, root)
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key)
        yield from inner if isinstance(inner, list) else ()


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference inside of `root` names, None if it names nothing there."""
    path, found = reference.split("/"), root
    if path[0] != "#":
        return None
    for part in path[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None  # type: ignore[assignment]
    return found
