"""Linears of one input as one product: the same numbers, the same memory, and nothing left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_tandem.config import LoraConfig, ModelConfig
from mlx_tandem.model.loader import load
from mlx_tandem.model.modules import clone
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.ops.products.merged import MOST_TOKENS, Merged, merge, merged_in
from mlx_tandem.model.targets import find_groups
from tests import tiny_models
from tests.engine.test_lora import adapter

FAMILIES = [("llama", 0), ("qwen2", 0), ("qwen3", 4), ("qwen3_moe", 0), ("phi3", 0)]


def prepared(folder: Path, family: str, bits: int) -> Any:
    return load(ModelConfig(str(tiny_models.make(folder / family, family, bits=bits or None))), lambda *_: None).module


@pytest.mark.parametrize(("family", "bits"), FAMILIES)
def test_a_model_says_what_it_said(tmp_path: Path, family: str, bits: int) -> None:
    tokens = mx.array(np.random.default_rng(0).integers(3, tiny_models.VOCAB, (3, 7)))
    model = prepared(tmp_path, family, bits)
    before, names = model(tokens), [name for name, _ in tree_flatten(model.parameters())]
    mx.eval(before)
    groups = find_groups(model)
    merged = merge(groups)
    twin: Any = clone(model)
    assert sorted(name for name, _ in tree_flatten(model.parameters())) == sorted(names)
    assert len(merged) == sum(len(group) > 1 for group in groups)
    for each in (model, twin):
        assert np.abs(np.array(each(tokens) - before)).max() <= 1e-5
    assert all(not each._ready for each in merged)
    long = mx.broadcast_to(tokens[:1, :1], (1, MOST_TOKENS + 1))
    assert np.isfinite(np.array(model(long)[0, -1])).all()


def test_each_part_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(tmp_path, "llama", 0)
    merged = merge(find_groups(model))
    calls: list[Merged] = []
    whole = Merged.whole
    monkeypatch.setattr(Merged, "whole", lambda self, x: (calls.append(self), whole(self, x))[1])
    model(mx.array([[5, 6]]))
    assert sorted(map(id, calls)) == sorted(map(id, merged))


def test_weights_take_no_more_memory(tmp_path: Path) -> None:
    model = prepared(tmp_path, "llama", 0)
    mx.eval(model.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    merged = merge(find_groups(model))
    assert merged
    mx.clear_cache()
    assert mx.get_active_memory() <= before + 4096 * len(merged)


def test_parts_are_computed_once_with_an_adapter_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step in which all rows have the same, whose products are made in two dimensions."""
    model = prepared(tmp_path, "llama", 0)
    merged = merge(find_groups(model))
    lora = LoraState(model, LoraConfig(max_loras=1, backend="gather"), mx.float32)
    lora.install(1, adapter(lora.linears(), 4, 0))
    calls: list[Merged] = []
    whole = Merged.whole
    monkeypatch.setattr(Merged, "whole", lambda self, x: (calls.append(self), whole(self, x))[1])
    route = lora.route([1, 1], 3)
    assert route.layout.kind == "uniform"
    lora.bind(route.arrays, None if route.ids is None else mx.array(route.ids), route.layout)
    model(mx.array([[5, 6, 7], [8, 9, 10]]))
    lora.unbind()
    assert sorted(map(id, calls)) == sorted(map(id, merged))
    assert merged_in(model) and all(not each._ready for each in merged_in(model))
