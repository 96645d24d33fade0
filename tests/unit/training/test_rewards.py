"""Reward functions, what may be asked for, and that no text makes the built-in ones fail."""

from __future__ import annotations

import asyncio
import math
import socket
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.config import RewardSpec, RLTrainingConfig
from mlx_tandem.errors import EngineUnavailable, InvalidRequest
from mlx_tandem.training.rewards import RewardPool, Sample, own
from mlx_tandem.training.rewards.answers import answer
from mlx_tandem.training.rewards.builtin import BUILTINS
from mlx_tandem.training.rewards.messages import Failed, Item, Scored
from mlx_tandem.training.rewards.pool import BATCH_BYTES, _batches
from mlx_tandem.training.rewards.worker import Worker

POOL = RewardPool(RLTrainingConfig())


def score(function: str, completion: str, metadata: dict[str, Any], tokens: int = 0, **options: Any) -> float:
    """As a worker does, after the check that a request gets."""
    POOL.check([{"function": function, "options": options}], metadata)
    builtin = BUILTINS[function]
    return builtin.score(Sample("", completion, metadata, tokens), msgspec.convert(options, builtin.options))


def in_workers(scoring: Any, samples: list[Sample], metadata: dict[str, Any], **config: Any) -> list[float | None]:
    async def run() -> list[float | None]:
        pool = RewardPool(RLTrainingConfig(**config))
        try:
            return await pool.score([pool.check(scoring, metadata)] * len(samples), samples)
        finally:
            await pool.close()

    return asyncio.run(run())


# -- gsm8k ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 72", 72),
        ("It is 5.\n#### 72\nor 9", 72),
        ("####\n72", 72),
        ("#### 1\n#### 2", 2),
        ("#### Result\nso it is 5", 5),
        ("\\boxed{72} and 5", 72),
        ("\\boxed{\\frac{3}{4}}", Fraction(3, 4)),
        ("\\boxed{x = -\\dfrac{1}{2}}", Fraction(-1, 2)),
        ("\\boxed{never closed 72", 72),
        ("\\boxed{2 * 3 = 6} and 5", 6),
        ("\\boxed{1} or \\boxed{2} and 5", 2),
        ("#### 1 or 2", 1),
        ("3, then 4", 4),
        ("\\boxed{} is 3", 3),
        ("the answer is $1,234.50.", Fraction(2469, 2)),
        ("\\$5", 5),
        ("-$5", -5),
        ("$-5", -5),
        ("− 7", -7),
        ("3-5", 5),
        ("10-3=7", 7),
        ("1,2345", 2345),
        ("1{,}000", 1000),
        (".5", Fraction(1, 2)),
        ("3 / 4", Fraction(3, 4)),
        ("1.5e-3", Fraction(3, 2000)),
        ("50%", 50),
        ("", None),
        ("none", None),
        ("5/0", None),
        ("٣", None),
    ],
)
def test_the_answer_of_a_text(text: str, value: Fraction | int | None) -> None:
    assert answer(text) == value


NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4)


@given(
    NUMBERS,
    st.sampled_from(["{}", "{:,}", "so ${:,}", "#### {}", "7 \\boxed{{{}}}", "a 3, then {}."]),
    st.text("ab .!"),
)
def test_numbers_are_read_exactly(number: Decimal, form: str, after: str) -> None:
    text = form.format(number) + ("\n" + after if form == "#### {}" else after.strip("."))
    assert answer(text) == Fraction(number)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9))
def test_fractions_are_read_exactly(above: int, below: int) -> None:
    sign = "-" if above < 0 else ""
    for text in (f"{above}/{below}", f"{sign}\\frac{{{abs(above)}}}{{{below}}}"):
        assert answer(text) == Fraction(above, below)


@given(st.text(st.sampled_from("0123456789,.-−$/eE#{}\\boxedfrac \n"), max_size=300) | st.text())
def test_any_text_has_an_answer_or_none(text: str) -> None:
    value = answer(text)
    assert value is None or isinstance(value, Fraction)


@given(st.text(max_size=300))
def test_no_completion_is_right_by_having_no_number(text: str) -> None:
    """Also not when what stands for a reference has none."""
    builtin = BUILTINS["gsm8k"]
    value = builtin.score(Sample("", text, {"answer": "none"}), msgspec.convert({}, builtin.options))
    assert value == 0.0


