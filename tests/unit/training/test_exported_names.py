"""The names under which a trained adapter of a vision model is written."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import load_file

from mlx_tandem.adapters import formats
from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.engine.learning import TrainerSpec
from mlx_tandem.training.device.trained_adapter import TrainedAdapter

LINEARS = {
    f"language_model.model.layers.{i}.self_attn.{name}_proj": LinearShape(8, 16) for i in range(2) for name in "qv"
}


def test_a_vision_models_adapter_has_the_names_of_transformers(tmp_path: Path) -> None:
    adapter = TrainedAdapter.fresh(TrainerSpec("mine", 4, 8.0), LINEARS)
    published = adapter.publish()()
    adapter.snapshot()(str(tmp_path))
    names = load_file(tmp_path / "adapter_model.safetensors")
    for path in LINEARS:
        inner = path.removeprefix("language_model.model.")
        assert f"base_model.model.model.language_model.{inner}.lora_A.weight" in names
    assert len(names) == 2 * len(LINEARS)
    read = formats.read(tmp_path, LINEARS, max_rank=8, base_layers=2)
    assert read.info.digest == published.info.digest
    assert read.tensors.keys() == LINEARS.keys()
