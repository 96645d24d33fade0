"""Strict JSON into typed values, with errors that name the field. Used by every way in; no web framework."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from mlx_tandem.errors import InvalidRequest

T = TypeVar("T")


def decode(body: bytes, kind: type[T]) -> T:
    """Strict JSON into `kind`: no duplicate keys, no lone surrogates, no unknown fields, no type that is nearly right.

    NaN and numbers too large for a float are let through here, since the range check of their field names it.
    """
    try:
        value = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise InvalidRequest("the body is not UTF-8", code="invalid_json") from e
    except RecursionError as e:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from e
    except ValueError as e:
        position = f" at character {e.pos}" if isinstance(e, json.JSONDecodeError) else ""
        raise InvalidRequest(f"the body is not valid JSON{position}", code="invalid_json") from e
    if b"\\u" in body:
        _refuse_surrogates(value)
    return convert(value, kind)


def convert(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise _explain(str(e)) from e


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(f"the key {key[:64]!a} appears twice", param=ascii(key[:64])[1:-1])
            seen.add(key)
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _refuse_surrogates(value: Any) -> None:
    """Half a UTF-16 pair is no character and cannot be encoded again."""
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as e:
                raise InvalidRequest(f"{path or 'the body'} holds half a surrogate pair", param=path or None) from e
        elif isinstance(item, list):
            todo += [(f"{path}[{i}]", v) for i, v in enumerate(item)]
        elif isinstance(item, dict):
            todo += [("", k) for k in item]
            todo += [(f"{path}.{k}" if path else k, v) for k, v in item.items()]


_AT = re.compile(r" - at `(?:key in )?\$?\.?(?P<path>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<want>.*)`, got `(?P<got>.*)`$", re.DOTALL)


def _explain(text: str) -> InvalidRequest:
    """The library's message as ours, with the field's path."""
    at = _AT.search(text)
    path = at.group("path") if at else ""
    what = text[: at.start()] if at else text
    if found := _UNKNOWN.match(what):
        name = ascii(found.group("name")[:64])[1:-1]
        param = f"{path}.{name}" if path else name
        return InvalidRequest(f"{param} is not a parameter here", param=param, code="unknown_parameter")
    if found := _MISSING.match(what):
        param = f"{path}.{found.group('name')}" if path else found.group("name")
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    where = path or "the body"
    if found := _EXPECTED.match(what):
        if found.group("want") == "null":
            return InvalidRequest(f"{where} is not supported", param=path or None, code="unsupported_parameter")
        want = found.group("want").replace(" | null", "").replace("|", "or")
        return InvalidRequest(
            f"{where} must be of type {want}, not {found.group('got')}", param=path or None, code="invalid_type"
        )
    if what.startswith("Invalid enum value"):
        return InvalidRequest(f"{where} has a value that is not supported", param=path or None)
    return InvalidRequest(f"{where}: {what}"[:300], param=path or None)
