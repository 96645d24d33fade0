"""The numbers of a folder's part for images have bounds, and an error names the file and the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.errors import ModelError
from mlx_tandem.generation.vision.client import IMAGE_PROCESSOR, PROCESSOR, VIDEO_PROCESSOR, Images
from mlx_tandem.model_folder import (
    CONFIG,
    TEXT_PARTS,
    VISION_FAMILIES,
    check_processor,
    check_text,
    check_vision,
    text_settings,
)
from tests.images import vision_folder

HUGE = 10**12
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    (CONFIG, {"vision_config": {"patch_size": HUGE}}, "vision_config.patch_size must be an integer from 1"),
    (CONFIG, {"vision_config": {"image_size": [224, 0]}}, "vision_config.image_size"),
    (CONFIG, {"vision_config": {"image_size": 4097, "patch_size": 4}}, "vision_config.image_size must be at most 1024"),
    (CONFIG, {"vision_config": {"hidden_size": "wide"}}, "vision_config.hidden_size"),
    (
        CONFIG,
        {"vision_config": {"image_size": [64, 4097], "patch_size": [4, 8]}},
        "vision_config.image_size must be at",
    ),
    (CONFIG, {"vision_config": {"image_size": 14 * 1024 + 1}}, "vision_config.image_size must be at most 1024"),
    (CONFIG, {"force_image_size": 4097, "vision_config": {"patch_size": 4}}, "force_image_size must be at most 1024"),
    (CONFIG, {"vision_config": {"depth": HUGE}}, "vision_config.depth"),
    (CONFIG, {"vision_config": {"spatial_merge_size": 0}}, "vision_config.spatial_merge_size"),
    (CONFIG, {"vision_config": {"deepstack_visual_indexes": [0, -1]}}, "vision_config.deepstack_visual_indexes"),
    (CONFIG, {"vision_config": {"mlp_ratio": float("inf")}}, "vision_config.mlp_ratio must be a number from 0.01"),
    (CONFIG, {"downsample_ratio": -0.5}, "downsample_ratio"),
    (CONFIG, {"force_image_size": HUGE}, "force_image_size"),
    (CONFIG, {"rope_scaling": {"mrope_section": [HUGE, 1, 1]}}, "rope_scaling.mrope_section"),
    (
        CONFIG,
        {"text_config": {"rope_parameters": {"mrope_section": [1, 1, -1]}}},
        "text_config.rope_parameters.mrope_section",
    ),
    (IMAGE_PROCESSOR, {"size": {"height": HUGE, "width": 14}}, "size.height must be an integer from 1"),
    (IMAGE_PROCESSOR, {"size": {"longest_edge": 0}}, "size.longest_edge"),
    (IMAGE_PROCESSOR, {"max_pixels": HUGE}, "max_pixels"),
    (IMAGE_PROCESSOR, {"merge_size": 0}, "merge_size"),
    (IMAGE_PROCESSOR, {"image_std": [0.5, 0.0, 0.5]}, "image_std must be a number from"),
    (PROCESSOR, {"image_seq_length": HUGE}, "image_seq_length"),
    (PROCESSOR, {"patch_size": "14"}, "patch_size"),
]


@pytest.mark.parametrize(("file", "values", "what"), FAULTS)
def test_a_number_out_of_its_range_is_named(file: str, values: dict[str, Any], what: str) -> None:
    check = check_vision if file == CONFIG else check_processor
    with pytest.raises(ModelError) as refused:
        check(values, file)
    assert refused.value.message.startswith(f"{file}: {what}")


TEXT_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"vocab_size": 0}, "vocab_size", "must be an integer from 1 to 16,777,216"),
    ({"num_hidden_layers": 1.5}, "num_hidden_layers", "must be an integer from 1 to 1,024"),
    ({"rope_theta": True}, "rope_theta", "must be a number from 0.001"),
    ({"num_key_value_heads": [4, None, 0]}, "num_key_value_heads", "must be an integer from 1"),
    ({"text_config": {"hidden_size": HUGE}}, "text_config.hidden_size", "must be an integer from 1"),
    ({"llm_config": {"head_dim": -1}}, "llm_config.head_dim", "must be an integer from 1"),
    ({"text_config": {}, "llm_config": {"head_dim": -1}}, "llm_config.head_dim", "must be an integer from 1"),
    ({"quantization": {"bits": 33}}, "quantization.bits", "must be an integer from 1 to 32"),
    ({"quantization": {"group_size": 0}}, "quantization.group_size", "must be an integer from 1"),
    *(
        ({field: [1]}, field, "must be an object")
        for field in (*TEXT_PARTS, "vision_config", "quantization", "quantization_config", "rope_scaling")
    ),
]


@pytest.mark.parametrize(("values", "field", "what"), TEXT_FAULTS)
def test_a_fault_of_the_language_model_is_named(values: dict[str, Any], field: str, what: str) -> None:
    with pytest.raises(ModelError) as refused:
        check_text(values, CONFIG)
    assert refused.value.param == field
    assert refused.value.message.startswith(f"{CONFIG}: {field} {what}")


def test_what_other_programs_write_into_a_folder_is_left_to_them() -> None:
    """Only mlx-lm's own key of a quantization is read, and null is absent."""
    check_text(
        {"quantization_config": {"bits": 1000}, "quantization": None, "head_dim": None, "text_config": {}}, CONFIG
    )


