"""Strict JSON into typed values, with errors that name the field. Used by every way in; no web framework."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.explain import explain

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
        raise explain(e, kind) from e


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
