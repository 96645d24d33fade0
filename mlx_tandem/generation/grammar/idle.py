"""Finding what a JSON schema says without effect: keywords that every value satisfies, and other spellings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


def drop_idle(part: dict[str, Any]) -> None:
    """Remove the keywords of one schema object that no value can break, and write counts such as 2.0 as integers.

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
    if "format" in part and part["format"] not in FORMATS | OTHER_FORMATS:
        del part["format"]


def _drop(part: dict[str, Any], *keywords: str) -> None:
    for keyword in keywords:
        part.pop(keyword, None)


def _both_true(part: Mapping[str, Any]) -> bool:
    return all(is_true(part.get(keyword, True)) for keyword in ("then", "else"))


def is_true(schema: Any) -> bool:
    """Return whether it is certain that every value is valid under this schema."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() - _ANNOTATIONS)


def names_pattern(names: Any) -> str | None:
    """Return a pattern that the names have to match which a schema of names (`propertyNames`) allows.

    It is "" for a schema that allows every name, and None for one that says more than a pattern or a list does.
    """
    if is_true(names):
        return ""
    if not isinstance(names, dict):
        return None
    said = names.keys() - _ANNOTATIONS
    if "type" in said and "string" not in ([names["type"]] if isinstance(names["type"], str) else names["type"]):
        return None
    match sorted(said - {"type"}):
        case []:
            return ""
        case ["pattern"]:
            return str(names["pattern"])
        case ["const"]:
            return _one_of([names["const"]])
        case ["enum"]:
            return _one_of(names["enum"])
    return None


def _one_of(names: list[Any]) -> str | None:
    """Return a pattern that matches these names only; None if none of them is a text."""
    found = [_SPECIAL.sub(r"\\\g<0>", name) for name in names if isinstance(name, str)]
    return f"^({'|'.join(found)})$" if found else None


def bind_names(part: dict[str, Any], pattern: str) -> None:
    """Write `propertyNames` with this pattern as the `patternProperties` that mean the same.

    With a pattern other than "", the object has no properties of its own.
    """
    del part["propertyNames"]
    if pattern:
        part["patternProperties"] = {pattern: part.get("additionalProperties", True)}
        part["additionalProperties"] = False