@pytest.mark.parametrize(("file", "values", "what"), [FAULTS[0], FAULTS[15], FAULTS[20]])
def test_the_front_refuses_images_by_the_field(file: str, values: dict[str, Any], what: str, tmp_path: Path) -> None:
    folder, _ = vision_folder(tmp_path)
    assert Images(folder).family is not None
    path = folder / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))
    images = Images(folder)
    assert images.family is None
    assert images.refusal(None).startswith(f"images are not served: {file}: {what}")


def test_a_processor_within_another_file_is_named_by_its_place(tmp_path: Path) -> None:
    folder, _ = vision_folder(tmp_path)
    (folder / IMAGE_PROCESSOR).unlink()
    (folder / PROCESSOR).write_text(json.dumps({"image_processor": {"patch_size": HUGE}}))
    assert f"{PROCESSOR}: image_processor.patch_size must be" in Images(folder).refusal(None)


def test_the_video_processor_is_read_from_the_first_place_that_has_it(tmp_path: Path) -> None:
    """The later a file is written here, the earlier it is read."""
    folder, _ = vision_folder(tmp_path)
    for file, values, fps in (
        (IMAGE_PROCESSOR, {"fps": 3}, 3.0),
        (VIDEO_PROCESSOR, {"fps": 4, "temporal_patch_size": [1]}, 4.0),
        (PROCESSOR, {"video_processor": {"fps": 5}}, 5.0),
    ):
        (folder / file).write_text(json.dumps(values))
        videos = Images(folder).videos
        assert videos is not None and (videos.rate, videos.frames) == (fps, 2)
    (folder / PROCESSOR).write_text(json.dumps({"video_processor": {"fps": HUGE}}))
    assert f"{PROCESSOR}: video_processor.fps must be" in Images(folder).refusal(None)
    (folder / PROCESSOR).unlink()
    (folder / VIDEO_PROCESSOR).write_text(json.dumps({"temporal_patch_size": 0}))
    assert f"{VIDEO_PROCESSOR}: temporal_patch_size must be" in Images(folder).refusal(None)


def test_parts_that_are_no_objects_are_left_to_the_engine(tmp_path: Path) -> None:
    """It refuses the whole folder."""
    folder, _ = vision_folder(tmp_path)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"text_config": [1], "rope_scaling": 3}))
    assert Images(folder).family is not None


def test_the_documentation_lists_the_families() -> None:
    table = Path("docs/vision.md").read_text().partition("| `model_type` |")[2]
    names = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    assert sorted(names) == sorted(VISION_FAMILIES)


def test_the_language_part_has_one_of_two_names_or_none() -> None:
    text = {"hidden_size": 8}
    for settings in ({"text_config": text}, {"llm_config": text}, {"text_config": None, "llm_config": text}, text):
        assert text_settings(settings) == text
