"""Limiting the nesting of unrestricted JSON, so that a model that only opens lists and objects comes to an end."""

from __future__ import annotations

from typing import Any

from mlx_tandem.generation.grammar.simplify import is_true
from mlx_tandem.limits import MAX_JSON_DEPTH

_SCALARS = ["null", "boolean", "number", "string"]


def with_depth(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that limits nesting to MAX_JSON_DEPTH, if `schema` allows any JSON, any object or any list.

    Return other schemas unchanged.
    """
    kind = schema.get("type")
    rest = {key: value for key, value in schema.items() if key not in ("type", "$schema")}
    inner = True
    if kind in ("object", "array"):
        inner = rest.pop("additionalProperties" if kind == "object" else "items", True)
    elif kind is not None:
        return schema
    if not (is_true(rest) and is_true(inner)):
        return schema
    levels: dict[str, Any] = {f"level {MAX_JSON_DEPTH}": {"type": _SCALARS}}
    for level in range(MAX_JSON_DEPTH):
        below = {"$ref": f"#/$defs/level%20{level + 1}"}
        nested = {
            "array": {"type": "array", "items": below},
            "object": {"type": "object", "additionalProperties": below},
        }
        levels[f"level {level}"] = {"anyOf": [{"type": _SCALARS}, *nested.values()]}
        if level == 0 and kind is not None:
            levels["level 0"] = nested[kind]
    return {"$defs": levels, "$ref": "#/$defs/level%200"}
