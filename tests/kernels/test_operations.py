"""The operations of a decoding layer on CUDA and on Metal, each of which costs the host time at every launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.model.kernels import dialect, inplace
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.lora import choice as lora
from tests import tiny_models
from tests.engine.mlx_engine import make_engine
from tests.hazards import steps
from tests.kernels import gpu as fake
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

BASE = {"Matmul": 4, "add_norm": 2, "paged_attention": 1, "rotary_joined_normed": 1, "swiglu": 1}
"""The operations of a layer of Qwen3's kind, whose products are computed by MLX."""

ADAPTERS = {
    "lora_shrink_3": 1,
    "lora_expand_3_whole": 1,
    "lora_shrink_2": 1,
    "lora_expand_2_whole": 1,
    "lora_shrink_1": 2,
    "lora_expand_1_apart": 2,
}
"""The operations that adapters on all linears add."""

RECURRENT = {"delta_net_inputs": 1, "gated_delta_in_place": 1, "gated_norm": 1}
"""The kernels of a layer of Qwen3.5's kind with a state, which is read and written in the pool."""

RECURRENT_ON_METAL = 45
"""All operations of such a layer on Metal before MLX fuses them, those that only change a shape included. With states
that are gathered and written back there were 165."""


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shim computes at once, and MLX's CPU back end has no adapters in 16 bits to compare with."""
    monkeypatch.setattr(lora, "_TOKENS", (1, 16))
    monkeypatch.setattr(lora, "_times", lambda *_: (0.0, 1.0))
    mx.disable_compile()
    yield
    mx.enable_compile()
    inplace.writing.cache_clear()


def operations(
    model: Path, patch: pytest.MonkeyPatch, target: dialect.Target = "cuda", slots: tuple[int, ...] = ()
) -> Counter[str]:
    """Return the operations of a step of two rows in these slots, by name."""
    gpu = fake.install(target, shim.maker(), patch)
    fake.time_by_clock(gpu, patch)
    made = make_engine(
        model, dtype="bfloat16", attention_backend=target, backends=[Fused(target, dialect.maker(target))]
    )
    recorded = steps.Metal(made, gpu, patch)
    for seed, name in enumerate(("one", "two") if slots else ()):
        adapter: Any = steps.adapter(made, name, seed)
        made.weights[name] = adapter
        recorded.runner._lora.install(1 + seed, adapter)
    return Counter(op.name for op in recorded.launch(steps.decode(recorded, *slots)).ops)


@pytest.mark.parametrize(("slots", "expected"), [((), BASE), ((1, 2), BASE | ADAPTERS)])
def test_a_layer_has_no_operation_that_only_changes_a_shape(
    tmp_path: Path, slots: tuple[int, ...], expected: dict[str, int]
) -> None:
    counts = []
    for layers in (2, 3):
        with pytest.MonkeyPatch.context() as patch:
            model = tiny_models.make(tmp_path / str(layers), "qwen3", num_hidden_layers=layers)
            counts.append(operations(model, patch, slots=slots))
    assert counts[1] - counts[0] == Counter(expected)


def recurrent(folder: Path, target: dialect.Target) -> Counter[str]:
    """Return the operations of one layer with a state: the difference that a layer of this kind makes."""
    counts = []
    for layers in (2, 3):
        with pytest.MonkeyPatch.context() as patch:
            model = tiny_models.make(
                folder / str(layers),
                "qwen3_5",
                num_hidden_layers=layers,
                full_attention_interval=layers,  # the last layer alone has attention
                linear_key_head_dim=32,
                linear_value_head_dim=32,
            )
            counts.append(operations(model, patch, target))
    return counts[1] - counts[0]


def test_a_recurrent_layer_has_three_kernels_on_cuda(tmp_path: Path) -> None:
    products = {"Matmul": 4, "add_norm": 2, "swiglu": 1, "Reshape": 1}
    assert recurrent(tmp_path, "cuda") == Counter(RECURRENT | products)


def test_a_recurrent_layer_moves_no_state_on_metal(tmp_path: Path) -> None:
    found = recurrent(tmp_path, "metal")
    assert {name: found[name] for name in RECURRENT} == RECURRENT
    assert not {"Gather", "Scatter", "store"} & found.keys()
    assert found.total() <= RECURRENT_ON_METAL
