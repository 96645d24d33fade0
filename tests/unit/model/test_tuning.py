"""What is made of the times of products: which row counts steps are padded to, where weights are dequantised, and what
is kept of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.config import LoraConfig
from mlx_tandem.model.backend.cuda import CUDA
from mlx_tandem.model.backend.metal import METAL
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.ops.products.measure import Call, Meter, kinds, pass_cost
from mlx_tandem.model.ops.products.merged import merge
from mlx_tandem.model.ops.products.tuning import (
    MOST_COUNTS,
    SECONDS,
    Dequantising,
    Tuned,
    dequantised,
    good_counts,
    tune,
    use_from,
    worth_from,
)
from mlx_tandem.model.shapes import EXACT_ROWS, row_count
from mlx_tandem.model.targets import find_targets
from mlx_tandem.types import AdapterInfo
from tests.backends import answer_as

times = st.dictionaries(st.integers(1, 512), st.floats(1e-6, 1.0), min_size=1, max_size=60)


@given(times)
def test_padding_takes_no_longer_than_any_other_measured_count_would(seconds: dict[int, float]) -> None:
    good = good_counts(seconds, 0.25)
    assert list(good) == sorted(set(good)) and set(good) <= seconds.keys() and good[-1] == max(seconds)
    assert len(good) <= MOST_COUNTS
    if len(seconds) <= MOST_COUNTS:  # else times that are a little apart may count as equal
        for rows in range(EXACT_ROWS + 1, max(seconds) + 1):
            first = min(c for c in seconds if c >= rows)
            best = min((c for c in seconds if first <= c <= 2 * first), key=lambda c: seconds[c])
            assert seconds[row_count(rows, good)] <= 1.25 * (1 + 0.25 * best / first) * seconds[best]


def test_a_slow_count_is_skipped_and_equal_ones_that_are_near_are_one() -> None:
    # 8 and 33 are slow, as on an H200; 64 and 72 take as long as 80, and 64 is a power of two; 1 takes as long as 2,
    # which is twice as many rows.
    seconds = {1: 75.0, 2: 75.0, 4: 78.0, 8: 239.0, 12: 81.0, 32: 84.0, 33: 185.0, 64: 90.0, 72: 90.5, 80: 91.0}
    assert good_counts(seconds, 0.25) == (1, 2, 4, 12, 32, 64, 80)
    # Twice the rows for a quarter of the time are not worth it, for half of it they are; four times the rows never are.
    assert good_counts({16: 100.0, 32: 75.0}, 0.25) == (16, 32)
    assert good_counts({16: 100.0, 32: 50.0}, 0.25) == (32,)
    assert good_counts({16: 100.0, 64: 10.0}, 0.25) == (16, 64)


@given(st.integers(1, 5000), st.lists(st.integers(1, 512), max_size=24, unique=True).map(sorted))
def test_rows_are_padded_to_the_next_good_count_and_by_the_rule_beyond(rows: int, good: list[int]) -> None:
    padded = row_count(rows, good)
    assert padded >= rows
    if rows <= EXACT_ROWS:
        assert padded == rows  # what is written for rows that are not there is not looked at
    elif good and rows <= good[-1]:
        assert padded in good and not any(rows <= c < padded for c in good)
    else:
        assert padded == row_count(rows)


@pytest.mark.parametrize(
    ("plain", "expected"),
    [((9, 9, 4, 2), 4), ((9, 9, 9, 9), None), ((0.5, 1, 2, 3), 1), ((9, 1, 9, 2), 8), ((9, 9, 4, 8), None)],
)
def test_dequantising_is_worth_it_from_where_it_stays_faster(plain: tuple[float, ...], expected: int | None) -> None:
    tokens = (1, 2, 4, 8)
    assert worth_from(dict(zip(tokens, (1, 2, 5, 8), strict=True)), dict(zip(tokens, plain, strict=True))) == expected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, bias=True)
        self.down = nn.Linear(128, 64, bias=False)


class Model(nn.Module):
    def __init__(self, bits: int | None) -> None:
        super().__init__()
        mx.random.seed(1)
        self.layers = [Block() for _ in range(3)]
        self.lm_head = nn.Linear(64, 96, bias=False)
        if bits:
            nn.quantize(self, group_size=32, bits=bits)


class Clock(Meter):
    """Says how long products take: `slow` is by rows; a packed product takes a second a token, a plain one four."""

    def __init__(self, slow: Callable[[int], float] = lambda rows: 1e-3, grows: int = 0, plain: float = 4e-4):
        self.slow, self.grows, self.plain, self.time, self.measured = slow, grows, plain, 0.0, 0

    def seconds(self, calls: Sequence[Call], x: mx.array) -> float:
        mx.eval([call(x) for call in calls])
        self.measured += 1
        rows = x.shape[0]
        if any(isinstance(call, partial) for call in calls):
            took = self.plain
        elif any(type(call) is nn.QuantizedLinear for call in calls):
            took = 1e-4 * rows
        else:
            took = self.slow(rows)
        self.time += took
        return took * len(calls)

    def growth(self, calls: Sequence[Callable[[], mx.array]]) -> int:
        mx.eval([call() for call in calls])
        return self.grows

    def now(self) -> float:
        return self.time


def tuned(model: nn.Module, meter: Meter, *, rows: int = 40) -> Tuned:
    return tune(model, mx.float32, most_rows=rows, activations=1000, meter=meter)


def test_linears_are_told_apart_by_shape_and_precision() -> None:
    assert {name: len(kind.modules) for name, kind in kinds(Model(None)).items()} == {
        "128 x 64 float32": 3,
        "64 x 128 float32": 3,
        "96 x 64 float32": 1,
    }
    assert set(kinds(Model(4))) == {f"{s} affine 4 bits in 32" for s in ("128 x 64", "64 x 128", "96 x 64")}


def test_plain_linears_that_were_merged_count_as_one_product() -> None:
    model, packed = Model(None), Model(4)
    for each in model, packed:
        targets = find_targets(each)
        merge([(targets["layers.0.up"], targets["layers.1.up"])])
    found = {name: len(kind.modules) for name, kind in kinds(model, joined=True).items()}
    assert found == {"256 x 64 float32": 1, "128 x 64 float32": 1, "64 x 128 float32": 3, "96 x 64 float32": 1}
    assert len(kinds(model)["128 x 64 float32"].modules) == 3
    assert kinds(packed, joined=True).keys() == kinds(packed).keys()


def test_row_counts_are_those_of_the_products_that_steps_compute() -> None:
    model = Model(None)
    targets = find_targets(model)
    merge([(targets["layers.0.up"], targets["layers.1.up"])])
    meter, alone = Clock(), Clock()
    assert tuned(model, meter).rows == tuned(Model(None), alone).rows
    assert 3 * meter.measured == 4 * alone.measured  # kinds


class Both(Clock):
    """A meter by which a product takes the device 1 ms a row, and the host 10 ms below 16 rows."""

    def device_seconds(self, calls: Sequence[Call], x: mx.array) -> float:
        return 1e-3 * x.shape[0] * len(calls)

    def host_seconds(self, calls: Sequence[Call], x: mx.array) -> float:
        return (10e-3 if x.shape[0] < 16 else 0.0) * len(calls)


def test_on_cuda_a_product_costs_the_device_and_a_quarter_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    own = kinds(Model(None))
    assert pass_cost(own, mx.float32, 8, Both(lambda rows: 1.0)) == 7.0  # Clock.seconds
    answer_as(monkeypatch, products=CUDA.products)
    assert pass_cost(own, mx.float32, 8, Both()) == pytest.approx(7 * (8e-3 + 10e-3 / 4))
    assert pass_cost(own, mx.float32, 16, Both()) == pytest.approx(7 * 16e-3)


def test_on_cuda_small_differences_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a count is left out only if a larger one costs at most 2 % more."""
    assert good_counts({40: 96.0, 48: 100.0}, 0.25) == (48,)
    assert good_counts({40: 96.0, 48: 100.0}, 0.02) == (40, 48)
    assert good_counts({40: 99.0, 48: 100.0}, 0.02) == (48,)
    with monkeypatch.context() as patch:
        answer_as(patch, products=CUDA.products)
        assert tuned(Model(None), Both()).rows == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40)
    assert tuned(Model(None), Clock(lambda rows: 1e-3 * rows)).rows == (
        1,
        2,
        3,
        4,
        6,
        8,
        16,
        24,
        32,
        40,
    )


