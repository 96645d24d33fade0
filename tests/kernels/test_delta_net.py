"""The fused path through gated delta nets agrees with the layers' own code, and layers that are served take it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3_5

from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.kernels.inplace import Store, Writing
from mlx_tandem.model.ops import delta_net, gated_delta
from mlx_tandem.model.ops.delta_net import GatedNorm, largest_error, problem
from mlx_tandem.model.ops.gated_delta import TOLERANCE, GatedDelta
from mlx_tandem.model.ops.products.merged import merge
from mlx_tandem.model.targets import find_groups
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.mlx_engine import Oracle, assert_agrees, make_engine
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

_rng = np.random.default_rng(5)
PROMPTS = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 14)]


class Around(nn.Module):
    """A model of one layer, in which linears with a common input can be found."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.embed, self.layer = nn.Embedding(8, 48), layer

    def __call__(self, tokens: mx.array) -> mx.array:
        out: mx.array = self.layer(self.embed(tokens))
        return out


def made(dtype: mx.Dtype, *, dim: int = 32, taps: int = 4, key_heads: int = 2, merged: bool = False) -> Any:
    args = qwen3_5.TextModelArgs(
        hidden_size=48,
        num_attention_heads=4,
        linear_num_value_heads=4,
        linear_num_key_heads=key_heads,
        linear_key_head_dim=dim,
        linear_value_head_dim=dim,
        linear_conv_kernel_dim=taps,
    )
    mx.random.seed(3)
    layer: Any = qwen3_5.GatedDeltaNet(args)
    layer.norm.weight = mx.random.uniform(0.5, 1.5, (dim,))
    layer.dt_bias = mx.random.normal((4,))
    layer.conv1d.weight = mx.random.normal(layer.conv1d.weight.shape)
    layer.set_dtype(dtype)
    if merged:
        assert len(merge(find_groups(Around(layer)))) == 1
    return layer


def fused(layer: Any, make: Make) -> Any:
    layers = delta_net.fusable(layer)
    assert layers
    delta_net.use(layers, delta_net.Kernels.made(make, GatedDelta(make)))
    return layer


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("dim", "taps", "key_heads", "merged"), [(32, 4, 2, False), (64, 4, 2, True), (128, 3, 4, True), (32, 2, 1, False)]
)
def test_it_agrees_with_the_layers_own_code(dtype: mx.Dtype, dim: int, taps: int, key_heads: int, merged: bool) -> None:
    for order in shim.ORDERS:
        layer = fused(made(dtype, dim=dim, taps=taps, key_heads=key_heads, merged=merged), shim.maker(order))
        for by_tokens in (False, True):
            error, of = largest_error(layer, by_tokens=by_tokens)
            assert of == dtype
            assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("past[i][j] * taps[i][j]", "past[i][j] * taps[TAPS - 1 - i][j]"),
        ("past[i][j] = past[i + 1][j]", "past[i][j] = past[i][j]"),
        ("past[TAPS - 2][j] = now", ""),
        ("pool + write[row]", "pool + read[row]"),
        ("pool[read[row] * width", "pool[(read[row] - 1) * width"),
        ("1e-6f / DIM", "1.0f"),
        ("kind == 0 ? 1.0f / DIM", "kind == 1 ? 1.0f / DIM"),
        ("if (kind < 2) {", "if (kind < 1) {"),
        ("float(dt_bias[head])", "0.0f"),
        ("x < 0.0f ? x : -x", "x"),
        ("-exponential(float(a_log[head])) * softplus", "-softplus"),
        ("b[token * B_WIDTH + B_AT + head]", "a[token * A_WIDTH + A_AT + head]"),
        ("T(y * float(T(sigmoid(y))))", "T(y)"),
        ("squares / DIM + FLOAT_BITS((uint)EPSILON)", "squares / DIM + 1.0f"),
        ("float(weight[LANE + 32 * j]) *", ""),
        ("gate * sigmoid(gate) * own", "gate * own"),
        ("token * Z_WIDTH + Z_AT + head * DIM", "token * Z_WIDTH + Z_AT"),
    ],
)
def test_a_wrong_kernel_is_not_used(right: str, wrong: str) -> None:
    for merged in (False, True):
        assert problem(fused(made(mx.float32, merged=merged), Broken(shim.maker(), right, wrong)))


def test_a_right_kernel_is_used() -> None:
    assert problem(fused(made(mx.bfloat16), shim.maker())) == ""


def test_layers_that_the_kernels_cannot_compute_are_left_alone() -> None:
    assert delta_net.fusable(made(mx.float32))
    for change in ({"dim": 16}, {"taps": 1}):
        assert not delta_net.fusable(made(mx.float32, **change))
    layer = made(mx.bfloat16)
    layer.dt_bias = layer.dt_bias.astype(mx.float32)
    assert not delta_net.fusable(layer), "the sum of decay and bias would be rounded otherwise"


def test_layers_that_are_served_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that begin and chunks of prompts, which run the layer's own code."""
    used = [0]

    class Counting(GatedNorm):
        def __call__(self, *args: Any) -> mx.array:
            used[0] += 1
            return super().__call__(*args)

    rule = GatedDelta(shim.maker())
    kernels = delta_net.Kernels(delta_net.DeltaNetInputs(shim.maker()), rule, Counting(shim.maker()))
    monkeypatch.setattr(gated_delta, "kernel", lambda: rule)
    monkeypatch.setattr(delta_net.Kernels, "made", lambda *_: kernels)
    own = SimpleNamespace(available=lambda: ("cuda",), maker=lambda target: shim.maker())
    monkeypatch.setattr(delta_net, "dialect", own)
    monkeypatch.setattr(inplace, "writing", lambda: Writing(Store(shim.maker())))
    folder = tiny_models.make(
        tmp_path / "model", "qwen3_5", linear_key_head_dim=32, linear_value_head_dim=32, num_hidden_layers=2
    )
    mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
    try:
        engine = make_engine(folder)
        params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
        asked = [Request(i, prompt, params) for i, prompt in enumerate((*PROMPTS, PROMPTS[1]))]
        oracle = Oracle.load(folder)
        used[0] = 0
        assert_agrees(engine.run(asked, chunks=9, stagger=2), oracle, "by the fused path")
        assert used[0] > 0
        used[0] = 0
        mx.eval(oracle.model(mx.array([PROMPTS[0]])))
        assert used == [0], "nobody else uses it"
    finally:
        mx.enable_compile()
