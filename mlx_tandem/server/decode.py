"""Strict JSON into typed values, with errors that name the field. Used by every way in; no web framework."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.explain import explain

T = TypeVar("T")


def decode(body: bytes, kind: type[T], select: Callable[[Any], Any] = lambda value: value) -> T:
    """Return strict JSON as `kind`: no duplicate keys, no lone surrogates, no unknown fields, no type that is nearly
    right. `select` is applied to the value first.

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
    return convert(select(value), kind)


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """Return `value` as `kind`. Raises InvalidRequest that names the first wrong field in alphabetical order, whatever
    the order of keys is. `where` is the field that holds the value; empty for a whole body."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        pass
    try:
        return msgspec.convert(_in_order(value), kind)
    except msgspec.ValidationError as e:
        raise explain(e, kind, where) from e


def _in_order(value: Any, depth: int = 8) -> Any:
    """Return `value` with the keys of its objects sorted, as deep as fields are typed."""
    if depth and isinstance(value, dict):
        return {k: _in_order(value[k], depth - 1) for k in sorted(value, key=str)}
    if depth and isinstance(value, list):
        return [_in_order(v, depth - 1) for v in value]
    return value


def check_nested(value: Any, param: str, *, depth: int, values: int) -> None:
    """Raise InvalidRequest unless `value` is nested at most `depth` deep, has at most `values` values in it, and all of
    them can be said in JSON and in msgpack: texts of whole characters, finite numbers of at most 64 bits, booleans,
    null, and lists and objects of them."""
    todo: list[tuple[str, Any, int]] = [(param, value, 0)]
    while todo:
        path, item, deep = todo.pop()
        values -= 1
        if deep > depth:
            raise InvalidRequest(f"{param} is nested over {depth} deep", param=param)
        if values < 0:
            raise InvalidRequest(f"{param} holds too many values", param=param)
        if isinstance(item, str):
            _check_text(item, path)
        elif isinstance(item, dict):
            todo += [(_inside(path, k), item[k], deep + 1) for k in sorted(item, key=str, reverse=True)]
            todo += [(path, str(k), deep) for k in item]
        elif isinstance(item, list):
            todo += [(f"{path}[{i}]", v, deep + 1) for i, v in reversed(list(enumerate(item)))]
        elif isinstance(item, float) and not math.isfinite(item):
            raise InvalidRequest(f"{path} must be a finite number", param=path)
        elif isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise InvalidRequest(f"{path} must be a number of at most 64 bits", param=path)
        elif item is not None and not isinstance(item, int | float):
            raise InvalidRequest(f"{path} is of a type that JSON does not have", param=path, code="invalid_type")


def _check_text(text: str, path: str) -> None:
    """Raise InvalidRequest for half a UTF-16 pair, which is no character and cannot be encoded again."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"{path or 'the body'} holds half a surrogate pair", param=path or None) from e


def _inside(path: str, key: object) -> str:
    """Return the place of a key, escaped and of bounded length."""
    name = ascii(str(key)[:64])[1:-1]
    return (f"{path}.{name}" if path else name)[:200]


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
    """Raise InvalidRequest when a text in `value` or a key holds half a UTF-16 pair."""
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, str):
            _check_text(item, path)
        elif isinstance(item, list):
            todo += [(f"{path}[{i}]", v) for i, v in enumerate(item)]
        elif isinstance(item, dict):
            ordered = sorted(item.items(), reverse=True)
            todo += [(_inside(path, k), v) for k, v in ordered]
            todo += [("", k) for k, _ in ordered]
