"""The number of operations of a decoding layer on CUDA, each of which costs the host time at every launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.model.attention.fused import Fused
from mlx_tandem.model.cache import inplace
from mlx_tandem.model.kernel_checks import lora
from mlx_tandem.model.kernels import dialect
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


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shim computes at once, and MLX's CPU back end has no adapters in 16 bits to compare with."""
    monkeypatch.setattr(lora, "_TOKENS", (1, 16))
    monkeypatch.setattr(lora, "_times", lambda *_: (0.0, 1.0))
    mx.disable_compile()
    yield
    mx.enable_compile()
    inplace.writing.cache_clear()


def operations(folder: Path, layers: int, slots: tuple[int, ...], patch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the operations of a step of two rows in these slots, by name."""
    gpu = fake.install("cuda", shim.maker(), patch)
    fake.time_by_clock(gpu, patch)
    made = make_engine(
        tiny_models.make(folder / str(layers), "qwen3", num_hidden_layers=layers),
        dtype="bfloat16",
        attention_backend="cuda",
        backends=[Fused("cuda", dialect.maker("cuda"))],
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
            counts.append(operations(tmp_path, layers, slots, patch))
    assert counts[1] - counts[0] == Counter(expected)