@pytest.mark.parametrize("reference", [72, 72.0, "72", "72.00", "$72", "8 * 9 = 72.\n#### 72", "144/2"])
def test_gsm8k_takes_references_in_every_form(reference: object) -> None:
    assert score("gsm8k", "So it is 72.", {"answer": reference}) == 1.0
    assert score("gsm8k", "So it is 72.1", {"answer": reference}) == 0.0


# -- the other functions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "completion", "metadata", "options", "value"),
    [
        ("exact_match", " yes\n", {"answer": "yes"}, {}, 1.0),
        ("exact_match", " yes\n", {"answer": "yes"}, {"strip": False}, 0.0),
        ("exact_match", "YES", {"answer": "yes"}, {}, 0.0),
        ("exact_match", "YES", {"answer": "yes"}, {"ignore_case": True}, 1.0),
        ("exact_match", "5", {"answer": 5}, {}, 1.0),
        ("contains", "a cat and a dog", {"answer": "cat"}, {}, 1.0),
        ("contains", "a cat and a dog", {"answer": ["cat", "cow", "dog", "hen"]}, {}, 0.5),
        ("contains", "a CAT", {"answer": ["cat"]}, {"ignore_case": True}, 1.0),
        ("regex", "call 555-1234", {"pattern": r"\d{3}-\d{4}"}, {}, 1.0),
        ("regex", "call 555-1234", {}, {"pattern": r"\d{3}-\d{4}"}, 1.0),
        ("regex", "call 555-1234", {}, {"pattern": r"\d{3}-\d{4}", "full": True}, 0.0),
        ("regex", "555-1234 x", {}, {"pattern": r"\d{3}-\d{4}", "full": True}, 0.0),
        ("regex", "555-1234", {}, {"pattern": r"\d{3}-\d{4}", "full": True}, 1.0),
        ("regex", "ä\n", {}, {"pattern": "(?s)ä.", "full": True}, 1.0),
        ("regex", "x", {"pattern": "x"}, {"pattern": "y"}, 0.0),
        ("json_schema", ' {"a": 1} ', {"schema": {"required": ["a"]}}, {}, 1.0),
        ("json_schema", '{"a": 1}', {}, {"schema": {"required": ["b"]}}, 0.0),
        ("json_schema", '{"a": 1', {"schema": {}}, {}, 0.0),
        ("json_schema", "NaN", {"schema": {}}, {}, 0.0),
        ("json_schema", "3", {"schema": {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}}, {}, 1.0),
    ],
)
def test_functions(
    function: str, completion: str, metadata: dict[str, Any], options: dict[str, Any], value: float
) -> None:
    assert score(function, completion, metadata, **options) == value


@pytest.mark.parametrize(
    ("options", "tokens", "value"),
    [
        ({"target": 10}, 10, 1.0),
        ({"target": 10}, 5, 0.5),
        ({"target": 10}, 15, 0.5),
        ({"target": 10}, 30, 0.0),
        ({"min": 4}, 1000, 1.0),
        ({"min": 4}, 1, 0.25),
        ({"max": 4}, 0, 1.0),
        ({"max": 4}, 7, 0.25),
        ({"min": 4, "max": 8}, 6, 1.0),
    ],
)
def test_length(options: dict[str, int], tokens: int, value: float) -> None:
    assert score("length", "", {}, tokens, **options) == value


