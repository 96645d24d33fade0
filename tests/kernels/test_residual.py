"""Layers that add and norm by one kernel say what their own code says, and only layers of known kinds do."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma2, llama, qwen3, qwen3_5
from mlx_lm.models.cache import make_prompt_cache

from mlx_tandem.model.backend.cuda import CUDA
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.checking import relative_error
from mlx_tandem.model.ops import all_sum, residual
from mlx_tandem.model.ops.all_sum import RowExchange
from mlx_tandem.model.ops.products.few_rows import FewRows, Shape, speed_up
from mlx_tandem.model.ops.products.wgmma import WideForm
from mlx_tandem.model.ops.residual import TOLERANCE, AddNorm, Norm, largest_error, problem
from tests.backends import answer_as
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

WIDTH, VOCABULARY = 32, 50
COMMON = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-3,
}
TOKENS = mx.array([[3, 9, 4], [40, 7, 7]])


def normed(dim: int, dtype: mx.Dtype, epsilon: float = 1e-2) -> Norm:
    mx.random.seed(2)
    return Norm(mx.random.uniform(0.5, 1.5, (dim,)).astype(dtype), epsilon)


def model_of(family: str, dtype: mx.Dtype = mx.bfloat16) -> Any:
    """Return a model of three layers whose norms have weights of their own."""
    mx.random.seed(1)
    if family == "qwen3_5":
        linear = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
        linear |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
        args = COMMON | linear | {"model_type": "qwen3_5_text", "full_attention_interval": 2, "head_dim": 16}
        model: Any = qwen3_5.TextModel(qwen3_5.TextModelArgs.from_dict(args))
    else:
        of = {"llama": llama, "qwen3": qwen3, "gemma2": gemma2}[family]
        more = {"model_type": family, "head_dim": 16, "rope_theta": 1e4, "max_position_embeddings": 64}
        more |= {"tie_word_embeddings": True}
        args_of: Any = of
        model = args_of.Model(args_of.ModelArgs.from_dict(COMMON | more))
    for _, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            module.weight = mx.random.uniform(0.5, 1.5, module.weight.shape)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def logits(model: Any) -> Any:
    """Return the logits of a prompt and of one more token for each row."""
    cache = make_prompt_cache(model)
    both = [model(TOKENS, cache=cache), model(TOKENS[:, :1], cache=cache)]
    return np.concatenate([np.array(part.astype(mx.float32)) for part in both], axis=1)


class Counted(AddNorm):
    """The kernel, which counts its calls."""

    calls = 0

    def __call__(self, *args: Any) -> tuple[mx.array, mx.array]:
        Counted.calls += 1
        return super().__call__(*args)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [4, 64, 100, 640, 4096, 5124, 9000])
def test_the_kernel_agrees_with_mlx(dtype: mx.Dtype, dim: int) -> None:
    for order in shim.ORDERS:
        assert largest_error(AddNorm(shim.maker(order)), normed(dim, dtype), divided=True) <= TOLERANCE[dtype]


def test_the_sum_is_rounded_before_the_norm() -> None:
    """So the kernel's sum is bit for bit that of MLX."""
    mx.random.seed(4)
    a, b = (mx.random.normal((3, 2, 64)).astype(mx.bfloat16) * 3 for _ in range(2))
    total, _ = AddNorm(shim.maker())(a, b, normed(64, mx.bfloat16))
    assert (np.array(total.view(mx.uint16)) == np.array((a + b).view(mx.uint16))).all()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("T(x0.x + y0.x)", "T(x0.x)"),
        ("both.of[3] = T(x1.y + y1.y)", "both.of[3] = T(x1.y - y1.y)"),
        ("squares += own[4 * i + j] * own[4 * i + j]", "squares += own[4 * i + j]"),
        ("squares / D + FLOAT_BITS((uint)EPSILON)", "squares / D"),
        ("if (LANE == 0) sums[WARP] = squares;", "sums[0] = squares;"),
        ("LANE < WIDTH / 32 ? sums[LANE] : 0.0f", "sums[0]"),
        ("T(w[j] * float(T(own[4 * i + j] * norm)))", "T(own[4 * i + j] * norm)"),
        ("(GLOBAL Four<T>*)(normed + at + number)", "(GLOBAL Four<T>*)(normed + number)"),
        ("(size_t)GROUP_X * D;", "(size_t)GROUP_X * (D - 4);"),
        ("part < PARTS", "part < PARTS - 1"),
        ("y.z += FLOAT_BITS(words.z)", "y.z = FLOAT_BITS(words.z)"),
        ("part * GROUPS_X * D + at", "part * D + at"),
    ],
)
def test_a_wrong_kernel_is_not_used(right: str, wrong: str) -> None:
    assert problem(AddNorm(Broken(shim.maker(), right, wrong)), normed(260, mx.float16, 0.5), divided=True)


