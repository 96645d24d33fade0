"""Simplifying JSON schemas: keywords that every value satisfies are removed, and unusual spellings are replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlx_tandem.generation.grammar.lookaheads import without_lookaheads

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
"""Formats that are enforced."""

OTHER_FORMATS = frozenset(
    """
    idn-email idn-hostname uri-reference uri-template iri iri-reference json-pointer relative-json-pointer regex
    """.split()
)
"""Formats that JSON Schema defines and that cannot be enforced. It defines no others, and says to ignore those."""

_COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
_ANNOTATIONS = frozenset("title description default examples deprecated readOnly writeOnly $comment".split())

_SPECIAL, _ESCAPED = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]"), r"\\\g<0>"
"""The characters that mean something in a pattern, and how they are written there."""


def drop_redundant(part: dict[str, Any]) -> None:
    """Remove the keywords of one schema object that every value satisfies, and write counts such as 2.0 as integers.

    The values that are valid stay the same. Schemas inside of this one are left as they are.
    """
    for keyword in _COUNTS & part.keys():
        if isinstance(part[keyword], float) and part[keyword].is_integer():
            part[keyword] = int(part[keyword])
    if not {"then", "else"} & part.keys() or ("if" in part and _both_true(part)):
        part.pop("if", None)
    if "if" not in part:
        _drop(part, "then", "else")
    if "contains" not in part:
        _drop(part, "minContains", "maxContains")
    if part.get("uniqueItems") is False or part.get("maxItems", 2) < 2:
        _drop(part, "uniqueItems")
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if is_true(part.get(keyword)):
            del part[keyword]
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if keyword in part and all(inner == [] or is_true(inner) for inner in part[keyword].values()):
            del part[keyword]
    if part.get("not") is False:
        del part["not"]
    if is_true(part.get("not")):
        part.clear()
        part["allOf"] = [False]
    if "format" in part and part["format"] not in FORMATS | OTHER_FORMATS:
        del part["format"]
    if len(patterns := without_lookaheads(part.get("pattern", ""))) > 1:
        del part["pattern"]
        part["allOf"] = [*part.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]
    elif "pattern" in part:
        part["pattern"] = patterns[0]


def _drop(part: dict[str, Any], *keywords: str) -> None:
    for keyword in keywords:
        part.pop(keyword, None)


def _both_true(part: Mapping[str, Any]) -> bool:
    return all(is_true(part.get(keyword, True)) for keyword in ("then", "else"))


def is_true(schema: Any) -> bool:
    """Return whether it is certain that every value is valid under this schema."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() - _ANNOTATIONS)


def names_allowed(names: Any) -> str | tuple[str, ...] | None:
    """Return what a schema of names (`propertyNames`) allows: the names, or a pattern that they have to match.

    The pattern is "" for a schema that allows every name. None is returned for one that says more than that.
    """
    if is_true(names):
        return ""
    if names is False or not isinstance(names, dict):
        return () if names is False else None
    said = names.keys() - _ANNOTATIONS
    if "type" in said and "string" not in ([names["type"]] if isinstance(names["type"], str) else names["type"]):
        return ()
    match sorted(said - {"type"}):
        case []:
            return ""
        case ["pattern"]:
            return str(names["pattern"])
        case ["minLength"] | ["maxLength"] | ["maxLength", "minLength"]:
            most = names.get("maxLength")
            return rf"^[\s\S]{{{int(names.get('minLength', 0))},{'' if most is None else int(most)}}}$"
        case ["const"]:
            return _texts([names["const"]])
        case ["enum"]:
            return _texts(names["enum"])
        case ["not"] if is_true(names["not"]):
            return ()
        case ["anyOf"]:
            found = [names_allowed(inner) for inner in names["anyOf"]]
            lists = [each for each in found if isinstance(each, tuple)]
            return _texts([name for each in lists for name in each]) if len(lists) == len(found) else None
    return None


def _texts(names: list[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def bind_names(part: dict[str, Any], names: str | tuple[str, ...], root: dict[str, Any]) -> None:
    """Write `propertyNames` that allow these names, or those of a pattern, as other keywords that mean the same.

    Unless they allow every name, the object has no properties of its own. The schema of several properties goes into
    the definitions of `root`.
    """
    del part["propertyNames"]
    if names == "":
        return
    inner = part.get("additionalProperties", True)
    part["additionalProperties"] = False
    is_counted = not {"minProperties", "maxProperties"}.isdisjoint(part)
    if not isinstance(names, str) and is_counted and not set(names) <= set(part.get("required", ())):
        names = f"^({'|'.join(_SPECIAL.sub(_ESCAPED, name) for name in names)})$"  # of optional keys only these count
    if isinstance(names, str):
        part["patternProperties"] = {names: inner}
        return
    if isinstance(inner, dict) and len(names) > 1:
        definitions = root.setdefault("$defs", {})
        key = next(key for n in range(len(definitions) + 1) if (key := f"values of a record {n}") not in definitions)
        definitions[key] = inner
        inner = {"$ref": f"#/$defs/{key.replace(' ', '%20')}"}
    part["properties"] = dict.fromkeys(names, inner)
