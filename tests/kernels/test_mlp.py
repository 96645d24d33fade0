"""MLPs whose SwiGLU is one kernel say what their own code says, and only MLPs of known kinds have it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma, llama, qwen3, qwen3_5
from mlx_lm.models.activations import swiglu

from mlx_tandem.config import LoraConfig
from mlx_tandem.model.backend.cuda import CUDA
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.dialect import Source
from mlx_tandem.model.ops import mlp
from mlx_tandem.model.ops.lora.choice import UNLIMITED
from mlx_tandem.model.ops.lora.kernel import GroupedDeltas, LoraKernels
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.ops.mlp import TOLERANCE, SwiGLU, largest_error, problem
from mlx_tandem.model.ops.products.merged import MOST_TOKENS, merge
from mlx_tandem.model.targets import find_groups
from tests.backends import answer_as
from tests.engine.test_lora import adapter
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

WIDTH, HIDDEN, VOCABULARY, LAYERS = 32, 48, 50, 2
COMMON = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-3,
    "head_dim": 16,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
TOKENS = mx.array([[3, 9, 4], [40, 7, 7]])


def model_of(family: str, dtype: mx.Dtype = mx.bfloat16, *, merged: bool = True, **changes: Any) -> Any:
    """Return a model of two layers whose linears are merged."""
    mx.random.seed(1)
    if family == "qwen3_5":
        linear = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
        linear |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
        args = COMMON | linear | {"model_type": "qwen3_5_text", "full_attention_interval": 2}
        model: Any = qwen3_5.TextModel(qwen3_5.TextModelArgs.from_dict(args))
    else:
        of: Any = {"llama": llama, "qwen3": qwen3, "gemma": gemma}[family]
        model = of.Model(of.ModelArgs.from_dict(COMMON | {"model_type": family} | changes))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    if merged:
        merge(find_groups(model))
    return model


class Counted(SwiGLU):
    """The kernel, which counts its calls."""

    calls = 0

    def __call__(self, joined: mx.array) -> mx.array:
        Counted.calls += 1
        return super().__call__(joined)


def fused(family: str, dtype: mx.Dtype = mx.bfloat16, **changes: Any) -> Any:
    """Return a model whose MLPs take the path, with a count of calls that begins at zero."""
    model = model_of(family, dtype, **changes)
    mlp.use(mlp.fusable(model), Counted(shim.maker()))
    Counted.calls = 0
    return model


def bits(array: mx.array) -> Any:
    return np.array(array.view(mx.uint16))


def exponential(x: mx.array) -> mx.array:
    """Return exp(x), computed by the dialect's EXP. MLX's exponential on the CPU differs from it for a few numbers."""
    source = Source("exponential", ["x"], ["y"], "y[GROUP_X] = EXP(x[GROUP_X]);")
    return shim.maker()(source)([x], {}, (x.size, 1, 1), 1, [(x.shape, x.dtype)])[0]


def rounded_each_time(gates: mx.array, ups: mx.array) -> mx.array:
    """Return SwiGLU by operations of MLX that are rounded one by one, as they are on CUDA."""
    part = 1 / (1 + exponential(mx.abs(gates)))
    return gates * mx.where(gates < 0, part, 1 - part) * ups


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [8, 64, 264, 1032, 4096])
def test_the_kernel_agrees_with_mlx(dtype: mx.Dtype, hidden: int) -> None:
    for order in shim.ORDERS:
        assert largest_error(SwiGLU(shim.maker(order)), hidden, dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_operation_is_rounded_as_on_cuda(dtype: mx.Dtype) -> None:
    """For each finite gate, the kernel gives the bits of MLX's operations one after the other."""
    gates = mx.arange(1 << 16).astype(mx.uint16).view(dtype)
    gates = mx.where(mx.isfinite(gates), gates, 0).astype(dtype)
    mx.random.seed(4)
    ups = mx.random.normal(gates.shape).astype(dtype)
    joined = mx.concatenate([gates.reshape(64, 1024), ups.reshape(64, 1024)], axis=-1)
    want = rounded_each_time(gates, ups).reshape(64, 1024)
    assert (bits(SwiGLU(shim.maker())(joined)) == bits(want)).all()


def test_rows_may_have_any_leading_axes() -> None:
    kernel = SwiGLU(shim.maker())
    joined = mx.random.normal((6, 2 * HIDDEN)).astype(mx.float16)
    flat = kernel(joined)
    assert flat.shape == (6, HIDDEN)
    three = kernel(joined.reshape(3, 2, 2 * HIDDEN))
    assert three.shape == (3, 2, HIDDEN)
    assert (bits(three).reshape(6, HIDDEN) == bits(flat)).all()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("gate < 0.0f ? -gate : gate", "gate"),
        ("1.0f + float(exp_abs)", "float(exp_abs)"),
        ("gate < 0.0f ? part", "gate > 0.0f ? part"),
        ("T(gate * float(sigmoid))", "sigmoid"),
        ("float(silu) * up", "float(silu)"),
        ("LOAD16(from + HIDDEN)", "LOAD16(from)"),
        ("swiglu(gate.y, up.y, T())", "swiglu(gate.x, up.x, T())"),
        ("(size_t)GROUP_Y * 2 * HIDDEN", "(size_t)GROUP_Y * HIDDEN"),
        ("(size_t)GROUP_Y * HIDDEN + column) = result", "column) = result"),
        ("GROUP_X * THREADS + THREAD", "THREAD"),
    ],
)
def test_a_wrong_kernel_is_not_used(right: str, wrong: str) -> None:
    assert problem(SwiGLU(Broken(shim.maker(), right, wrong)), [64, 1032], mx.float16)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_model_says_what_it_said(family: str, dtype: mx.Dtype) -> None:
    want = model_of(family, dtype)(TOKENS).astype(mx.float32)
    got = fused(family, dtype)(TOKENS).astype(mx.float32)
    assert Counted.calls == LAYERS
    assert np.abs(np.array(got - want)).max() <= 2e-2 * np.abs(np.array(want)).max()