def one_of_two(memory: list[np.ndarray[Any, Any]], rank: int) -> AddNorm:
    """Return the kernel of one of two ranks that exchange rows by this memory."""
    where = mx.array(np.array([own.ctypes.data for own in memory], np.uint64))
    return AddNorm(shim.maker(), RowExchange(where, rank))


@pytest.mark.parametrize("count", [0, 4])
def test_ranks_add_and_norm_the_sum_of_their_parts(count: int) -> None:
    """Each rank's kernel writes into the other's memory, so the ranks run one after the other here."""
    mx.random.seed(3)
    memory = [np.zeros(all_sum.shared_bytes(2), np.uint8) for _ in range(2)]
    turns = [own[-4 * all_sum.MOST_ROWS :].view(np.int32) for own in memory]
    norm, ranks = normed(260, mx.bfloat16), [one_of_two(memory, rank) for rank in range(2)]
    for now, rows in enumerate((3, 1, 3, 2)):
        a = mx.random.normal((rows, 260)).astype(mx.bfloat16)
        parts = mx.random.normal((2, count or 1, rows, 260))
        own = [part if count else part[0].astype(a.dtype) for part in parts]
        before = [each.copy() for each in turns]
        early, _ = ranks[1](a, own[1], norm)
        assert mx.all(mx.isnan(early))  # the other's numbers have not come, and were waited for
        assert (turns[1][:rows] != before[1][:rows]).all() and (turns[1][rows:] == before[1][rows:]).all()
        first = ranks[0](a, own[0], norm)
        turns[1][:] = before[1]
        second = ranks[1](a, own[1], norm)
        total = (parts.sum(1).astype(a.dtype).astype(mx.float32)).sum(0).astype(a.dtype)
        assert mx.array_equal(first[0], a + total), now
        assert all(mx.array_equal(*both) for both in zip(first, second, strict=True))
        want = mx.fast.rms_norm(a + total, norm.weight, norm.epsilon)
        assert relative_error(first[1], want) <= TOLERANCE[mx.bfloat16]
        # In a real step the second rank runs once, so its flag in the first rank's memory is set once.
        memory[0][: -4 * all_sum.MOST_ROWS].view(np.int32)[2 * all_sum.MOST_ROWS * 2 * all_sum.MOST_BYTES // 4 :] = 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("*turn = 1 - now", "*turn = now"),
        ("STORE_SHARED(flag, 0)", ""),
        ("rank != RANK && number < D) part", "number < D && rank > RANK) part"),
        ("first + RANK) * MOST_BYTES", "RANK) * MOST_BYTES"),
        ("sums[j] += float(part.of[j])", "sums[j] = float(part.of[j])"),
        ("lost[0] = 1;", ";"),
    ],
)
def test_a_wrong_exchange_is_noticed(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "maker", lambda real=shim.maker: Broken(real(), right, wrong))
    with pytest.raises(AssertionError):
        test_ranks_add_and_norm_the_sum_of_their_parts(0)


def test_a_kernel_that_is_wrong_about_parts_is_used_where_there_are_none() -> None:
    kernel = AddNorm(Broken(shim.maker(), "part < PARTS", "part < 1"))
    assert not problem(kernel, normed(64, mx.float16))
    assert problem(kernel, normed(64, mx.float16), divided=True)


