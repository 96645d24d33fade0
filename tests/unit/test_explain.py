"""Errors about values of others name the field and say what it may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.config import RewardSpec, RLTrainingConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.explain import COMPARED_NAMES, did_you_mean, explain
from mlx_tandem.training.rewards import RewardPool


class Inner(Struct, forbid_unknown_fields=True):
    size: int
    kind: Literal["a", "b"] | None = None


class Outer(Struct, forbid_unknown_fields=True):
    mode: Literal["x", "y"] = "x"
    inner: Inner | None = None
    several: list[Inner] = []
    named: dict[str, Inner] = {}
    pairs: tuple[tuple[str, Inner], ...] = ()
    share: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    count: Annotated[int, Meta(ge=1, le=9)] = 1
    least: Annotated[int, Meta(ge=1)] = 1
    reserved: None = None
    either: int | str | None = None


def explained(value: Any, where: str = "") -> InvalidRequest:
    with pytest.raises(msgspec.ValidationError) as e:
        msgspec.convert(value, Outer)
    return explain(e.value, Outer, where)


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        (5, None, "the body must be of type object, not int"),
        ({"mode": "z"}, "mode", "mode must be one of 'x', 'y'"),
        ({"inner": {"size": 1, "kind": "c"}}, "inner.kind", "inner.kind must be one of 'a', 'b'"),
        ({"several": [{"size": 1, "kind": "c"}]}, "several[0].kind", "several[0].kind must be one of 'a', 'b'"),
        ({"named": {"n": {"size": 1, "kind": "c"}}}, "named[...].kind", "named[...].kind must be one of 'a', 'b'"),
        ({"pairs": [["n", {"size": 1, "kind": "c"}]]}, "pairs[0][1].kind", "pairs[0][1].kind must be one of 'a', 'b'"),
        ({"inner": {}}, "inner.size", "inner.size is required"),
        ({"inner": {"size": "1"}}, "inner.size", "inner.size must be of type int, not str"),
        ({"inner": {"sise": 1}}, "inner.sise", "inner.sise is not a parameter here"),
    ],
)
def test_the_field_and_what_it_may_be(value: Any, param: str | None, says: str) -> None:
    wrong = explained(value)
    assert (wrong.param, wrong.message) == (param, says)


@pytest.mark.parametrize(
    ("value", "param", "says", "code"),
    [
        ({"inner": {}}, "inner.size", "inner.size is required", "missing_required_parameter"),
        ({"innr": {}}, "innr", "innr is not a parameter here", "unknown_parameter"),
        ({"reserved": 1}, "reserved", "reserved is not supported", "unsupported_parameter"),
        ({"several": None}, "several", "several must be of type array, not null", "invalid_type"),
        ({"inner": {"size": None}}, "inner.size", "inner.size must be of type int, not null", "invalid_type"),
        ({"either": 1.5}, "either", "either must be of type int or str, not float", "invalid_type"),
        ({"share": "x"}, "share", "share must be a number", "invalid_type"),
        ({"share": 1.5}, "share", "share must be a number between 0 and 1", "invalid_value"),
        ({"share": -0.5}, "share", "share must be a number between 0 and 1", "invalid_value"),
        ({"count": 1.5}, "count", "count must be an integer", "invalid_type"),
        ({"count": None}, "count", "count must be an integer", "invalid_type"),
        ({"count": 10}, "count", "count must be an integer between 1 and 9", "invalid_value"),
        ({"least": 0}, "least", "least: Expected `int` >= 1", "invalid_value"),
        ({"mode": "z"}, "mode", "mode must be one of 'x', 'y'", "invalid_value"),
        (None, None, "the body must be of type object, not null", "invalid_type"),
    ],
)
def test_each_kind_of_mistake_has_its_code(value: Any, param: str | None, says: str, code: str) -> None:
    wrong = explained(value)
    assert (wrong.param, wrong.message, wrong.code) == (param, says, code)


def test_a_value_inside_a_field() -> None:
    assert explained({"inner": {}}, "outer").message == "outer.inner.size is required"
    assert explained(5, "outer").message == "outer must be of type object, not int"
    assert explained({"count": 10}, "outer").param == "outer.count"
    assert explained({"count": 10}, "outer[3]").param == "outer[3].count"
    with pytest.raises(msgspec.ValidationError) as e:
        msgspec.convert([{"size": 1}, {}], list[Inner])
    assert explain(e.value, list[Inner], "outer").param == "outer[1].size"


@pytest.mark.parametrize(
    ("scoring", "says"),
    [
        ({"gsm8k": "a"}, "scoring_function.gsm8k must be a number, its weight"),
        ([{"function": "gsm8k", "weigth": 1}], "scoring_function[0].weigth is not a parameter here"),
        (["gsm8k"], "scoring_function[0] must be of type object, not str"),
        (
            [{"function": "length", "options": {"max": "x"}}],
            "scoring_function: 'length': options.max must be of type int, not str",
        ),
    ],
)
def test_scoring_functions(scoring: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        RewardPool(RLTrainingConfig()).check(scoring, {"answer": "1"})
    assert e.value.message == says
    assert e.value.param.startswith("scoring_function")


def test_weights_by_name() -> None:
    parts = RewardPool(RLTrainingConfig()).check({"gsm8k": 1, "contains": 0.5}, {"answer": "1"}).parts
    assert parts == (RewardSpec("gsm8k", 1), RewardSpec("contains", 0.5))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rl_training: {algorithm: pppo}", "rl_training.algorithm must be one of"),
        ("rl_training: {learning_rate: fast}", "rl_training.learning_rate must be a number or 'auto'"),
        ("rl_training: {learning_rate: true}", "rl_training.learning_rate must be a number or 'auto'"),
        ("rl_training: {enabled: surely}", "rl_training.enabled must be of type bool, not str"),
        ("scheduler: {max_num_seqs: many}", "scheduler.max_num_seqs must be of type int, not str"),
    ],
)
def test_settings(tmp_path, text: str, says: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as e:
        build(file, {})
    assert str(e.value).startswith(f"{file}: {says}")


@pytest.mark.parametrize("said", ["1e-3", "1E-3", "10e-4", "1.0e-3", "0.001"])
def test_numbers_as_people_write_them(tmp_path, said: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(f"rl_training: {{learning_rate: {said}}}")
    assert build(file, {}).rl_training.learning_rate == 0.001


@pytest.mark.parametrize(
    ("wrong", "names", "says"),
    [
        ("shuot", ["shout", "json", "down"], "; did you mean 'shout'?"),
        ("SHOUT", ["shout", "json"], "; did you mean 'shout'?"),
        ("shou", ["shout", "shouts"], "; did you mean 'shout' or 'shouts'?"),
        ("x", ["shout"], ""),
        ("", ["shout"], ""),
        ("shout", [], ""),
    ],
)
def test_names_that_are_spelled_alike(wrong: str, names: list[str], says: str) -> None:
    assert did_you_mean(wrong, names) == says


@given(st.text(max_size=300), st.lists(st.text("ab-", max_size=8), max_size=200))
def test_only_names_that_there_are_and_few_of_them(wrong: str, names: list[str]) -> None:
    said = did_you_mean(wrong, names)
    offered = [] if not said else said.removeprefix("; did you mean ").removesuffix("?").split(" or ")
    assert len(offered) <= 3
    assert set(offered) <= {repr(name) for name in names}


def test_few_of_many_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def count(word: str, possibilities: Any, n: int) -> list[str]:
        compared.append(len(list(possibilities)))
        return []

    monkeypatch.setattr("difflib.get_close_matches", count)
    did_you_mean("adapter-7" * 1000, (f"adapter-{i}" for i in range(100_000)))
    did_you_mean("zzz", (f"adapter-{i}" for i in range(100_000)))
    assert compared == [COMPARED_NAMES, 0]
