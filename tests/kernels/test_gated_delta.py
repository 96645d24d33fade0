"""The kernel of the gated delta rule agrees with mlx-lm's operations, and layers that are served use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_tandem.model.cache.states import StateArray, StateCache, StateShape, StateView
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import Store, Writing
from mlx_tandem.model.ops import gated_delta
from mlx_tandem.model.ops.attention import choice
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.gated_delta import (
    TIMED,
    TOLERANCE,
    UNEVEN,
    GatedDelta,
    RuleInputs,
    _drawn,
    largest_error,
    problem,
)
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.mlx_engine import Oracle, assert_agrees, make_engine
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

_rng = np.random.default_rng(5)
PROMPTS = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 40, 12)]

WIDE = {
    "qwen3_5": {"linear_key_head_dim": 32},
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 32,
            "kda_layers": [1],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        }
    },
}
"""Heads of the states that are wide enough for the kernel; those of the second keep a share for each column."""


@pytest.mark.parametrize(("dk", "by_column"), [(32, True), (64, False), (128, False), (128, True)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_agrees_with_operations(dtype: mx.Dtype, dk: int, by_column: bool) -> None:
    sizes = UNEVEN._replace(dk=dk)
    for order in shim.ORDERS:
        assert largest_error(GatedDelta(shim.maker(order)), dtype, sizes, by_column=by_column) <= TOLERANCE[dtype]


def test_it_agrees_with_operations_for_heads_of_a_large_model() -> None:
    few = TIMED._replace(key_heads=1, heads=1)  # emulated, all of them would take half a minute
    assert largest_error(GatedDelta(shim.maker()), mx.bfloat16, few, by_column=False) <= TOLERANCE[mx.bfloat16]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check at start compute few numbers, which are loaded as those of large heads."""
    monkeypatch.setattr(gated_delta, "TIMED", TIMED._replace(key_heads=1, heads=1, dv=8))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("s[r][j] *= decay[j];", ""),
        ("head / (HV / HK)", "head % HK"),
        ("(size_t)write[sequence]", "(size_t)read[sequence]"),
        ("(size_t)read[sequence]", "(size_t)sequence"),
        ("LANE == r &&", "LANE == 0 && r == 0 &&"),
        ("s[r][(j + 2) % EACH] = FLOAT_BITS(four.z)", "s[r][(j + 2) % EACH] = FLOAT_BITS(four.y)"),
        ("WORD_BITS(s[r][(j + 3) % EACH])", "WORD_BITS(s[r][(j + 2) % EACH])"),
        ("s[r][j] = outside ? 0.0f : float(source[j]);", "s[r][j] = 0.0f;"),
        ("row[j] = S(s[r][j]);", ""),
        ("* strength", ""),
    ],
)
@pytest.mark.usefixtures("small")
def test_a_wrong_kernel_is_not_used(right: str, wrong: str) -> None:
    assert problem(Broken(shim.maker(), right, wrong))


@pytest.mark.usefixtures("small")
def test_a_right_kernel_is_used() -> None:
    assert problem(shim.maker()) == ""


def test_rows_that_are_padding_and_rows_in_their_own_line_are_right() -> None:
    """Padded rows all read and write the first line. A row may write the line that it reads."""
    for order in shim.ORDERS:
        inputs, state = _drawn(mx.float32, UNEVEN._replace(dk=128), by_column=False)
        want, want_after = gated_delta_ops(*inputs, state)
        padding = RuleInputs(*(mx.concatenate([x, mx.full((2, *x.shape[1:]), mx.nan, x.dtype)]) for x in inputs))
        pool = mx.concatenate([mx.zeros((1, state[0].size)), state.reshape(3, -1), mx.full((2, state[0].size), 7.0)])
        mx.eval(pool, *padding)
        read, write = mx.array([1, 2, 3, 0, 0], mx.int32), mx.array([1, 5, 3, 0, 0], mx.int32)
        got = GatedDelta(shim.maker(order)).in_place(padding, pool, read, write)
        after = want_after.reshape(3, -1)
        for ours, theirs in ((got[:3], want), (pool[1], after[0]), (pool[5], after[1]), (pool[3], after[2])):
            assert mx.allclose(ours, theirs, atol=1e-4)
        assert mx.array_equal(pool[2], state.reshape(3, -1)[1]) and (pool[4] == 7.0).all()


