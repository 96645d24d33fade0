"""JSON schemas by the categories of the public test suites: what a schema can say, in many combinations.

Each is small enough that a model which writes at random ends its answer within a few hundred tokens.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

Schema = dict[str, Any] | bool

WORDS = ("red", "green", "blue", "north", "south", "one", "two", "three")
TEXT: Schema = {"type": "string", "maxLength": 12}
INT: Schema = {"type": "integer", "minimum": -1000, "maximum": 1000}


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False} | more


def nesting() -> list[Schema]:
    found: list[Schema] = []
    for depth in range(1, 7):
        inner: dict[str, Any] = {"type": "boolean"}
        listed: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
        for level in range(depth):
            inner = obj({f"level{level}": inner})
            listed = {"type": "array", "items": listed, "maxItems": 2}
        found += [inner, listed, obj({"list": listed, "object": inner})]
    for width in (1, 2, 4, 8):
        found.append(obj({f"key{i}": (TEXT, INT, {"type": "boolean"}, {"type": "null"})[i % 4] for i in range(width)}))
        found.append(obj({f"key{i}": obj({"x": INT, "y": INT}) for i in range(min(width, 4))}))
    found += [
        obj({name: TEXT})
        for name in ("", "a b", 'quo"te', "back\\slash", "line\nbreak", "ümläut", "日本", "$ref", "a/b~c")
    ]
    return found


def enums() -> list[Schema]:
    found: list[Schema] = [{"enum": list(WORDS[:n])} for n in range(1, 9)]
    found += [
        {"enum": [1, 2, 3]},
        {"enum": [1.5, -2.25, 1e3]},
        {"enum": [None]},
        {"enum": [True, False, None]},
        {"enum": ["a", 1, None, True]},
        {"enum": [[1, 2], [3], []]},
        {"enum": [{"a": 1}, {"b": [2]}, {}]},
        {"enum": ["", " ", "\n", '"', "\\", "é", "😀"]},
        {"type": "string", "enum": ["yes", "no"]},
        {"type": "integer", "enum": [10, 20, 30]},
        {"type": ["string", "null"], "enum": ["x", None]},
    ]
    values: tuple[Any, ...] = ("a", 0, -1, 2.5, True, None, [], {}, [1, "b"], {"k": {"n": None}}, "tab\there")
    found += [{"const": value} for value in values]
    found += [obj({"kind": {"const": word}, "value": {"enum": list(WORDS[i:])}}) for i, word in enumerate(WORDS[:6])]
    return found


def patterns() -> list[Schema]:
    shapes = (
        "^[a-z]{1,8}$",
        "^[A-Z][a-z]{0,6}$",
        "^\\d{3}-\\d{4}$",
        "^(red|green|blue)$",
        "^[0-9a-f]{8}$",
        "^a+b{1,3}$",
        "^(ab|cd){1,3}$",
        "^[^\\s]{2,5}$",
        "^x?y?z?$",
        "^\\w{1,6}@\\w{1,6}\\.com$",
        "^#[0-9A-Fa-f]{6}$",
        "^[+-]?\\d{1,3}(\\.\\d{1,2})?$",
        "^$",
        "^\\.\\*\\+$",
        "^[\\u00e0-\\u00ff]{1,3}$",
        "^v\\d+\\.\\d+$",
    )
    found: list[Schema] = [{"type": "string", "pattern": shape} for shape in shapes]
    found += [obj({"code": {"type": "string", "pattern": shape}, "n": INT}) for shape in shapes[:8]]
    found += [
        {"type": "string", "minLength": low, "maxLength": high}
        for low, high in ((0, 0), (0, 1), (1, 1), (3, 8), (10, 20))
    ]
    found += [
        {"type": "string", "pattern": "^[ab]*$", "maxLength": 6},
        {"type": "string", "pattern": "b", "maxLength": 5},
        {"type": "array", "items": {"type": "string", "pattern": "^[xyz]{2}$"}, "minItems": 1, "maxItems": 3},
        {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$", "maxLength": 6}]},
    ]
    return found


def formats() -> list[Schema]:
    names = ("date-time", "time", "date", "duration", "hostname", "ipv4", "uuid")
    found: list[Schema] = [{"type": "string", "format": name} for name in names]
    found += [obj({"id": TEXT, "at": {"type": "string", "format": name}}) for name in names[:4]]
    found += [{"type": "string", "format": "password", "maxLength": 8}, {"type": "integer", "format": "int32", **INT}]
    return found


def refs() -> list[Schema]:
    point = obj({"x": INT, "y": INT})
    found: list[Schema] = []
    for word in ("$defs", "definitions"):
        found += [
            {word: {"point": point}, "$ref": f"#/{word}/point"},
            {word: {"point": point}} | obj({"from": {"$ref": f"#/{word}/point"}, "to": {"$ref": f"#/{word}/point"}}),
            {word: {"a": {"$ref": f"#/{word}/b"}, "b": {"enum": ["deep"]}}} | obj({"v": {"$ref": f"#/{word}/a"}}),
            {word: {"p": point}, "type": "array", "items": {"$ref": f"#/{word}/p"}, "maxItems": 2},
            {word: {"a b": INT}} | obj({"v": {"$ref": f"#/{word}/a%20b"}}),
            {word: {"a/b": INT}} | obj({"v": {"$ref": f"#/{word}/a~1b"}}),
        ]
    tree = obj({"value": {"enum": [0, 1]}, "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}})
    found += [
        {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"},
        obj({"name": TEXT, "same": {"$ref": "#/properties/name"}}),
        obj({"leaf": {"type": "boolean"}, "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        {"$defs": {"n": INT}, "anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
        {"$defs": {"s": {"type": "string"}}} | obj({"v": {"$ref": "#/$defs/s", "maxLength": 4}}),
        {"$defs": {"w": {"enum": list(WORDS)}}} | obj({k: {"$ref": "#/$defs/w"} for k in "abc"}),
    ]
    return found


def arrays() -> list[Schema]:
    items: tuple[Schema, ...] = (INT, TEXT, {"type": "boolean"}, {"enum": list(WORDS[:3])}, obj({"n": INT}))
    found: list[Schema] = [
        {"type": "array", "items": item, "minItems": low, "maxItems": high}
        for item, (low, high) in product(items, ((0, 0), (0, 1), (1, 3), (2, 2), (4, 6)))
    ]
    found += [
        {"type": "array", "prefixItems": [INT, TEXT], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [INT, TEXT], "items": False},
        {"type": "array", "prefixItems": [{"const": "head"}], "items": INT, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}, INT], "items": False, "minItems": 3},
        {"type": "array", "items": {"type": "array", "items": INT, "minItems": 2, "maxItems": 2}, "maxItems": 2},
        {"type": "array", "items": False},
        {"type": "array", "items": {"anyOf": [INT, {"type": "null"}]}, "minItems": 1, "maxItems": 4},
        {"type": "array", "items": INT, "maxItems": 3, "uniqueItems": False},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [INT, TEXT], "maxItems": 2},
    ]
    return found


def numbers() -> list[Schema]:
    found: list[Schema] = [
        {"type": "integer", "minimum": low, "maximum": high}
        for low, high in ((0, 0), (0, 9), (1, 10), (-5, 5), (-100, -90), (95, 1005), (0, 2**31), (-(2**40), 2**40))
    ]
    found += [
        {"type": "number", "minimum": low, "maximum": high}
        for low, high in ((0, 1), (-1, 1), (0.5, 0.75), (-10.25, -10), (1.5, 200.5), (99.9, 100.1))
    ]
    found += [
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "number", "exclusiveMinimum": -2.5, "maximum": 2.5},
        {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 5},
        {"type": "integer", "minimum": -99, "maximum": 99, "multipleOf": 3},
        {"type": "integer", "minimum": 10, "maximum": 70, "multipleOf": 7},
        {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5},
        {"type": "number", "minimum": 0, "maximum": 3, "multipleOf": 0.25},
        {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
        {"type": ["number", "string"], "minimum": 0, "maximum": 1, "maxLength": 3},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
            "maximum": 9,
        },
    ]
    found += [obj({"n": n}) for n in found[:12]]
    return found


def unions() -> list[Schema]:
    simple: tuple[Schema, ...] = (INT, TEXT, {"type": "boolean"}, {"type": "null"}, {"enum": ["x", 5]}, obj({"a": INT}))
    found: list[Schema] = [{"anyOf": [a, b]} for i, a in enumerate(simple) for b in simple[i + 1 :]]
    found += [
        {"oneOf": [INT, {"type": "boolean"}]},
        {"oneOf": [TEXT, INT, {"type": "null"}]},
        {"oneOf": [{"const": 1}, {"const": 2}]},
        {"oneOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"enum": ["low", "high"]}]},
        {"oneOf": [{"enum": [1, "1"]}, {"const": True}, {"type": "null"}]},
        {"oneOf": [obj({"n": INT}), {"type": "array", "items": INT, "maxItems": 1}]},
        {"oneOf": [obj({"kind": {"const": "a"}, "x": INT}), obj({"kind": {"const": "b"}, "y": TEXT})]},
        obj({"v": {"oneOf": [obj({"t": {"enum": ["p", "q"]}}), obj({"t": {"const": "r"}, "n": INT})]}}),
        {
            "$defs": {"cat": obj({"pet": {"const": "cat"}, "lives": INT}), "dog": obj({"pet": {"const": "dog"}})},
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        },
        {"allOf": [INT, {"minimum": 0}]},
        {"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]}, obj({"a": {}, "b": TEXT})]},
        {"allOf": [{"anyOf": [INT, TEXT]}, {"type": "integer"}]},
        {"type": ["string", "integer", "null"], "maxLength": 4, "minimum": 0, "maximum": 9},
        {"type": ["boolean", "array"], "items": INT, "maxItems": 2},
        obj({"v": {"anyOf": [obj({"a": INT}), obj({"b": TEXT}), {"type": "array", "items": INT, "maxItems": 2}]}}),
        obj(
            {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "b": {"type": ["null", "boolean"]}}
        ),
    ]
    return found


def additional() -> list[Schema]:
    values: tuple[Schema, ...] = (INT, {"type": "boolean"}, {"enum": ["v", None]}, obj({"z": INT}))
    found: list[Schema] = [
        {"type": "object", "additionalProperties": value, "maxProperties": most}
        for value, most in product(values, (0, 1, 2))
    ]
    found += [
        {
            "type": "object",
            "properties": {"a": INT},
            "required": ["a"],
            "additionalProperties": value,
            "maxProperties": 2,
        }
        for value in values
    ]
    found += [
        {"type": "object", "patternProperties": {"^x": value}, "additionalProperties": False, "maxProperties": 2}
        for value in values
    ]
    pair = {"^n_[a-z]{1,4}$": INT, "^s_[a-z]{1,4}$": TEXT}
    found += [
        {"type": "object", "patternProperties": pair, "additionalProperties": False, "maxProperties": 3},
        {"type": "object", "properties": {}, "additionalProperties": False},
        {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 2},
        obj({"a": INT, "b": TEXT}, minProperties=2),
    ]
    for required in ([], ["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]):
        found.append(obj({"a": INT, "b": {"type": "boolean"}, "c": TEXT}, required))
        found.append(
            obj({"a": INT, "b": {"type": "boolean"}, "c": TEXT}, required, title="t", description="d", default={})
        )
    return found


def combined() -> list[Schema]:
    address = obj({"street": TEXT, "zip": {"type": "string", "pattern": "^\\d{5}$"}})
    found: list[Schema] = []
    for i in range(32):
        properties: dict[str, Any] = {"id": {"type": "integer", "minimum": 1, "maximum": 10**i if i < 9 else 99}}
        if i & 1:
            properties["tags"] = {"type": "array", "items": {"enum": list(WORDS[: 2 + i % 5])}, "maxItems": 1 + i % 3}
        if i & 2:
            properties["address"] = {"$ref": "#/$defs/address"}
        if i & 4:
            properties["score"] = {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]}
        if i & 8:
            properties["when"] = {"type": "string", "format": "date"}
        if i & 16:
            properties["state"] = {"type": "string", "enum": ["open", "closed"]}
        found.append({"$defs": {"address": address}} | obj(properties, list(properties)[: 1 + i % len(properties)]))
    return found


LOOKAHEADS = (
    "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
    "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$",
    "^(?=.{1,253}\\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\\.?$",
    "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$",
)
"""Patterns that zod and pydantic write: of an address, a duration, a host name and a decimal number."""


def idle() -> list[Schema]:
    """Keywords without effect and other spellings, as zod, pydantic, TypeBox and generators of OpenAPI write them."""
    record = {"type": "object", "additionalProperties": INT, "maxProperties": 2}
    names: tuple[Schema, ...] = (
        {"type": "string"},
        {"type": ["string", "null"], "description": "a name"},
        {},
        True,
        {"enum": ["a.b", "c", "d/e", 3, "x y", "-"]},
        {"const": "only"},
        {"type": "integer"},
        {"anyOf": [{"enum": ["a"]}, {"not": {}}, False]},
        {"minLength": 2, "maxLength": 3.0},
        {"minLength": 1},
        {"type": "string", "pattern": "^[a-z]{1,3}$"},
        {"$ref": "#/$defs/key"},
    )
    found: list[Schema] = [
        {"$defs": {"key": {"type": "string", "enum": ["red", "green"]}}} | record | {"propertyNames": name}
        for name in names
    ]
    found += [
        obj({"a": {"type": "string", "minLength": 1.0, "maxLength": 3.0}}),
        {"type": "array", "items": INT, "minItems": 1.0, "maxItems": 2.0},
        {"type": "object", "additionalProperties": INT, "minProperties": 1.0, "maxProperties": 2.0},
        {"type": "integer", "minimum": 2.0, "maximum": 5.0, "multipleOf": 1.0},
        {"type": "integer", "enum": [1.0, 2.0]},
        {"const": 3.0},
        obj({"a": {"type": "boolean", "then": {"const": 1}, "else": {"not": {"const": 1}}}}),
        obj({"a": INT}, **{"if": {"properties": {"a": {"const": 1}}}}),
        obj({"a": INT}, **{"if": {"required": ["a"]}, "then": True, "else": {}}),
        {"type": "array", "items": INT, "maxItems": 2, "minContains": 1, "maxContains": 1.0},
        {"type": "array", "items": INT, "maxItems": 1, "uniqueItems": True},
        obj({"a": INT}, dependentRequired={}, dependentSchemas={"a": True}, unevaluatedProperties=True),
        obj({"a": INT}, ["a"], dependentRequired={"a": []}, propertyNames={"type": "string"}),
        {"type": "array", "items": INT, "maxItems": 2, "unevaluatedItems": {}, "not": False},
        obj({"a": {"not": {}}, "b": INT}, ["b"]),
        obj({"a": INT, "": INT}, patternProperties={"^(a|b|é)?$": INT}, maxProperties=3),
        {
            "type": "object",
            "propertyNames": {"enum": ["x", "y"]},
            "additionalProperties": obj({"n": INT}),
            "required": ["x", "y"],
        },
        {"type": "string", "format": "time", "pattern": "^[01]\\d:[0-5]\\d$"},
        *({"type": "string", "maxLength": 14, "pattern": pattern} for pattern in LOOKAHEADS),
    ]
    return found


SUPPORTED: dict[str, list[Schema]] = {
    "idle": idle(),
    "nesting": nesting(),
    "enums": enums(),
    "patterns": patterns(),
    "formats": formats(),
    "refs": refs(),
    "arrays": arrays(),
    "numbers": numbers(),
    "unions": unions(),
    "additionalProperties": additional(),
    "combined": combined(),
}
"""Schemas whose answers must be valid, by category."""

REFUSED: dict[str, tuple[Schema, str]] = {
    "not": ({"not": {"type": "string"}}, ".not"),
    "if": (obj({"a": {"if": {"const": 1}, "then": {"const": 2}}}), ".properties.a.if"),
    "contains": ({"type": "array", "items": {"contains": INT}}, ".items.contains"),
    "uniqueItems": (obj({"a": {"type": "array", "uniqueItems": True}}), ".properties.a.uniqueItems"),
    "propertyNames": ({"type": "object", "propertyNames": {"format": "email"}}, ".propertyNames"),
    "propertyNames beside keys": (obj({"a": INT}, propertyNames={"enum": ["a"]}), ".propertyNames"),
    "propertyNames of two kinds": ({"propertyNames": {"pattern": "a", "minLength": 2}}, ".propertyNames"),
    "in a record": (
        {"propertyNames": {"pattern": "a"}, "additionalProperties": {"not": {"const": 1}}},
        ".additionalProperties.not",
    ),
    "then": ({"if": {"const": 1}, "then": {"const": 2}, "minContains": 2}, ".if"),
    "in an alternative": ({"oneOf": [{"const": 1}, {"const": 2, "not": {"const": 2}}]}, ".oneOf[1].not"),
    "pattern of keys": ({"patternProperties": {"a": INT, "(?=a)": INT}}, ".patternProperties.(?=a)"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, ".unevaluatedProperties"),
    "in a reference": ({"$defs": {"d": {"items": {"not": {"const": 1}}}}, "$ref": "#/$defs/d"}, ".$defs.d.items.not"),
    "in a union": ({"anyOf": [INT, {"not": {"const": 1}}]}, ".anyOf[1].not"),
    "in a tuple": ({"prefixItems": [True, {"uniqueItems": True}]}, ".prefixItems[1].uniqueItems"),
    "format": (obj({"a": {"format": "uri-template"}}), ".properties.a.format"),
    "minProperties": ({"type": "object", "minProperties": 2}, ".minProperties"),
    "remote reference": (obj({"a": {"$ref": "https://example.com/s"}}), ".properties.a.$ref"),
    "reference to an anchor": ({"$defs": {"a": {"$anchor": "x"}}, "$ref": "#x"}, ".$ref"),
    "another base": (obj({"a": {"$id": "https://example.com/s", "$ref": "#/$defs/a"}}), ".properties.a.$id"),
    "missing reference": (obj({"a": {"$ref": "#/$defs/a"}}), ".properties.a.$ref"),
    "dialect": ({"$schema": "https://example.com/s"}, ".$schema"),
    "options": ({"x-guidance": {"lenient": True}}, ".x-guidance"),
    "type": (obj({"a": {"type": "text"}}), ".properties.a.type"),
    "length": (obj({"a": {"type": "string", "minLength": -1}}), ".properties.a.minLength"),
    "tuple of another dialect": ({"items": [INT]}, ".items"),
    "nothing": (False, ""),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 2}, ""),
    "overlapping alternatives": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ".oneOf"),
    "equal tags": (
        obj({"v": {"oneOf": [obj({"t": {"const": 1}}), obj({"t": {"enum": [1.0]}})]}}),
        ".properties.v.oneOf",
    ),
    "pattern of listed keys": (
        obj({"a": INT, "b": INT}, ["a"], patternProperties={"^(a|b)$": INT}),
        ".patternProperties.^(a|b)$",
    ),
    "pattern of required keys": (
        {"patternProperties": {"^é$": INT}, "required": ["é"], "additionalProperties": False},
        ".patternProperties.^é$",
    ),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, ".pattern"),
    "endless": ({"$ref": "#"}, ""),
}
"""Schemas that are refused, with the place that the error names; empty for the schema itself."""


def supported() -> list[tuple[str, Schema]]:
    """Return all schemas that are supported, with their categories."""
    return [(name, schema) for name, schemas in SUPPORTED.items() for schema in schemas]


if __name__ == "__main__":
    print(json.dumps({name: len(schemas) for name, schemas in SUPPORTED.items()}), len(supported()))
