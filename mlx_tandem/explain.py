"""Explains why a value from a client or a file is wrong: names the field and says what it may be or what it needs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.limits import Range

_AT = re.compile(r" - at `(?:key in )?\$?\.?(?P<path>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<want>.*)`, got `(?P<got>.*)`$", re.DOTALL)

COMPARED_NAMES = 50
"""Most names that a misspelled one is compared with: each comparison takes up to a few hundred microseconds."""
LISTED_NAMES = 10_000
"""Most names that are looked at to choose those that are compared."""


def installing(extra: str) -> str:
    """Return how to install an extra of this package, which is on no registry: from its sources."""
    return f"pip install -e '.[{extra}]' in the folder of its sources"


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'a' or 'b'?" with up to three of `names` spelled most like `given`, or "" if none is
    similar.

    Case does not matter. The work is bounded: of more than COMPARED_NAMES names only those that begin with the same
    character are compared.
    """
    wanted = given[:140].casefold()
    known = {name.casefold(): name for name in islice(names, LISTED_NAMES)}
    if len(known) > COMPARED_NAMES:
        known = dict(islice((pair for pair in known.items() if pair[0][:1] == wanted[:1]), COMPARED_NAMES))
    near = [repr(known[match]) for match in difflib.get_close_matches(wanted, known, n=3)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def explain(error: msgspec.ValidationError, kind: Any, where: str = "") -> InvalidRequest:
    """Return msgspec's error about a value of type `kind` as one of ours, whose `param` is the path of the field.

    `where` is the field that holds the value; empty for a whole body.
    """
    text = str(error)
    at = _AT.search(text)
    inside = at.group("path") if at else ""
    path = where + (inside if not where or not inside or inside.startswith("[") else f".{inside}")
    what = text[: at.start()] if at else text
    if found := _UNKNOWN.match(what):
        param = _joined(path, ascii(found.group("name")[:64])[1:-1])
        return InvalidRequest(f"{param} is not a parameter here", param=param, code="unknown_parameter")
    if found := _MISSING.match(what):
        param = _joined(path, found.group("name"))
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    shown = path or "the body"
    if (r := _range(kind, inside)) is not None:
        number = "an integer" if r.integer else "a number"
        if _EXPECTED.match(what):
            return InvalidRequest(f"{shown} must be {number}", param=path or None, code="invalid_type")
        return InvalidRequest(f"{shown} must be {number} {r}", param=path or None)
    if found := _EXPECTED.match(what):
        if found.group("want") == "null":
            return InvalidRequest(f"{shown} is not supported", param=path or None, code="unsupported_parameter")
        if choices := _choices(kind, inside):
            return InvalidRequest(f"{shown} must be {choices}", param=path or None, code="invalid_type")
        want = found.group("want").replace(" | null", "").replace("|", "or")
        return InvalidRequest(
            f"{shown} must be of type {want}, not {found.group('got')}", param=path or None, code="invalid_type"
        )
    if what.startswith(("Invalid enum value", "Invalid value")):
        return InvalidRequest(f"{shown} must be {_choices(kind, inside) or 'another value'}", param=path or None)
    return InvalidRequest(f"{shown}: {what}"[:300], param=path or None)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _choices(kind: Any, path: str) -> str:
    """Return the values that the place at `path` in a `kind` may have, in words; empty where they are not listed."""
    types = _types_at(kind, path)
    values = {v: None for t in types if isinstance(t, inspect.LiteralType) for v in t.values}
    parent, _, name = path.rpartition(".")
    structs = [t for t in _types_at(kind, parent) if isinstance(t, inspect.StructType) and t.tag_field == name]
    values |= {t.tag: None for t in structs}
    if not values:
        return ""
    listed = ", ".join(map(repr, values))
    if any(isinstance(t, inspect.FloatType) for t in types):
        return f"a number or {listed}"
    return f"one of {listed}"


def _range(kind: Any, path: str) -> Range | None:
    """Return the range of the number at `path` in a `kind`; None where there is no number with two bounds."""
    for t in _types_at(kind, path):
        if isinstance(t, inspect.IntType | inspect.FloatType) and t.ge is not None and t.le is not None:
            return Range(t.ge, t.le, isinstance(t, inspect.IntType))
    return None


def _types_at(kind: Any, path: str) -> list[inspect.Type]:
    """Return the types of which the place at `path` in a `kind` has one."""
    places = [inspect.type_info(kind)]
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        places = [inner for place in places for inner in _inside(place, part)]
    return [t for place in places for t in _members(place)]


def _inside(place: inspect.Type, part: str) -> Iterator[inspect.Type]:
    for t in _members(place):
        if isinstance(t, inspect.StructType):
            yield from (f.type for f in t.fields if f.encode_name == part)
        elif isinstance(t, inspect.DictType):
            yield t.value_type
        elif isinstance(t, inspect.ListType | inspect.VarTupleType):
            yield t.item_type
        elif isinstance(t, inspect.TupleType):
            yield from t.item_types


def _members(place: inspect.Type) -> tuple[inspect.Type, ...]:
    return place.types if isinstance(place, inspect.UnionType) else (place,)