@pytest.mark.parametrize("biased", [False, True])
def test_an_mlp_says_what_it_said_for_two_axes_and_three(biased: bool) -> None:
    """The sizes are so small that a product of all rows has the same bits as products of single rows."""
    own, other = (make("llama", mlp_bias=biased).layers[1].mlp for make in (model_of, fused))
    x = mx.random.normal((3, 1, WIDTH)).astype(mx.bfloat16)
    want = own.down_proj(rounded_each_time(own.gate_proj(x), own.up_proj(x)))
    for given in (x, x[:, 0]):
        got = other(given)
        assert got.shape == given.shape
        assert (bits(got).reshape(3, WIDTH) == bits(want).reshape(3, WIDTH)).all()
    assert Counted.calls == 2


def test_an_mlp_runs_its_own_code_for_many_tokens_and_other_types() -> None:
    one = fused("qwen3").layers[0].mlp
    for x in (mx.ones((1, MOST_TOKENS + 1, WIDTH), mx.bfloat16), mx.ones((2, 1, WIDTH))):
        assert one(x).shape == x.shape
    assert Counted.calls == 0
    mixed = fused("qwen3", mx.float32).layers[0].mlp
    assert mixed(mx.ones((2, 1, WIDTH), mx.bfloat16)).dtype == mx.float32
    assert Counted.calls == 0


def test_an_mlp_runs_its_own_code_if_its_linears_are_faster_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    one = fused("qwen3").layers[0].mlp
    monkeypatch.setattr("mlx_tandem.model.ops.products.merged.Merged.joins", lambda self, x: False)
    one(mx.ones((2, 1, WIDTH), mx.bfloat16))
    assert Counted.calls == 0


@pytest.mark.parametrize("only", ["", "up_proj"])
def test_adapters_are_not_lost(only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If gate and up have adapters the kernel reads their joined sums; otherwise the MLP's own code runs."""
    answer_as(monkeypatch, products=CUDA.products)  # so that the adapters' arrays have the model's type
    model = model_of("qwen3")
    groups = find_groups(model)
    mlp.use(mlp.fusable(model), Counted(shim.maker()))
    kernels = GroupedDeltas(LoraKernels(shim.maker()), groups, same=UNLIMITED, mixed=UNLIMITED)
    state = LoraState(model, LoraConfig(max_loras=1), mx.bfloat16, kernels)
    state.install(1, adapter(state.linears(), 8, 1, only))
    x = mx.random.normal((2, 1, WIDTH)).astype(mx.bfloat16)
    one, route = model.layers[0].mlp, state.route([1, 0])
    activate = swiglu if only else rounded_each_time
    base = one.down_proj(activate(one.gate_proj(x), one.up_proj(x)))
    Counted.calls = 0
    state.bind(route.arrays, mx.array(route.ids), route.layout)
    got = one(x)
    want = one.down_proj(activate(one.gate_proj(x), one.up_proj(x)))
    state.unbind()
    assert Counted.calls == (0 if only else 1)
    assert (bits(got) == bits(want)).all()
    assert (bits(got) == bits(base)).all(axis=-1)[:, 0].tolist() == [False, True]


def test_mlps_of_other_kinds_and_sizes_are_left_alone() -> None:
    assert not mlp.fusable(model_of("gemma"))
    assert not mlp.fusable(model_of("llama", merged=False))
    assert not mlp.fusable(model_of("llama", intermediate_size=HIDDEN + 4))
    assert len(mlp.fusable(model_of("llama"))) == LAYERS


@pytest.mark.parametrize("broken", [False, True])
def test_a_served_model_takes_the_path_if_its_kernel_is_right(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Broken(shim.maker(), "float(silu) * up", "up") if broken else shim.maker()
    monkeypatch.setattr(dialect, "maker", lambda target: make)
    model = model_of("llama")
    mlp.install(model, mx.bfloat16)
    assert not isinstance(model.layers[0].mlp, mlp.FusedMLP), "there is no GPU"
    answer_as(monkeypatch, kernels=CUDA.kernels)
    mlp.install(model_of("gemma"), mx.bfloat16)
    mlp.install(model, mx.float32)
    assert not isinstance(model.layers[0].mlp, mlp.FusedMLP)
    mlp.install(model, mx.bfloat16)
    assert isinstance(model.layers[0].mlp, mlp.FusedMLP) != broken
