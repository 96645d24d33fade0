"""Strict JSON into typed values, with errors that name the field; and values into JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.explain import explain

T = TypeVar("T")

dumps = msgspec.json.Encoder().encode
"""Return a value as JSON in UTF-8."""


def decode(body: bytes, kind: type[T], prepare: Callable[[Any], Any] = lambda value: value) -> T:
    """Return strict JSON as `kind`: no duplicate keys, no lone surrogates, no unknown fields, no type that is nearly
    right. `prepare` is applied to the value first.

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
    if b"\\u" in body and _HALF_PAIR.search(body):
        _refuse_surrogates(value)
    return convert(prepare(value), kind)


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """Return `value` as `kind`. Raises InvalidRequest that names the first wrong field in alphabetical order, whatever
    the order of keys is. `where` is the field that holds the value; empty for a whole body.
    """
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
    """Raise InvalidRequest unless `value` is nested at most `depth` deep, has at most `values` values and keys in it,
    and all of them can be said in JSON and in msgpack: texts of whole characters, finite numbers of at most 64 bits,
    booleans, null, and lists and objects of them.
    """
    if value == {} or value == []:  # Fast path of most fields.
        return
    level, seen = [value], 0
    for _ in range(depth + 1):
        objects = [v for v in level if isinstance(v, dict)]
        seen += len(level) + sum(map(len, objects))
        if seen > values:
            raise InvalidRequest(f"{param} holds over {values} values", param=param)
        if not _are_plain(level):
            _refuse_wrong(value, param)
        inner = [v for own in objects for v in own.values()]
        level = inner + [v for own in level if isinstance(own, list) for v in own]
        if not level:
            return
    raise InvalidRequest(f"{param} is nested over {depth} deep", param=param)


_PLAIN = {str, int, float, bool, type(None), dict, list}


def _are_plain(values: list[Any]) -> bool:
    """Return whether nothing is wrong with any of these values. Many are looked at together, since a body of a megabyte
    has hundreds of thousands.
    """
    kinds = set(map(type, values))
    if not kinds <= _PLAIN:
        return False
    texts = [v for v in values if type(v) is str] if str in kinds else []
    keys = [k for v in values if type(v) is dict for k in v] if dict in kinds else []
    numbers = [v for v in values if type(v) is int] if int in kinds else [0]
    return (
        all(type(k) is str for k in keys)
        and _is_whole("".join([*texts, *keys]))
        and min(numbers) >= -(2**63)
        and max(numbers) < 2**63
        and all(math.isfinite(v) for v in values if type(v) is float)
    )


def _wrong(item: Any) -> str:
    """Return what is wrong with a value, whatever is in it; empty for nothing."""
    if isinstance(item, str):
        return "" if item.isascii() or _is_whole(item) else "holds half a surrogate pair"
    if isinstance(item, dict):
        if not all(isinstance(key, str) for key in item):
            return "has a key that is no text"
        return "" if all(map(_is_whole, item)) else "has a key with half a surrogate pair"
    if isinstance(item, float):
        return "" if math.isfinite(item) else "must be a finite number"
    if isinstance(item, int):
        return "" if -(2**63) <= item < 2**63 else "must be a number of at most 64 bits"
    return "" if item is None or isinstance(item, list) else "is of a type that JSON does not have"


def _refuse_wrong(value: Any, param: str) -> None:
    """Raise InvalidRequest that names the place of the first value that is wrong, in the order of sorted keys."""
    if what := _wrong(value):
        raise InvalidRequest(f"{param} {what}", param=param)
    todo: list[tuple[str, Any]] = [(param, value)]  # lists and objects, which are not wrong themselves
    while todo:
        path, item = todo.pop()
        pairs = list(enumerate(item)) if isinstance(item, list) else sorted(item.items(), key=lambda pair: str(pair[0]))
        if not _are_plain([v for _, v in pairs]):
            for key, inner in pairs:
                if what := _wrong(inner):
                    place = _at(path, key)
                    raise InvalidRequest(f"{place} {what}", param=place)
        todo += [(_at(path, k), v) for k, v in reversed(pairs) if isinstance(v, list | dict)]


def _at(path: str, key: object) -> str:
    """Return the place of an index or a key, escaped and of bounded length."""
    if isinstance(key, int):
        return f"{path}[{key}]"[:200]
    name = ascii(str(key)[:64])[1:-1]
    return (f"{path}.{name}" if path else name)[:200]


def _is_whole(text: str) -> bool:
    """Return whether a text can be encoded: half a UTF-16 pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_text(text: str, path: str) -> None:
    if not _is_whole(text):
        raise InvalidRequest(f"{path or 'the body'} holds half a surrogate pair", param=path or None)


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


_HALF_PAIR = re.compile(
    rb"""\\\\u[dD]                                           # an escaped backslash, behind which this cannot tell
    | \\u[dD][89abAB]..(?!\\u[dD][c-fC-F])                   # a first half without a second one
    | (?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]      # a second half without a first one
    """,
    re.VERBOSE | re.DOTALL,
)
"""Pattern in the JSON of every text that holds half a UTF-16 pair; the values of other bodies need no check."""


def _refuse_surrogates(value: Any) -> None:
    """Raise InvalidRequest when a text in `value` or a key holds half a UTF-16 pair."""
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, str):
            _check_text(item, path)
        elif isinstance(item, list):
            todo += [(_at(path, i), v) for i, v in enumerate(item)]
        elif isinstance(item, dict):
            ordered = sorted(item.items(), reverse=True)
            todo += [(_at(path, k), v) for k, v in ordered]
            todo += [("", k) for k, _ in ordered]
