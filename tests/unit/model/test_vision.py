"""What a folder's part for images needs in order to be served, and what is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_tandem.config import ModelConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model.loader import LoadedModel, load_unread
from mlx_tandem.model.vision import library
from mlx_tandem.model.vision.embeddings import AxisPositions
from tests import tiny_vision

installed = pytest.mark.skipif(not library.is_installed(), reason="mlx-vlm is not installed")


def load(folder: Path, **settings: bool) -> LoadedModel:
    return load_unread(ModelConfig(str(folder), **settings), lambda stage, fraction: None)


def refusal(model: LoadedModel) -> str:
    assert model.encoder is None and model.vision is not None
    return model.vision.refusal


@installed
def test_no_more_of_mlx_vlm_is_imported_than_a_family() -> None:
    code = """
import sys
import mlx_tandem.model
from mlx_tandem.model.vision import library
from mlx_tandem.model.vision.embeddings import AxisPositions
assert library.family("pixtral").Model
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"transformers", "fastapi", "datasets", "cv2"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@installed
def test_without_its_weights_a_part_for_images_leaves_a_text_model(tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model", "llava")
    assert load(folder).encoder is not None
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    mx.save_safetensors(str(file), {name: w for name, w in weights.items() if "projector" not in name})
    assert "cannot be loaded (ValueError: Missing 4 parameters" in refusal(load(folder))


@installed
def test_a_folder_without_a_placeholder_is_a_text_model(tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model", "pixtral")
    config = json.loads((folder / "config.json").read_text())
    del config["image_token_index"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "image_token_index is missing" in refusal(load(folder))


@installed
@pytest.mark.parametrize(
    ("part", "values", "what"),
    [
        ("vision_config", {"num_heads": 10**12}, "config.json: vision_config.num_heads must be an integer from 1"),
        ("rope_scaling", {"mrope_section": [2, 3, 10**12]}, "config.json: rope_scaling.mrope_section must be"),
        (
            "rope_scaling",
            {"type": "default", "mrope_section": [2, 3, 2, 1]},
            "mrope_section of the language model's ropes must have 3",
        ),
    ],
)
def test_a_number_out_of_its_range_leaves_a_text_model(
    part: str, values: dict[str, object], what: str, tmp_path: Path
) -> None:
    folder = tiny_vision.make(tmp_path / "model", "qwen2_vl")
    config = json.loads((folder / "config.json").read_text())
    config[part] |= values
    (folder / "config.json").write_text(json.dumps(config))
    assert what in refusal(load(folder))


@installed
def test_images_whose_tokens_see_later_ones_are_refused_by_the_setting(tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model", "gemma4")
    assert load(folder).encoder is not None
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = "vision"
    (folder / "config.json").write_text(json.dumps(config))
    assert "use_bidirectional_attention is 'vision'" in refusal(load(folder))


@installed
def test_a_part_for_sound_is_left_out(tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model", "gemma4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"audio_config": {"hidden_size": 16}}))
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    weights |= {"model.audio_tower.layers.0.weight": mx.zeros((2, 2)), "model.embed_audio.weight": mx.zeros((2, 2))}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    model = load(folder)
    assert model.encoder is not None, refusal(model)
    assert not any("audio" in name for name, _ in tree_flatten(model.encoder.module.parameters()))


@installed
def test_axes_that_are_not_those_of_the_ropes_are_refused(tmp_path: Path) -> None:
    model = load(tiny_vision.make(tmp_path / "model", "qwen2_vl"))
    AxisPositions(model.module, [0] * 8)
    with pytest.raises(ModelError, match="mrope_section must add up to 8"):
        AxisPositions(model.module, [0] * 7)


@installed
def test_images_can_be_turned_off(tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model", "llava")
    assert "--no-images" in refusal(load(folder, images=False))
    assert "random weights" in refusal(load(folder, random_weights=True))


@installed
def test_without_mlx_vlm_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_vision.make(tmp_path / "model", "llava")
    monkeypatch.setattr(library, "is_installed", lambda: False)
    assert "pip install -e '.[vision]'" in refusal(load(folder))


def test_a_text_model_has_no_part_for_images(tmp_path: Path) -> None:
    from tests import tiny_models

    model = load(tiny_models.make(tmp_path / "model", "llama"))
    assert model.encoder is None and model.vision is None
