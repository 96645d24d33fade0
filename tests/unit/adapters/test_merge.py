"""Merging an adapter into the weights of its base model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from mlx_tandem import demo
from mlx_tandem.adapters.formats import loading
from mlx_tandem.adapters.formats.header import Tensor
from mlx_tandem.adapters.merge import _encoded, merge
from mlx_tandem.errors import ModelError
from tests.serving import demo_config, serving

PATH = "model.layers.0.self_attn.q_proj"


def model(folder: Path, dtype: type[np.generic] = np.float16, **settings: object) -> Path:
    """Write a model folder with one linear of 3 inputs and 2 outputs, and what lies around it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", **settings}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    tensors = {
        f"{PATH}.weight": np.array([[1, 2, 3], [4, 5, 6]], dtype),
        "model.embed_tokens.weight": np.ones((4, 3), dtype),
        "model.norm.weight": np.ones(3, dtype),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    return folder


def adapter(folder: Path, b: float = 1.0, path: str = PATH, **changes: object) -> Path:
    """Write an adapter of rank 1 for the linear: A is (1, 10, 100), B is (b, 2 b), and the scale 2."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"], **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{path}.lora_A.weight": np.array([[1, 10, 100]], np.float32),
        f"base_model.model.{path}.lora_B.weight": np.array([[b], [2 * b]], np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_the_delta_is_added_and_everything_else_stays(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    assert merge(adapter(tmp_path / "adapter"), base, tmp_path / "out") == [PATH]
    found, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(base / "model.safetensors")
    assert found[f"{PATH}.weight"].tolist() == [[3, 22, 203], [8, 45, 406]]
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in before.items()}
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert found[name].tobytes() == before[name].tobytes()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    head = (tmp_path / "out" / "model.safetensors").read_bytes()[8:200]
    assert b'"format":"mlx"' in head


def test_the_factor_multiplies_the_adapters_own_scale(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty folder will do
    merge(adapter(tmp_path / "adapter"), model(tmp_path / "base", np.float32), tmp_path / "out", -0.5)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found[f"{PATH}.weight"].tolist() == [[0, -8, -97], [2, -15, -194]]


@pytest.mark.parametrize(
    ("settings", "changes", "says"),
    [
        ({"quantization": {"bits": 4}}, {}, "config.json: quantization is set"),
        ({"quantization_config": {"bits": 4}}, {}, "config.json: quantization_config is set"),
        ({}, {"path": "lm_head"}, "adapts 'lm_head', which the served model does not have"),
        ({}, {"path": "model.embed_tokens"}, "which the served model does not have or cannot adapt"),
        ({}, {"b": 1000.0}, f"{PATH}.weight has sums that are too large for F16"),
        ({}, {"use_dora": True}, "use_dora"),
        ({}, {"alora_invocation_tokens": [1]}, "is an activated LoRA"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, settings: dict[str, object], changes: dict[str, object], says: str
) -> None:
    base, other = model(tmp_path / "base", **settings), adapter(tmp_path / "adapter", **changes)  # type: ignore[arg-type]
    with pytest.raises(ModelError) as refused:
        merge(other, base, tmp_path / "out")
    assert says in refused.value.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    base, other = model(tmp_path / "base"), adapter(tmp_path / "adapter")
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        merge(other, base, base)
    (base / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no file of weights that ends in \.safetensors"):
        merge(other, base, tmp_path / "out")
    (base / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        merge(other, base, tmp_path / "out")


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    tensor = Tensor("BF16", (5,), 0)
    one = np.float32(1.0)
    step = np.float32(2.0**-7)  # between neighbours at 1
    values = np.array([one, one + step / 2, one + step * 1.5, one + step * 0.51, -one - step * 0.49], np.float32)
    raw = np.frombuffer(_encoded(values, tensor, "f", "t"), np.uint8)
    assert loading.decode(raw, tensor).tolist() == [1.0, 1.0, 1.0 + 2 * step, 1.0 + step, -1.0]
    with pytest.raises(ModelError, match="too large for BF16"):
        _encoded(np.array([3.4e38], np.float32), Tensor("BF16", (1,), 0), "f", "t")


@pytest.mark.restarts
def test_a_merged_model_answers_as_its_adapter_does(tmp_path: Path) -> None:
    assert merge(demo.ADAPTER_PATHS["shout"], demo.MODEL_PATH, tmp_path / "out")
    with serving(replace(demo_config(tmp_path / "out"), adapters=())) as server:
        reply = server.chat("What is 12 + 5?", temperature=0)
        assert reply.json()["choices"][0]["message"]["content"] == "12 + 5 = 17!"
