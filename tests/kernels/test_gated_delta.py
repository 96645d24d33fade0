"""The kernel of the gated delta rule agrees with mlx-lm's operations, and layers that are served use it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.model import gated_delta
from mlx_tandem.model.attention.fused import Fused
from mlx_tandem.model.cache import inplace
from mlx_tandem.model.cache.inplace import Writing
from mlx_tandem.model.kernel_checks import attention as choice
from mlx_tandem.model.kernel_checks.gated_delta import TOLERANCE, largest_error, problem
from mlx_tandem.model.kernels.gated_delta import GatedDelta
from mlx_tandem.model.kernels.store import Store
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
    for order in shim.ORDERS:
        assert largest_error(GatedDelta(shim.maker(order)), dtype, by_column=by_column, dk=dk) <= TOLERANCE[dtype]


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
def test_a_wrong_kernel_is_not_used(right: str, wrong: str) -> None:
    assert problem(Broken(shim.maker(), right, wrong))


def test_a_right_kernel_is_used() -> None:
    assert problem(shim.maker()) == ""


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
