"""Products of few rows by the kernel on the CPU: against float32 sums, alone and in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.modules import clone
from mlx_tandem.model.ops.products.few_rows import SkinnyEmbedding, SkinnyLinear, candidates, choose, speed_up
from mlx_tandem.model.ops.products.measure import Meter
from mlx_tandem.model.ops.products.merged import merge
from mlx_tandem.model.ops.products.skinny import Form, Skinny, eighths, forms
from mlx_tandem.model.targets import find_groups
from tests.engine.test_lora import build, prompts
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

ROOM = 227 << 10
EXACT = {mx.float16: 6e-4, mx.bfloat16: 4e-3}  # of the largest number
FORMS = [Form(2, 2, 3), Form(1, 2, 2), Form(3, 4, 4)]


@pytest.fixture(scope="module")
def make() -> Make:
    return shim.maker()


def numbers(*shape: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@given(
    rows=st.integers(1, 24) | st.sampled_from([32, 37, 40, 41, 64]),
    outputs=st.sampled_from([16, 33, 72]),
    inputs=st.sampled_from([8, 64, 200, 456]),
    form=st.sampled_from(FORMS),
    dtype=st.sampled_from(list(EXACT)),
    biased=st.booleans(),
)
@settings(max_examples=40)
def test_products_are_right(
    make: Make, rows: int, outputs: int, inputs: int, form: Form, dtype: mx.Dtype, biased: bool
) -> None:
    x, weight = numbers(rows, 1, inputs, dtype=dtype), numbers(outputs, inputs, dtype=dtype, seed=1)
    bias = numbers(outputs, dtype=dtype, seed=2) if biased else None
    want = floats(x) @ floats(weight).T + (0 if bias is None else floats(bias))
    got = Skinny(make)(x, weight, bias, form)
    assert got.shape == want.shape and got.dtype == dtype
    assert np.abs(floats(got) - want).max() <= EXACT[dtype] * np.abs(want).max()


def test_a_row_gets_the_same_bits_in_any_company(make: Make) -> None:
    x, weight = numbers(24, 1, 328, dtype=mx.bfloat16), numbers(40, 328, dtype=mx.bfloat16, seed=1)
    skinny = Skinny(make)
    all_of_them = skinny(x, weight, None, FORMS[0])
    for start, count in ((0, 1), (5, 3), (7, 13)):
        some = skinny(x[start : start + count], weight, None, FORMS[0])
        assert mx.array_equal(some, all_of_them[start : start + count])


def test_threads_wait_where_they_must() -> None:
    x, weight = numbers(20, 1, 328, dtype=mx.bfloat16), numbers(40, 328, dtype=mx.bfloat16, seed=1)
    want, *others = (Skinny(shim.maker(order))(x, weight, None, FORMS[0]) for order in shim.ORDERS)
    assert all(mx.array_equal(want, got) for got in others)


RACES = {
    "a slice that others still read": ("    ASYNC_WAIT(STAGES - 2);\n    BARRIER();", "    ASYNC_WAIT(STAGES - 2);"),
    "sums over a slice that others still read": ("  ASYNC_WAIT(0);\n  BARRIER();", "  ASYNC_WAIT(0);"),
}


@pytest.mark.parametrize("race", RACES)
def test_a_race_shows(race: str) -> None:
    """The last slice lies where the sums begin."""
    x, weight = numbers(13, 1, 2368, dtype=mx.bfloat16), numbers(40, 2368, dtype=mx.bfloat16, seed=1)
    want = Skinny(shim.maker())(x, weight, None, FORMS[0])
    got = Skinny(Broken(shim.maker("apart"), *RACES[race]))(x, weight, None, FORMS[0])
    assert not mx.array_equal(want, got)


# --- in a model -----------------------------------------------------------------------------------------------------


class Says(Meter):
    """MLX's product takes the device ten microseconds and the host 15, the kernel the device so many, ninety from 17
    tokens on, and the host 3."""

    def __init__(self, microseconds: float):
        self.microseconds = microseconds
        self.most_tokens = 0

    def host_seconds(self, calls: Sequence[Any], x: mx.array) -> float:
        return len(calls) * 1e-6 * (3 if any(isinstance(argument, Form) for argument in calls[0].args) else 15)

    def device_seconds(self, calls: Sequence[Any], x: mx.array) -> float:
        kernel = any(isinstance(argument, Form) for argument in calls[0].args)
        self.most_tokens = max(self.most_tokens, x.shape[0])
        return len(calls) * 1e-6 * (10 if not kernel else self.microseconds if x.shape[0] <= 16 else 90)


class SlowWithEight(Says):
    """A `Says` whose kernel takes the device 90 µs for 8 tokens, as for more than 16."""

    def device_seconds(self, calls: Sequence[Any], x: mx.array) -> float:
        return super().device_seconds(calls, mx.zeros((17, 1)) if x.shape[0] == 8 else x)


class Head(nn.Module):
    """An embedding that is the output head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embed.as_linear(self.embed(tokens))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and outputs of each product that the kernel computes."""
    seen: list[tuple[int, int]] = []
    product = Skinny.__call__

    def call(self: Skinny, x: mx.array, weight: mx.array, *rest: Any) -> mx.array:
        seen.append((x.shape[0] * x.shape[1], weight.shape[0]))
        return product(self, x, weight, *rest)

    monkeypatch.setattr(Skinny, "__call__", call)
    return seen


@pytest.mark.parametrize("family", ["qwen2", "tied"])
def test_a_model_says_what_it_said(make: Make, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Head() if family == "tied" else build(family)
    model.set_dtype(mx.bfloat16)
    merged = merge(find_groups(model))
    twin = clone(model)
    modules = candidates(model, merged)
    choice = choose(modules, make, Says(5), ROOM)
    assert choice.chosen is not None and "with 8, 16 tokens" in choice.reason
    speed_up(modules, merged, choice.chosen)
    adapted = sum(isinstance(m, SkinnyLinear | SkinnyEmbedding) for m in model.modules())
    assert adapted == (1 if family == "tied" else 2 * 2 + 1)  # o, down, the head; the others are merged

    calls = counted(monkeypatch)
    tokens = prompts(3, 2) % 40
    got = floats(model(tokens))
    assert calls == [(6, n) for n in ([40] if family == "tied" else [128, 64, 256, 64] * 2 + [128])]
    calls.clear()
    assert np.abs(got - floats(twin(tokens))).max() <= 4e-2 * np.abs(got).max()
    model(prompts(3, 11) % 40)  # too many
    model(prompts(1, 1) % 40)  # too few
    assert not calls  # nor by the twin, which gradients are taken through


@pytest.mark.parametrize(
    ("microseconds", "steps"), [(5, "all"), (13.2, "all"), (13.4, "adapted"), (19.2, "adapted"), (19.4, "none")]
)
def test_it_is_taken_where_it_is_hardly_slower(make: Make, microseconds: float, steps: str) -> None:
    """In steps with adapters, which have the host to wait for, it may be slower. 0.3 µs are noise."""
    linear = nn.Linear(64, 40)
    assert choose(candidates(linear, []), make, Says(microseconds), ROOM).chosen is None  # float32
    linear.set_dtype(mx.float16)
    few, reason = choose(candidates(linear, []), make, Says(microseconds), ROOM)
    if few is None:
        assert steps == "none"
        return
    assert reason.endswith(
        "40 x 64 with 8, 16 tokens" if steps == "all" else "40 x 64 with no tokens (8, 16 with adapters)"
    )
    x = mx.zeros((16, 1, 64), mx.float16)
    taken = [few.product(linear, x) is not None]
    for change in (few.begin, few.end):
        change()
        taken.append(few.product(linear, x) is not None)
    assert taken == ([True] * 3 if steps == "all" else [False, True, False])


def test_numbers_of_tokens_are_chosen_one_by_one(make: Make) -> None:
    linear = nn.Linear(64, 40)
    linear.set_dtype(mx.float16)
    meter = SlowWithEight(5)
    few, reason = choose([linear], make, meter, ROOM)
    assert few is not None and reason.endswith("40 x 64 with 16 tokens")
    taken = [few.product(linear, mx.zeros((tokens, 64), mx.float16)) is not None for tokens in (8, 9, 16, 17)]
    assert taken == [False, True, True, False]
    assert meter.most_tokens == 40  # larger numbers of tokens are not tried after 32 and 40


def test_a_device_with_little_room_takes_what_fits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(64, 40)
    linear.set_dtype(mx.float16)
    least, calls = forms(1)[0].room(1), []
    product = Skinny.__call__

    def call(self: Skinny, x: mx.array, weight: mx.array, bias: mx.array | None, form: Form) -> mx.array:
        calls.append(form.room(eighths(x.shape[0])))
        return product(self, x, weight, bias, form)

    monkeypatch.setattr(Skinny, "__call__", call)
    assert choose([linear], make, Says(5), least).chosen is not None and max(calls) <= least
    assert choose([linear], make, Says(5), least - 1).chosen is None


def test_linears_that_are_met_twice_or_hold_two_types(make: Make) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mixed = nn.Linear(64, 40), nn.Linear(64, 40)
            self.second = self.first

    model = Twice()
    model.set_dtype(mx.bfloat16)
    model.mixed.bias = model.mixed.bias.astype(mx.float32)  # what MLX gives then is float32, too
    modules = candidates(model, [])
    choice = choose(modules, make, Says(5), ROOM)
    assert choice.chosen is not None
    speed_up(modules, [], choice.chosen)
    assert isinstance(model.second, SkinnyLinear) and not isinstance(model.mixed, SkinnyLinear)
    x = numbers(3, 1, 64, dtype=mx.bfloat16)
    assert model.second(x).dtype == mx.bfloat16 and model.mixed(x).dtype == mx.float32


def test_outputs_that_are_padding_are_right(make: Make) -> None:
    """As those behind the vocabulary of some heads, whose weights are zero."""
    head = nn.Linear(64, 600, bias=False)
    head.weight = mx.concatenate([numbers(80, 64, dtype=mx.bfloat16), mx.zeros((520, 64), mx.bfloat16)])
    assert choose([head], make, Says(5), ROOM).chosen is not None


FAULTS = {
    "no sum over the warps": ("warp < WARPS; warp++", "warp < 1; warp++"),
    "another order of inputs": ("low.y, high.y", "low.z, high.z"),
    "a row too few": ("each < M * OUTPUTS", "each < (M - 1) * OUTPUTS"),
    "no waiting": ("ASYNC_WAIT(STAGES - 2)", "ASYNC_WAIT(STAGES - 1)"),
    "lines that are not swapped": ("(column ^ ((line & 1) << 2))", "column"),
    "does not compile": ("BARRIER();", "BARRIER(;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_rejected_at_start(make: Make, fault: str) -> None:
    linear = nn.Linear(256, 40, bias=False)
    linear.set_dtype(mx.float16)
    choice = choose([linear], Broken(make, *FAULTS[fault]), Says(5), ROOM)
    assert choice.chosen is None and choice.reason.startswith("the kernel is not used: ")