def test_what_was_found_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = tuned(Model(None), Clock(lambda rows: 2e-3 if rows % 16 else 1e-3))
    assert found.rows == (1, 2, 3, 4, 5, 7, 16, 32, 40)
    assert "padded to 1, 2, 3, 4, 5, 7, 16, 32, 40 rows, measured" in caplog.text


def test_a_slow_device_is_not_measured_for_long() -> None:
    meter = Clock(lambda rows: 1.0)
    found = tuned(Model(None), meter)
    assert meter.time <= 2 * SECONDS
    assert found.rows and row_count(40, found.rows) == row_count(40)


def test_quantised_linears_dequantise_where_that_is_faster() -> None:
    model = Model(4)
    found = tuned(model, Clock())
    assert set(found.dequantise.values()) == {8}  # at 4 tokens both take as long
    assert set(found.dequantise) == set(kinds(Model(4)))
    again = Model(4)
    assert tuned(again, Clock()) == found
    assert all(isinstance(layer.up, Dequantising) for m in (model, again) for layer in m.layers)
    plain = Model(4).layers[1].up
    for rows, way in ((7, plain), (8, partial(dequantised, plain))):  # they round differently
        x = mx.random.normal((rows, 1, 64), key=mx.random.key(3))
        assert (model.layers[1].up(x) == way(x)).all()
        assert not (plain(x) == dequantised(plain, x)).all()


