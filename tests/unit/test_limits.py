"""Ranges let through exactly what they say, and leave room for each value that has a meaning of its own."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.config import Config, EngineConfig, ModelConfig
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.limits import Range, check, check_model, check_name, check_token_ids
from mlx_tandem.types import SamplingParams

CHECKED = limits.PARAMETERS | limits.LEARNING


def refusal(name: str, value: Any) -> InvalidRequest | None:
    try:
        found = check(name, value, "field")
    except InvalidRequest as e:
        return e
    assert found == value
    return None


@pytest.mark.parametrize("name", CHECKED)
def test_both_bounds_are_included_and_nothing_beyond_them(name: str) -> None:
    r = CHECKED[name]
    step = 1 if r.integer else max(abs(r.high), abs(r.low), 1e-30) * 1e-6
    for value in (r.low, r.high):
        assert refusal(name, int(value) if r.integer else value) is None
    for value in (r.low - step, r.high + step, math.nan, math.inf, -math.inf):
        wrong = refusal(name, int(value) if r.integer and math.isfinite(value) else value)
        assert wrong is not None
        assert wrong.param == "field"
        assert wrong.code == ("invalid_type" if r.integer and not math.isfinite(value) else "invalid_value")
    for value in (True, "1", None, [1], *([1.5] if r.integer else [])):
        wrong = refusal(name, value)
        assert wrong is not None
        assert wrong.code == "invalid_type"


def test_a_range_in_words() -> None:
    assert str(Range(0, 1_048_576, integer=True)) == "between 0 and 1048576"
    assert str(Range(-0.5, 2.0)) == "between -0.5 and 2"
    with pytest.raises(InvalidRequest, match=r"^field must be a number between 0 and 2$"):
        check("temperature", 3, "field")
    with pytest.raises(InvalidRequest, match=r"^temperature must be a number$"):
        check("temperature", "3")


# --- values with a meaning of their own ----------------------------------------------------------------------------


def value_at(config: Config, place: str) -> Any:
    value: Any = config
    for part in place.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("place", limits.SETTINGS)
def test_the_default_of_a_setting_may_be_given(place: str) -> None:
    value, r = value_at(Config(EngineConfig(ModelConfig("x"))), place), limits.SETTINGS[place]
    assert value in (None, "auto") or r.low <= value <= r.high
    assert value is None or r.integer == isinstance(value, int)


def special(source: str) -> dict[str, set[float]]:
    """The values that the comment behind each name explains, such as `0: no limit`."""
    found: dict[str, set[float]] = {}
    for name, comment in re.findall(r'^ +"?(\w+)"?: .*?#(.*)$', source, re.MULTILINE):
        values = re.findall(r"(-?\d+(?:\.\d+)?)(?= and -?\d+:|: )", comment)
        if values:
            found[name] = set(map(float, values))
    return found


def sections(kind: type[Struct], place: str) -> dict[str, type[Struct]]:
    """The types of all parts of the settings, by their places."""
    default = {"model": ModelConfig("x")}
    found: dict[str, type[Struct]] = {}
    for name in kind.__struct_fields__:
        part = default.get(name) or getattr(Config(EngineConfig(ModelConfig("x"))), name, None)
        part = part or getattr(EngineConfig(ModelConfig("x")), name, None)
        if isinstance(part, Struct):
            inner = f"{place}{name}."
            found |= {inner: type(part)} | sections(type(part), inner)
    return found


def test_what_comments_say_of_a_setting_s_value_can_be_set() -> None:
    source = Path("mlx_tandem/config.py").read_text()
    by_class = {m[1]: special(m[2]) for m in re.finditer(r"class (\w+)\(Struct.*?\n(.*?)(?=\n\n\n|\Z)", source, re.S)}
    looked_at = 0
    for place, kind in (sections(Config, "") | {"engine.": EngineConfig}).items():
        for name, values in by_class[kind.__name__].items():
            if (r := limits.SETTINGS.get(place + name)) is not None:
                looked_at += 1
                assert all(r.low <= value <= r.high for value in values), f"{place}{name}: {values}"
    assert looked_at > 20


def test_what_comments_say_of_a_parameter_s_value_can_be_sent() -> None:
    said = special(Path("mlx_tandem/limits.py").read_text())
    looked_at = [name for name in said if name in CHECKED]
    assert len(looked_at) >= 6
    for name in looked_at:
        assert all(refusal(name, int(value)) is None for value in said[name]), name


def test_what_changes_nothing_can_be_sent() -> None:
    neutral = SamplingParams(1)
    for name in SamplingParams.__struct_fields__:
        if name in limits.PARAMETERS and isinstance(value := getattr(neutral, name), int | float):
            assert refusal(name, value) is None, name


# --- names, ids and folders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "0", "x" * 64, "a..b"])
def test_legal_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.promise("A9", "B1")
@pytest.mark.parametrize("name", ["", ".", "..", "-a", "_a", "a.", "a/b", "a@1", "a b", "a\n", "é", "x" * 65, "a\0"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^field must be 1 to 64 letters") as refused:
        check_name(name, "field")
    assert refused.value.param == "field"


@pytest.mark.promise("D4")
def test_token_ids_are_those_of_the_vocabulary() -> None:
    assert check_token_ids([0, 9, 9], 10, "ids") == (0, 9, 9)
    assert check_token_ids((), 10, "ids") == ()
    for ids, place, code in (
        ([0, 10], "ids[1]", "invalid_value"),
        ([-1], "ids[0]", "invalid_value"),
        ([2**64], "ids[0]", "invalid_value"),
        ([0, True], "ids[1]", "invalid_type"),
        ([1.0], "ids[0]", "invalid_type"),
        (["1"], "ids[0]", "invalid_type"),
        ("11", "ids", "invalid_type"),
        (None, "ids", "invalid_type"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            check_token_ids(ids, 10, "ids")
        assert (refused.value.param, refused.value.code) == ("ids", code)
        assert refused.value.message.startswith(f"{place} ")


def test_numbers_of_a_folder() -> None:
    table = {"size": Range(1, 1000, integer=True), "rate": Range(0.5, 2.0)}
    check_model(table, {"size": 1, "rate": 2, "other": "x"}, "f")
    check_model(table, {"size": [1, None, 1000], "rate": None}, "f")
    for values, place, says in (
        ({"size": 0}, "", "f: size must be an integer from 1 to 1,000"),
        ({"size": 1001}, "", "f: size must be an integer from 1 to 1,000"),
        ({"size": 1.0}, "", "f: size must be an integer from 1 to 1,000"),
        ({"size": True}, "", "f: size must be an integer from 1 to 1,000"),
        ({"size": [1, 0]}, "part", "f: part.size must be an integer from 1 to 1,000"),
        ({"size": [[1]]}, "", "f: size must be an integer from 1 to 1,000"),
        ({"rate": math.nan}, "", "f: rate must be a number from 0.5 to 2.0"),
        ({"rate": "1"}, "", "f: rate must be a number from 0.5 to 2.0"),
    ):
        with pytest.raises(ModelError) as refused:
            check_model(table, values, "f", place)
        assert refused.value.message == says
        assert refused.value.param == says.partition(" must")[0].removeprefix("f: ")
