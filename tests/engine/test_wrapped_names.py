"""Every linear of every served family with a wrapped language model is found by the names that PEFT writes."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlx_tandem.adapters.formats.parts import Modules, inner_path
from mlx_tandem.config import LoraConfig
from mlx_tandem.model.ops.lora.state import LoraState
from tests import tiny_models
from tests.tiny_families import WRAPPED

WRAPPERS = ("model.language_model.", "language_model.model.", "model.", "model.text_model.", "language_model.", "")


@pytest.mark.parametrize("family", WRAPPED)
def test_each_name_stands_for_one_linear(tmp_path: Path, family: str) -> None:
    model, _ = load_model(tiny_models.make(tmp_path, family), strict=False)
    state = LoraState(model, LoraConfig(), mx.float32)
    linears = {**state.linears(), **state.head()}
    modules = Modules(linears, 2, linears)
    assert any(path.startswith("language_model.model.layers.") for path in linears)
    for path in linears:
        for wrapper in WRAPPERS:
            assert list(modules.paths(wrapper + inner_path(path))) == [path]
        assert not modules.paths(f"model.vision_tower.{path}") and not modules.paths(f"visual.{inner_path(path)}")