# -- what may be asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scoring", "metadata", "param"),
    [
        ("gsm8k", {}, "metadata.answer"),
        ("gsm8k", {"answer": None}, "metadata.answer"),
        ("gsm8k", {"answer": "many"}, "metadata.answer"),
        ("gsm8k", {"answer": "9" * 1_000_000}, "metadata.answer"),
        ("gsm8k", {"answer": "1e999999999"}, "metadata.answer"),
        ("gsm8k", {"answer": True}, "metadata.answer"),
        ("gsm8k", {"answer": ["72"]}, "metadata.answer"),
        ("exact_match", {}, "metadata.answer"),
        ("contains", {"answer": ""}, "metadata.answer"),
        ("contains", {"answer": []}, "metadata.answer"),
        ("contains", {"answer": [" "]}, "metadata.answer"),
        ("contains", {"answer": ["a"] * 65}, "metadata.answer"),
        ("contains", {"answer": ["a", 1]}, "metadata.answer"),
        ("regex", {}, "metadata.pattern"),
        ("regex", {"pattern": 1}, "metadata.pattern"),
        ("regex", {"pattern": "("}, "metadata.pattern"),
        ("regex", {"pattern": r"(a)\1"}, "metadata.pattern"),
        ("regex", {"pattern": "(?=a)"}, "metadata.pattern"),
        ("regex", {"pattern": "\ud800"}, "metadata.pattern"),
        ("regex", {"pattern": "a" * 1025}, "metadata.pattern"),
        ("regex", {"pattern": r"(\p{L}{500}){2}"}, "metadata.pattern"),
        ("json_schema", {}, "metadata.schema"),
        ("json_schema", {"schema": "{}"}, "metadata.schema"),
        ("json_schema", {"schema": {"type": "nope"}}, "metadata.schema"),
        ("json_schema", {"schema": {"$ref": "http://127.0.0.1/x"}}, "metadata.schema"),
        ("json_schema", {"schema": {"$schema": "http://127.0.0.1/x"}}, "metadata.schema"),
        ("json_schema", {"schema": {"pattern": r"(a)\1"}}, "metadata.schema"),
        ("json_schema", {"schema": {"pattern": "(a{1000}){1000}"}}, "metadata.schema"),
        ("json_schema", {"schema": {"enum": ["x" * 65_536]}}, "metadata.schema"),
        ("length", {}, "scoring_function"),
        ("nothing", {}, "scoring_function"),
        ("os.system", {}, "scoring_function"),
        ("../gsm8k", {}, "scoring_function"),
        ("", {}, "scoring_function"),
        (5, {}, "scoring_function"),
        ({}, {}, "scoring_function"),
        ([], {}, "scoring_function"),
        ({"exact_match": float("nan")}, {"answer": "a"}, "scoring_function"),
        ({"exact_match": 1001.0}, {"answer": "a"}, "scoring_function"),
        ({"exact_match": "1"}, {"answer": "a"}, "scoring_function.exact_match"),
        ({"exact_match": True}, {"answer": "a"}, "scoring_function.exact_match"),
        ({"mix": 1.0}, {"answer": "a"}, "scoring_function"),
        ([{"function": "exact_match", "kind": 1}], {"answer": "a"}, "scoring_function[0].kind"),
        ([{"function": "exact_match", "options": {"fold": True}}], {"answer": "a"}, "scoring_function"),
        ([{"function": "exact_match"}] * 9, {"answer": "a"}, "scoring_function"),
        ([{"function": "length", "options": {"target": 5, "min": 3}}], {}, "scoring_function"),
        ([{"function": "length", "options": {"min": 5, "max": 3}}], {}, "scoring_function"),
        ([{"function": "length", "options": {"target": 0}}], {}, "scoring_function"),
        ([{"function": "length", "options": {"target": 10**9}}], {}, "scoring_function"),
        ([{"function": "regex", "options": {"pattern": "("}}], {}, "scoring_function"),
        ([{"function": "json_schema", "options": {"schema": {"$ref": "x.json"}}}], {}, "scoring_function"),
        ("exact_match", {"answer": "a", "more": 10**30}, "metadata"),
        ("exact_match", {"answer": "a", "more": "x" * (8 << 20)}, "metadata"),
    ],
)
def test_what_is_refused(scoring: Any, metadata: dict[str, Any], param: str) -> None:
    pool = RewardPool(RLTrainingConfig(rewards={"mix": (RewardSpec("exact_match"),)}))
    with pytest.raises(InvalidRequest) as caught:
        pool.check(scoring, metadata)
    assert caught.value.param == param


def test_schemas_on_disk_are_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"type": "object"}')
    uri = (tmp_path / "x.json").as_uri()
    for schema in ({"$ref": uri}, {"$id": f"{tmp_path.as_uri()}/y.json", "$ref": "x.json"}, {"$dynamicRef": uri}):
        with pytest.raises(InvalidRequest, match="schema"):
            POOL.check("json_schema", {"schema": schema})


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for depth in range(100_000):
        schema = {"properties": {"a": schema}} if depth % 2 else {"allOf": [schema]}
        if depth in (70, 99_999):
            with pytest.raises(InvalidRequest, match="schema"):
                POOL.check("json_schema", {"schema": schema})


