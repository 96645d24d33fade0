"""Attention blocks on the fused path, for inputs [rows, length, dim] and [rows · length, dim]."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama, qwen3, qwen3_next

from mlx_tandem.model.cache.kvformat import LayerShape, RowFormat
from mlx_tandem.model.cache.pools import KVArrays
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import Store, Writing
from mlx_tandem.model.ops.attention import portable
from mlx_tandem.model.ops.attention.block import FusedBlock, fusable_blocks, use_fused_path
from mlx_tandem.model.ops.attention.cache import PagedCache, PoolLayout, StepView
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.products.merged import merge
from mlx_tandem.model.targets import find_groups
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

HEADS, KV_HEADS, DIM, WIDTH, BLOCK, ROWS, BLOCKS = 4, 2, 16, 32, 4, 3, 13
OFFSETS = np.array([5, 0, 12], np.int32)

COMMON = {
    "model_type": "tiny",
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
MIXTURE: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": WIDTH,
    "mlp_only_layers": [],
    "moe_intermediate_size": WIDTH,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 1,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (llama, COMMON),
    "normed": (qwen3, COMMON),
    "gated": (qwen3_next, COMMON | MIXTURE),
}


@pytest.fixture(autouse=True)
def _writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inplace, "writing", lambda: Writing(Store(shim.maker())))


def block_of(name: str) -> Any:
    """Return the attention block of a model of one layer, on the fused path."""
    module, config = MODELS[name]
    mx.random.seed(7)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())  # type: ignore[no-untyped-call]
    portable.install()
    merge(find_groups(model))
    blocks = fusable_blocks(model)
    use_fused_path(blocks)
    ((block, _),) = blocks
    assert isinstance(block, FusedBlock)
    return block


def outputs(block: Any, x: mx.array, length: int = 1, *, fused: bool = True) -> tuple[list[mx.array], int]:
    """Return the block's output in one step with what is in the pool afterwards, and the number of calls of
    `attend_products`.
    """
    form = RowFormat(KV_HEADS, DIM, mx.float32)
    shape = LayerShape(form, form)
    rng = np.random.default_rng(3)
    pool = KVArrays([shape], BLOCKS, BLOCK)
    for array in pool.layers[0]:
        array[:] = mx.array(rng.standard_normal(array.shape).astype(np.float32))
    tables = 1 + np.arange(BLOCKS - 1, dtype=np.int32).reshape(ROWS, -1)
    at = OFFSETS[:, None] + np.arange(length, dtype=np.int32)
    slots = np.take_along_axis(tables, at // BLOCK, axis=1) * BLOCK + at % BLOCK
    view = StepView(mx.array(OFFSETS), mx.array(slots), mx.array(tables), PoolLayout(BLOCKS, BLOCK, mask_axes=1))
    calls = 0

    class Counted(PagedCache):
        def attend_products(self, *args: Any, **options: Any) -> mx.array:
            nonlocal calls
            calls += 1
            return super().attend_products(*args, **options)

    cache = Counted(shape, Fused("cuda", shim.maker()).kernels(shape, BLOCK) if fused else None)
    cache.bind(pool.layers[0], view)
    out = block(x, cache.make_mask(length), cache)
    mx.eval(out)
    return [out, *cache.release()], calls


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("length", [1, 3])
def test_rows_and_tokens_may_share_an_axis(name: str, apart: bool, length: int) -> None:
    """q, k and v come from one product or from three."""
    block = block_of(name)
    block._products_apart = apart
    x = mx.random.normal((ROWS, length, WIDTH))
    (whole, *pool), calls = outputs(block, x, length)
    (flat, *same), more = outputs(block, x.reshape(-1, WIDTH), length)
    assert calls == more == 1
    assert whole.shape == (ROWS, length, WIDTH) and flat.shape == (ROWS * length, WIDTH)
    assert mx.array_equal(whole.reshape(-1, WIDTH), flat)
    assert all(mx.array_equal(a, b) for a, b in zip(pool, same, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_fused_path_gives_what_the_block_s_own_code_gives(name: str) -> None:
    block = block_of(name)
    x = mx.random.normal((ROWS, 1, WIDTH))
    (ours, *pool), _ = outputs(block, x)
    (theirs, *same), _ = outputs(block, x, fused=False)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(mx.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(pool, same, strict=True))
