"""What comes from outside: bounds on nested values, and errors that do not depend on the order of keys."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import check_nested, convert, decode

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
ODD = st.sampled_from([math.nan, -math.inf, 2**63, -(2**63) - 1, 10**400, "a\ud800", (1,), {1}, b"x", {1: 2}])
KEYS = TEXTS | st.sampled_from(["\udfff", "é" * 300])


def trees(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4))


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + depth_of(v) for v in inner), default=0)


def size_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(size_of, inner)) + (len(value) if isinstance(value, dict) else 0)


def refusal(value: Any, depth: int = 64, values: int = 10_000) -> InvalidRequest | None:
    try:
        check_nested(value, "p", depth=depth, values=values)
    except InvalidRequest as e:
        return e
    return None


@given(value=trees(PLAIN | TEXTS, TEXTS), depth=st.integers(0, 3), values=st.integers(1, 12))
def test_what_json_and_msgpack_can_say_passes_within_its_bounds(value: Any, depth: int, values: int) -> None:
    assert refusal(value) is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value)) == value
    assert (refusal(value, depth, values) is None) == (depth_of(value) <= depth and size_of(value) <= values)


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: reordered(v) for k, v in reversed(value.items())}
    return [reordered(v) for v in value] if isinstance(value, list) else value


def can_be_said(value: Any) -> bool:
    """The oracle: strict JSON in UTF-8, with integers of 64 bits."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and can_be_said(k) for k in value) and all(map(can_be_said, value.values()))
    if isinstance(value, list):
        return all(map(can_be_said, value))
    if isinstance(value, str):
        return not any(0xD800 <= ord(c) < 0xE000 for c in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and -(2**63) <= value < 2**63)


@pytest.mark.promise("C5")
@given(value=trees(PLAIN | TEXTS | ODD, KEYS))
def test_anything_else_is_refused_at_its_place(value: Any) -> None:
    error = refusal(value)
    again = refusal(reordered(value))
    assert (error and error.message) == (again and again.message)
    assert (error is None) == can_be_said(value)
    if error is not None:
        assert error.param is not None and error.param.startswith("p") and len(error.param) <= 200
        assert error.param.isascii() and error.message.isascii()


@pytest.mark.parametrize("inside", [lambda v: v, lambda v: [v], lambda v: {"k": v}, lambda v: [0, {"k": [v, 1]}]])
def test_integers_of_64_bits_and_no_others(inside: Callable[[int], Any]) -> None:
    for number in (-(2**63), 2**63 - 1):
        assert refusal(inside(number)) is None
    for number in (-(2**63) - 1, 2**63):
        error = refusal(inside(number))
        assert error is not None
        assert error.message.endswith("must be a number of at most 64 bits")


class Inner(Struct, forbid_unknown_fields=True):
    a: int = 0
    b: str = ""


class Outer(Struct, forbid_unknown_fields=True):
    x: Inner | None = None
    y: list[Inner] = []
    z: int = 0


FIELDS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 1) | st.text(max_size=1), max_size=3)


@given(
    value=st.fixed_dictionaries(
        {}, optional={"x": FIELDS | st.just(3), "y": st.lists(FIELDS, max_size=2), "z": PLAIN, "w": PLAIN}
    )
)
def test_a_type_error_does_not_depend_on_the_order_of_keys(value: Any) -> None:
    def outcome(given: Any) -> Any:
        try:
            return convert(given, Outer, "at")
        except InvalidRequest as e:
            return e.message, e.param

    assert outcome(value) == outcome(reordered(value))


def test_half_a_surrogate_pair_is_named_in_the_order_of_keys() -> None:
    for body in (b'{"b": "\\ud800", "a": ["\\ud800"]}', b'{"a": ["\\ud800"], "b": "\\ud800"}'):
        with pytest.raises(InvalidRequest) as e:
            decode(body, dict)
        assert e.value.param == "a[0]"
    with pytest.raises(InvalidRequest, match="the body holds half a surrogate pair"):
        decode(b'{"\\ud800": "\\ud800"}', dict)


PIECES = ["\\ud83d", "\\ude00", "\\uDBFF", "\\uDC00", "\\\\", "\\n", "\\u0041", "ud83d", "ude00", "u", "é", '","']


UNITS = st.builds(
    lambda unit, case: "\\u" + case(f"{unit:04x}"), st.integers(0xD7F0, 0xE00F), st.sampled_from([str.lower, str.upper])
)
"""Escapes of UTF-16 code units, most of which are half a pair."""


@example(["\\\\", "ud83d", "\\ude00"])
@example(["\\ud83d", "\\\\", "ude00"])
@given(st.lists(st.sampled_from(PIECES) | UNITS, max_size=8))
def test_half_a_surrogate_pair_is_found_whatever_is_escaped_beside_it(pieces: list[str]) -> None:
    body = '["' + "".join(pieces) + '"]'
    texts: list[str] = json.loads(body)
    if any("\ud800" <= c <= "\udfff" for text in texts for c in text):
        with pytest.raises(InvalidRequest, match="half a surrogate pair"):
            decode(body.encode(), list[str])
    else:
        assert decode(body.encode(), list[str]) == texts