@pytest.mark.parametrize(
    "rewards",
    [
        {"gsm8k": (RewardSpec("length", options={"target": 5}),)},  # a function's name
        {"a/b": (RewardSpec("gsm8k"),)},
        {"mix": ()},
        {"mix": (RewardSpec("nothing"),)},
        {"mix": (RewardSpec("mix"),)},
        {"mix": (RewardSpec("gsm8k", weight=float("inf")),)},
        {"mix": (RewardSpec("length"),)},
    ],
)
def test_wrong_composites_are_refused_at_start(rewards: dict[str, tuple[RewardSpec, ...]]) -> None:
    with pytest.raises(InvalidRequest):
        RewardPool(RLTrainingConfig(rewards=rewards))


def test_names() -> None:
    pool = RewardPool(RLTrainingConfig(rewards={"mix": (RewardSpec("gsm8k"),)}))
    assert pool.names == ["contains", "exact_match", "gsm8k", "json_schema", "length", "mix", "regex", "reward_model"]
    assert pool.check("mix", {"answer": "5"}).function == "mix"
    with pytest.raises(InvalidRequest) as caught:
        pool.check("mix", {})
    assert caught.value.param == "metadata.answer"


# -- through worker processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scoring",
    [
        "mix",
        [
            {"function": "gsm8k", "weight": 2.0},
            {"function": "contains", "weight": -0.5, "options": {"ignore_case": True}},
            {"function": "length", "options": {"max": 10}},
        ],
    ],
)
def test_composites_are_weighted_sums(scoring: Any) -> None:
    parts = (
        RewardSpec("gsm8k", 2.0),
        RewardSpec("contains", -0.5, {"ignore_case": True}),
        RewardSpec("length", 1.0, {"max": 10}),
    )
    samples = [Sample("", "It is 7", tokens=10), Sample("", "8", tokens=10), Sample("", "7", tokens=15)]
    assert in_workers(scoring, samples, {"answer": "7"}, rewards={"mix": parts}) == [2.5, 1.0, 2.0]


def test_a_mapping_gives_weights() -> None:
    assert in_workers({"exact_match": 0.25, "contains": 0.75}, [Sample("", "a b")], {"answer": "a"}) == [0.75]


def test_scores_come_back_in_order_from_several_workers() -> None:
    samples = [Sample("", f"{i % 7}") for i in range(1000)]
    got = in_workers("exact_match", samples, {"answer": "3"}, reward_workers=3, scoring_batch_size=7)
    assert got == [float(i % 7 == 3) for i in range(1000)]


def test_the_checked_metadata_wins() -> None:
    """What a sample brings along is seen, but never instead of what was checked."""
    assert in_workers("exact_match", [Sample("", "a", {"answer": {"not": "text"}})], {"answer": "a"}) == [1.0]


@given(st.lists(st.binary(max_size=8) | st.just(Failed("invalid"))), st.integers(1, 5))
def test_batches_hold_every_item_once(items: list[bytes | Failed], most: int) -> None:
    batches = list(_batches(items, most))
    assert [p for b in batches for p in b] == [(i, x) for i, x in enumerate(items) if isinstance(x, bytes)]
    assert all(1 <= len(b) <= most for b in batches)
    assert all(len(a) == most for a in batches[:-1])