def test_dequantised_weights_that_do_not_fit_are_left_packed() -> None:
    model = Model(4)
    assert tuned(model, Clock(grows=501)).dequantise == {}
    assert not isinstance(model.layers[0].up, Dequantising)


def test_on_metal_no_more_is_dequantised_at_once_than_a_forward_has_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole model dequantised is several times the memory of the machine."""
    together: list[int] = []

    class Counting(Clock):
        def growth(self, calls: Sequence[Callable[[], mx.array]]) -> int:
            together.append(len(calls))
            return super().growth(calls)

    answer_as(monkeypatch, products=METAL.products)
    assert not tuned(Model(4), Counting()).dequantise, "it would begin at 8 tokens"
    assert not together
    found = tuned(Model(4), Counting(plain=4e-3)).dequantise
    assert set(found.values()) == {64}
    assert together == [2 + 2 + 1], "of three layers two, and the head"


@pytest.mark.parametrize("bits", [None, 4])
def test_it_is_measured_for_real(bits: int | None) -> None:
    found = tuned(Model(bits), Meter())
    assert found.rows and found.rows[-1] == 40
    linear = nn.QuantizedLinear(512, 1024, bits=4)
    x = mx.ones((1, 512))
    mx.eval(linear.parameters(), x)
    assert (
        0 < Meter().growth([partial(linear, x)]) < 4 * 512 * 1024 <= Meter().growth([partial(dequantised, linear, x)])
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_both_ways_give_the_same(bits: int, dtype: mx.Dtype) -> None:
    mx.random.seed(bits)
    linear = nn.QuantizedLinear(64, 48, bias=True, group_size=32, bits=bits)
    linear.set_dtype(dtype)
    x = mx.random.normal((3, 2, 64)).astype(dtype)
    weight = mx.dequantize(*(linear[k].astype(t) for k, t in (("weight", mx.uint32), ("scales", mx.float32))),
                           linear["biases"].astype(mx.float32), 32, bits)  # fmt: skip
    exact = x.astype(mx.float32) @ weight.T + linear["bias"].astype(mx.float32)
    bound = (1e-5 if dtype == mx.float32 else 2e-2) * mx.abs(exact).max()
    for way in (linear, partial(dequantised, linear)):
        found = way(x)
        assert found.dtype == dtype and found.shape == (3, 2, 48)
        assert mx.abs(found.astype(mx.float32) - exact).max() < bound


def test_adapters_are_added_to_either_way() -> None:
    model = Model(4)
    for layer in model.layers:
        use_from(layer.up, 4)
    lora = LoraState(model, LoraConfig(max_loras=1, max_lora_rank=8), mx.float32)
    path = "layers.0.up"
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((64, 8), (8, 128)))
    lora.install(1, AdapterWeights(AdapterInfo("d", 8, 1.0, "peft", (), 0, 0), {path: (a, b)}))
    plain = Model(4).layers[0].up
    for rows in (3, 6):
        x = mx.random.normal((rows, 1, 64), key=mx.random.key(rows))
        route = lora.route([1] * rows)
        lora.bind(route.arrays, mx.array(route.ids), route.layout)
        found = model.layers[0].up(x)
        lora.unbind()
        expected = plain(x) + x @ mx.array(a) @ mx.array(b)
        assert mx.abs(found - expected).max() < 1e-5 * mx.abs(expected).max()


def test_the_time_on_the_host_is_measured_for_real() -> None:
    weight, x = mx.random.normal((256, 256)), mx.random.normal((64, 1, 256))
    assert Meter().host_seconds([lambda x: x @ weight] * 50, x) > 0