@pytest.mark.parametrize(("length", "in_pool"), [(1, True), (8, True), (9, False)])
def test_on_metal_short_rows_use_it_and_mlx_lm_s_kernel_the_others(
    monkeypatch: pytest.MonkeyPatch, length: int, in_pool: bool
) -> None:
    """mlx-lm calls its kernel under a name of its own there, which is replaced, too."""
    kernel, asked = GatedDelta(shim.maker()), []
    monkeypatch.setattr(gated_delta, "kernel", lambda: kernel)
    monkeypatch.setattr(inplace, "writing", lambda: Writing(Store(shim.maker()), by_outputs=True))

    def own(*args: Any) -> tuple[mx.array, mx.array]:
        asked.append(args)
        return gated_delta_ops(*args)

    rule = gated_delta._replacing(own, only_in_pool=True)
    rows, heads, dim = 2, 2, 32
    mx.random.seed(0)
    keys = mx.random.normal((rows, length, heads, dim)) * dim**-0.5
    given = keys, keys, keys, mx.full((rows, length, heads), 0.5), mx.full((rows, length, heads), 0.5)
    state = mx.random.normal((rows, heads, dim, dim))
    pool = mx.concatenate([state.reshape(rows, -1), mx.zeros((rows, state[0].size))])
    mx.eval(pool)
    cache = StateCache(StateShape((StateArray(state.shape[1:], state.dtype),)))
    want, after = gated_delta_ops(*given, state)
    for begins in (False, True):  # rows that begin have a state that is not in the pool
        cache.bind([pool], StateView(mx.array([0, 1]), mx.array([2, 3])))
        with gated_delta.using_kernel(cache):
            got, new = rule(*given, mx.array(state) if begins else cache[0], None)
        mx.eval(got)
        assert mx.allclose(got, want, atol=1e-4)
        assert bool(asked) == (begins or not in_pool)
        if not asked:
            assert mx.allclose(pool[2:], after.reshape(rows, -1), atol=1e-4) and not cache.gathered_bytes()
        asked.clear()
        cache[0] = new
        cache.release()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_layers_that_are_served_use_it(
    tmp_path: Path, family: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the pool where kernels write it; rows that begin, go on in chunks, decode and share a prefix."""
    kernel, used = GatedDelta(shim.maker()), [0, 0]
    run, run_in_place = kernel.__call__, kernel.in_place

    class Counting(GatedDelta):
        def __call__(self, *args: object) -> tuple[mx.array, mx.array]:
            used[0] += 1
            return run(*args)  # type: ignore[arg-type]

        def in_place(self, *args: object) -> tuple[mx.array, mx.array]:
            used[1] += 1
            return run_in_place(*args)  # type: ignore[arg-type]

    counting = Counting(shim.maker())
    monkeypatch.setattr(gated_delta, "kernel", lambda: counting)
    backends = []
    if in_place:
        monkeypatch.setattr(inplace, "writing", lambda: Writing(Store(shim.maker())))
        backends = [Fused("cuda", shim.maker())]
        monkeypatch.setattr(choice, "STEPS", ((2, 64), (1, 192)))  # emulated, long contexts would take seconds
        monkeypatch.setattr(choice, "CHAIN", 2)
    folder = tiny_models.make(tmp_path / "model", family, **WIDE[family])
    mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
    try:
        engine = make_engine(folder, backends=backends)
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3)
        asked = [Request(i, prompt, params) for i, prompt in enumerate((*PROMPTS, PROMPTS[1]))]
        oracle = Oracle.load(folder)
        used[:] = [0, 0]
        assert_agrees(engine.run(asked, chunks=9, stagger=2), oracle, "by the kernel")
        assert used[0] > 0 and (used[1] > used[0]) == in_place
        used[:] = [0, 0]
        mx.eval(oracle.model(mx.array([PROMPTS[0]])))
        assert used == [0, 0], "nobody else uses it"
    finally:
        mx.enable_compile()