def test_batches_are_bounded_in_bytes() -> None:
    big = b"x" * (BATCH_BYTES // 2)
    assert [len(b) for b in _batches([big, big, b"y", big], 32)] == [2, 2]


# -- reward models --------------------------------------------------------------------------------------------------


class Models:
    """Reward models: "sum" scores by the sum of the tokens, "odd" gives what is no reward, "gone" cannot be asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[tuple[int, ...]]]] = []

    def check(self, name: str) -> None:
        if name not in ("sum", "odd", "gone"):
            raise InvalidRequest("not loaded", param="scoring_function")

    async def scores(self, name: str, sequences: Any) -> list[float]:
        self.asked.append((name, [*sequences]))
        if name == "gone":
            raise EngineUnavailable("it ends")
        return [float(sum(s)) if name == "sum" else (math.nan, 2e6, 1.0)[i % 3] for i, s in enumerate(sequences)]


def by_models(*scoring: Any, samples: list[Sample]) -> tuple[list[float | None], RewardPool, Models]:
    """Score each sample by the scoring at its place."""
    models = Models()

    async def run() -> tuple[list[float | None], RewardPool, Models]:
        pool = RewardPool(RLTrainingConfig(), models)
        try:
            return await pool.score([pool.check(s, {}) for s in scoring], samples), pool, models
        finally:
            await pool.close()

    return asyncio.run(run())


def model(name: str, weight: float = 1.0) -> dict[str, Any]:
    return {"function": "reward_model", "weight": weight, "options": {"model": name}}


def test_reward_models_are_parts_of_sums_and_asked_once_for_all_samples() -> None:
    length = {"function": "length", "weight": 10.0, "options": {"max": 5}}
    samples = [Sample("", "", tokens=5, sequence=(i, 2)) for i in range(3)]
    found, _, models = by_models(
        [model("sum", 0.5)], [model("sum"), length], [model("sum"), model("sum", 2.0)], samples=samples
    )
    assert found == [1.0, 13.0, 12.0]
    assert models.asked == [("sum", [(0, 2), (1, 2), (2, 2), (2, 2)])]


def test_a_reward_model_without_a_score_is_counted_by_its_reason() -> None:
    samples = [Sample("", "", sequence=(1,))] * 4
    found, pool, _ = by_models(*[[model("odd")]] * 3, [model("gone")], samples=samples)
    assert found == [None, None, 1.0, None]
    assert (pool.failures["invalid"], pool.failures["model"]) == (2, 1)


@pytest.mark.parametrize("scoring", ["reward_model", [model("nobody")], [{"function": "reward_model", "options": {}}]])
def test_a_reward_model_that_is_not_there_is_refused(scoring: Any) -> None:
    for pool in (RewardPool(RLTrainingConfig(), Models()), POOL):
        with pytest.raises(InvalidRequest) as e:
            pool.check(scoring, {})
        assert e.value.param == "scoring_function"


# -- attacks --------------------------------------------------------------------------------------------------------

HOSTILE = [
    "x" * 4_000_000,
    "9" * 4_000_000,
    "#### " + "9" * 4_000_000,
    "1," * 2_000_000,
    "1,111" * 800_000,
    "\\boxed{" * 500_000,
    "\\frac{" * 500_000,
    "{" * 4_000_000,
    "1/" * 2_000_000,
    "1e" * 2_000_000,
    "1e999999999",
    "-" * 4_000_000,
    "[" * 1_000_000,
    "[" * 60_000 + "]" * 60_000,
    '{"a":' * 20_000,
    "9" * 100_000,
    "1" + "0" * 5_000,
    "a" * 131_072,
    "ab" * 65_536,
    "\0" * 131_072,
    "ß" * 2_000_000,
]


@pytest.mark.promise("I5")
@pytest.mark.parametrize(
    ("scoring", "metadata"),
    [
        ("gsm8k", {"answer": "72"}),
        ([{"function": "exact_match", "options": {"ignore_case": True}}], {"answer": "b"}),
        ([{"function": "contains", "options": {"ignore_case": True}}], {"answer": ["a" * 500 + "b"] * 8}),
        ("regex", {"pattern": "(a|aa)+$"}),
        ("regex", {"pattern": "(x+x+)+y"}),
        ("regex", {"pattern": "(.*)*" * 100 + "z"}),
        ("json_schema", {"schema": {"type": "object"}}),
        ("json_schema", {"schema": {"pattern": "(a|aa)+$", "uniqueItems": True}}),
        ([{"function": "length", "options": {"target": 5}}], {}),
    ],
)
def test_hostile_completions_get_a_score(scoring: Any, metadata: dict[str, Any]) -> None:
    """None of them takes the worker's time limit or its memory away."""
    got = in_workers(scoring, [Sample("", text) for text in HOSTILE], metadata)
    assert None not in got
    assert all(0.0 <= g <= 1.0 for g in got if g is not None)


def test_what_an_own_function_does_to_its_item_nobody_else_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the functions after it nor the sample's next score. It is loaded once."""
    loads: list[str] = []

    def load(name: str) -> own.Function:
        loads.append(name)

        def function(sample: Sample, options: dict[str, Any]) -> float:
            sample.metadata.setdefault("by", []).append(name)
            options.setdefault("by", []).append(name)
            return len(sample.metadata["by"]) + 10 * len(options["by"]) + 100 * len(sample.metadata["answer"])

        return function

    monkeypatch.setattr(own, "load", load)
    parts = tuple(RewardSpec(name, weight) for name, weight in (("a", 1.0), ("b", 2.0), ("a", 4.0), ("contains", 0.5)))
    raw = msgspec.msgpack.encode(Item(parts, Sample("", "x", {"answer": ["x"]})))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(ours, 30.0)
        assert [worker._answer(raw) for _ in range(2)] == [Scored(7 * 111.0 + 0.5)] * 2
    assert loads == ["a", "b"]
