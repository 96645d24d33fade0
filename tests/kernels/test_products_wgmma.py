"""Products of 33 to 80 rows by the kernels for Hopper, on the CPU: against float32 sums, in the check at start, and in
a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.ops import residual
from mlx_tandem.model.ops.products.few_rows import FewRows, Shape, choose, speed_up
from mlx_tandem.model.ops.products.skinny import EIGHTHS
from mlx_tandem.model.ops.products.wgmma import Wgmma, WideForm, wide_form
from mlx_tandem.model.ops.residual import AddNorm
from tests.kernels import shim
from tests.kernels.broken import Broken
from tests.kernels.test_products_skinny import EXACT, ROOM, Says, floats, numbers
from tests.kernels.test_residual import model_of

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

FORMS = [WideForm(1, 1, 4, 3), WideForm(2, 3, 2, 2), WideForm(3, 2, 1, 4)]


@given(
    rows=st.sampled_from([33, 40, 41, 63, 64, 65, 77, 80]),
    outputs=st.sampled_from([16, 72, 136]),
    inputs=st.sampled_from([8, 128, 328, 840]),
    form=st.sampled_from(FORMS),
    dtype=st.sampled_from(list(EXACT)),
    biased=st.booleans(),
    order=st.sampled_from(shim.ORDERS),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_products_are_right(
    rows: int, outputs: int, inputs: int, form: WideForm, dtype: mx.Dtype, biased: bool, order: shim.Order
) -> None:
    x, weight = numbers(rows, 1, inputs, dtype=dtype), numbers(outputs, inputs, dtype=dtype, seed=1)
    bias = numbers(outputs, dtype=dtype, seed=2) if biased else None
    want = floats(x) @ floats(weight).T + (0 if bias is None else floats(bias))
    got, parts = Wgmma(shim.maker(order))(x, weight, bias, form)
    assert got.shape == want.shape and got.dtype == dtype
    assert np.abs(floats(got) - want).max() <= EXACT[dtype] * np.abs(want).max()
    assert (parts is None) == (biased or form.parts == 1)
    if parts is not None:
        assert parts.shape == (form.parts, *got.shape)
        assert np.abs(floats(parts).sum(0) - want).max() <= 1e-5 * np.abs(want).max()


def test_a_row_gets_the_same_bits_in_any_company() -> None:
    x, weight = numbers(64, 328, dtype=mx.bfloat16), numbers(40, 328, dtype=mx.bfloat16, seed=1)
    kernel = Wgmma(shim.maker())
    for form in FORMS[:2]:
        some, all_of_them = (kernel(each, weight, None, form).y for each in (x[5:43], x))
        assert mx.array_equal(some, all_of_them[5:43])


RACES = {
    "a slice that others still read": ("    BARRIER();  // all threads", "    // all threads"),
    "a slice that is still multiplied": (
        "    if (group < GROUPS) wgmma_wait(sums, T());\n    BARRIER();",
        "    BARRIER();\n    if (group < GROUPS) wgmma_wait(sums, T());",
    ),
    "a slice that has not come": ("ASYNC_WAIT(STAGES - 2);", "ASYNC_WAIT(STAGES - 1);"),
}


@pytest.mark.parametrize("race", RACES)
def test_a_race_shows(race: str) -> None:
    x, weight = numbers(37, 1000, dtype=mx.float16), numbers(72, 1000, dtype=mx.float16, seed=1)
    want = floats(x) @ floats(weight).T
    wrong = 0.0
    for order in shim.ORDERS:
        got = Wgmma(Broken(shim.maker(order), *RACES[race]))(x, weight, None, WideForm(1, 1, 1, 3)).y
        wrong = max(wrong, float(np.abs(np.nan_to_num(floats(got), nan=1e9) - want).max()))
    assert wrong > 10 * EXACT[mx.float16] * np.abs(want).max()


@given(eighths=st.sampled_from(EIGHTHS), outputs=st.integers(1, 40000).map(lambda n: 4 * n))
def test_forms_fit_into_a_block_and_blocks_onto_the_device(eighths: int, outputs: int) -> None:
    form = wide_form(eighths, outputs)
    assert (form is None) == (eighths <= 4)
    if form is not None:
        assert form.stages >= 2
        assert ROOM - form.tiles * 128 * (64 * form.groups + 8 * eighths) < form.room(eighths) <= ROOM
        blocks = -(-outputs // (64 * form.groups)) * form.parts
        assert blocks <= 132 or (form.groups, form.parts) == (3, 1)
        assert blocks > 66 or form.parts == 4 or form.groups > 1


def test_outputs_that_cannot_be_added_up_four_at_a_time_have_no_form() -> None:
    assert wide_form(10, 4098) is None


class Fast(Says):
    """A meter by which the kernels are faster than MLX for any number of tokens."""

    def host_seconds(self, calls: Sequence[Any], x: mx.array) -> float:
        return len(calls) * 1e-6 * (3 if _by_kernel(calls) else 15)

    def device_seconds(self, calls: Sequence[Any], x: mx.array) -> float:
        return len(calls) * 1e-6 * (9 if _by_kernel(calls) else 10)


class OnlyMany(Fast):
    """A meter by which the kernels are faster than MLX for more than 32 tokens only."""

    def device_seconds(self, calls: Sequence[Any], x: mx.array) -> float:
        return super().device_seconds(calls, x) * (9 if _by_kernel(calls) and x.shape[0] <= 32 else 1)


def _by_kernel(calls: Sequence[Any]) -> bool:
    return any(isinstance(argument, tuple) for argument in calls[0].args)


@pytest.mark.parametrize("wide", [False, True])
def test_they_are_used_on_hopper_only(wide: bool) -> None:
    linear = nn.Linear(64, 40)
    linear.set_dtype(mx.float16)
    few, _ = choose([linear], shim.maker(), Fast(5), ROOM, wide=wide)
    assert few is not None
    x = numbers(80, 64, dtype=mx.float16)
    y = few.product(linear, x)
    assert (y is not None) == wide
    if y is not None:
        assert np.abs(floats(y) - floats(linear(x))).max() <= EXACT[mx.float16] * np.abs(floats(y)).max()


def test_they_are_tried_where_the_other_kernel_loses(caplog: pytest.LogCaptureFixture) -> None:
    linear = nn.Linear(64, 40, bias=False)
    linear.set_dtype(mx.float16)
    few, reason = choose([linear], shim.maker(), OnlyMany(5), ROOM, wide=True)
    assert few is not None and reason.endswith("40 x 64 with 40, 64, 80 tokens")
    broken = Broken(shim.maker(), "(column ^ (line % 8))", "column")
    assert choose([linear], broken, OnlyMany(5), ROOM, wide=True).chosen is None
    assert "wgmma is not used: wrong by" in caplog.text


def test_only_hopper_has_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, minor, has in ((8, 9, False), (9, 0, True), (10, 0, False)):
        info = {"compute_capability_major": major, "compute_capability_minor": minor}
        monkeypatch.setattr(mx, "device_info", lambda info=info: info)
        assert dialect.is_hopper() == has


@pytest.mark.parametrize(
    ("text", "other"),
    [("(column ^ (line % 8))", "column"), ("part < PARTS", "part < 1"), ("fence_async_proxy();", "show(;")],
)
def test_a_broken_kernel_costs_the_others_nothing(text: str, other: str) -> None:
    linear = nn.Linear(1024, 40, bias=False)
    linear.set_dtype(mx.float16)
    few, reason = choose([linear], Broken(shim.maker(), text, other), Fast(5), ROOM, wide=True)
    assert few is not None and reason.endswith("40 x 1024 with 8, 16, 32, 40, 64 tokens")
    assert few.product(linear, numbers(80, 1024, dtype=mx.float16)) is None


def few_rows(parts: int, *sizes: tuple[int, int]) -> FewRows:
    """Return the kernels, used with more than 32 tokens for linears without a bias of these sizes (outputs, inputs)."""
    form = WideForm(1, parts, 1, 3)
    return FewRows(shim.maker(), {Shape(*size, biased=False): {5: form, 8: form, 10: form} for size in sizes})


def test_parts_are_handed_on_once_and_only_for_the_newest_output() -> None:
    linear = nn.Linear(128, 64, bias=False)
    linear.set_dtype(mx.bfloat16)
    few, whole = few_rows(2, (64, 128)), few_rows(1, (64, 128))
    assert few.divides and not whole.divides
    x = numbers(34, 128, dtype=mx.bfloat16)
    older, newer = few.product(linear, x), few.product(linear, x)
    assert older is not None and newer is not None
    assert few.take_parts(older) is None, "another output is newer"
    assert few.take_parts(newer) is None, "what was asked for is forgotten"
    newest = few.product(linear, x)
    assert newest is not None
    parts = few.take_parts(newest)
    assert parts is not None and parts.shape == (2, 34, 64)
    assert few.take_parts(newest) is None
    y = whole.product(linear, x)
    assert y is not None and whole.take_parts(y) is None


@pytest.mark.parametrize("parts", [1, 2])
def test_a_layer_adds_up_parts_itself(parts: int) -> None:
    """Its output has the same bits as with the sum that the second kernel computes."""
    model = model_of("qwen3")
    layers = residual.fusable(model)
    linears = [m for layer, _ in layers for m in (layer.self_attn.o_proj, layer.mlp.down_proj)]  # type: ignore[attr-defined]
    few = few_rows(parts, *(m.weight.shape for m in linears[:2]))
    speed_up(linears, [], few)
    tokens = mx.random.randint(0, 50, (2, 20))
    residual.use(layers, Added(shim.maker()))
    Added.divided = 0
    got = model(tokens)
    assert Added.divided == (6 if parts > 1 else 0)
    few.take_parts = lambda y: None  # type: ignore[method-assign]
    assert mx.array_equal(model(tokens), got)


class Added(AddNorm):
    """The kernel that adds and norms, which counts its calls with parts."""

    divided = 0

    def __call__(self, a: mx.array, b: mx.array, *rest: Any) -> tuple[mx.array, mx.array]:
        Added.divided += b.ndim > a.ndim
        return super().__call__(a, b, *rest)