def test_a_sum_of_parts_is_rounded_before_it_is_added() -> None:
    mx.random.seed(5)
    a, parts = mx.random.normal((3, 64)).astype(mx.bfloat16), mx.random.normal((4, 3, 64))
    total = parts[0] + parts[1] + parts[2] + parts[3]
    kernel = AddNorm(shim.maker())
    for got, want in zip(*(kernel(a, b, normed(64, mx.bfloat16)) for b in (parts, total.astype(a.dtype))), strict=True):
        assert mx.array_equal(got, want)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_a_model_says_what_it_said(family: str) -> None:
    model = model_of(family)
    want = logits(model)
    layers = residual.fusable(model)
    assert len(layers) == 3
    residual.use(layers, Counted(shim.maker()))
    Counted.calls = 0
    got = logits(model)
    assert Counted.calls == 2 * 3 * 2
    assert np.abs(got - want).max() <= 2e-2 * np.abs(want).max()
    own = [layer.input_layernorm for layer, _ in layers]
    assert [isinstance(norm, residual.HandedNorm) for norm in own] == [False, True, True]


def test_a_norm_computes_what_it_was_not_handed() -> None:
    """A model may change the sum between two layers, as those do that add what an image shows."""
    norm: Any = residual.fusable(model_of("llama"))[0][1].following
    residual.use(residual.fusable(whole := model_of("llama")), AddNorm(shim.maker()))
    handed: Any = whole.model.layers[1].input_layernorm
    x, other = mx.ones((1, 2, WIDTH), mx.bfloat16), mx.full((1, 2, WIDTH), 3.0, mx.bfloat16)
    handed._handed.put(x, other, (1, 2))
    assert handed(x + 0) is not other
    assert handed(x) is not other, "what was handed before is forgotten"
    handed._handed.put(x, other, (1, 2))
    assert handed(x) is other
    want = np.array(norm(x).astype(mx.float32))
    assert (np.array(handed(x).astype(mx.float32)) == want).all()


def test_layers_of_other_kinds_and_types_are_left_alone() -> None:
    assert not residual.fusable(model_of("gemma2"))
    assert not residual.fusable(model_of("llama", mx.float32))
    changed = model_of("llama")
    changed.model.layers[1].post_attention_layernorm.weight = mx.ones((WIDTH,))
    assert [layer is changed.model.layers[1] for layer, _ in residual.fusable(changed)] == [False, False]
    last = model_of("llama")
    del last.model["norm"]
    assert len(residual.fusable(last)) == 2


def test_sums_of_other_types_and_of_many_tokens_are_added_by_mlx() -> None:
    model = model_of("qwen3")
    residual.use(residual.fusable(model), Counted(shim.maker()))
    layer: Any = model.model.layers[0]
    x = mx.random.normal((2, 1, WIDTH))
    Counted.calls = 0
    total, norm = layer._added(x, x.astype(mx.bfloat16), layer._parts.middle, x.shape)
    assert Counted.calls == 0
    assert total.dtype == mx.float32
    assert norm.shape == x.shape
    many = mx.ones((1, residual.MOST_TOKENS + 1, WIDTH), mx.bfloat16)
    layer._added(many, many, layer._parts.middle, many.shape)
    assert Counted.calls == 0
    layer._added(many[:, 1:], many[:, 1:], layer._parts.middle, many[:, 1:].shape)
    assert Counted.calls == 1


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_are_checked_if_linears_have_some(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_as(monkeypatch, kernels=CUDA.kernels)
    monkeypatch.setattr(dialect, "maker", lambda target: Broken(shim.maker(), "part < PARTS", "part < 1"))
    model = model_of("llama")
    linear = model.model.layers[0].self_attn.o_proj
    adapted = {Shape(WIDTH, WIDTH, biased=False): {5: WideForm(1, parts, 1, 3)}}
    speed_up([linear], [], FewRows(shim.maker(), {}, adapted))
    residual.install(model)
    assert isinstance(model.model.layers[0], residual.FusedLayer) == (parts == 1)


@pytest.mark.parametrize("broken", [False, True])
def test_a_served_model_takes_the_path_if_its_kernel_is_right(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Broken(shim.maker(), "squares / D", "squares") if broken else shim.maker()
    monkeypatch.setattr(dialect, "maker", lambda target: make)
    model = model_of("llama")
    residual.install(model)
    assert not isinstance(model.model.layers[0], residual.FusedLayer), "there is no GPU"
    answer_as(monkeypatch, kernels=CUDA.kernels)
    residual.install(model_of("gemma2"))
    residual.install(model)
    assert isinstance(model.model.layers[0], residual.FusedLayer) != broken
