"""What an image takes in a prompt, compared with what the families' processors in transformers write for it."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import load

from mlx_tandem.generation.vision.decoding import BadImage
from mlx_tandem.generation.vision.layouts import family_of
from mlx_tandem.generation.vision.messages import Failed, Job, Made, Setup
from mlx_tandem.generation.vision.processors import PROCESSORS
from mlx_tandem.generation.vision.worker import Worker
from mlx_tandem.isolation.frames import encode
from mlx_tandem.limits import MAX_IMAGE_TOKENS
from mlx_tandem.model_folder import VISION_FAMILIES
from tests.images import picture

SIZES = ((96, 64), (64, 200), (1, 1), (3, 1), (333, 332))
TOWER = {"vision_config": {"model_type": "clip_vision_model", "patch_size": 14}}
SMALL = {"size": {"height": 56, "width": 56}}
FOLDERS = {
    "llava": Setup("llava", TOWER, {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}, {}),
    "gemma3": Setup("gemma3", TOWER, SMALL | {"do_pan_and_scan": None}, {"image_seq_length": 4}),
    "gemma4": Setup("gemma4", TOWER, {"max_soft_tokens": 70}, {}),
    "pixtral": Setup("pixtral", TOWER, {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 160}}, {}),
    "mistral3": Setup(
        "mistral3",
        TOWER,
        {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 14, "size": {"longest_edge": 160}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "internvl_chat": Setup(
        "internvl_chat",
        {"force_image_size": 56, "vision_config": {"patch_size": 14}, "max_dynamic_patch": 6, "downsample_ratio": 0.5},
        {"feature_extractor_type": "CLIPFeatureExtractor", "crop_size": 448},
        {},
    ),
    "idefics3": Setup(
        "idefics3",
        TOWER,
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        {"image_seq_len": 5},
    ),
    "smolvlm": Setup(
        "smolvlm",
        TOWER,
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        {"image_seq_len": 5},
    ),
    "qwen2_vl": Setup("qwen2_vl", TOWER, {"min_pixels": 3136, "max_pixels": 28 * 28 * 40}, {}),
    "qwen2_5_vl": Setup("qwen2_5_vl", TOWER, {"min_pixels": 3136, "max_pixels": 28 * 28 * 40}, {}),
    **{
        family: Setup(
            family, TOWER, {"size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 40}, "patch_size": 16}, {}
        )
        for family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    },
}
"""The parts of folders of each family, with small images."""

NAMES = {
    "image_token": "<image>",
    "boi_token": "<start_of_image>",
    "full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
    "global_image_token": "<global-img>",
    "image_seq_length": 3,
    "image_seq_len": 5,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
"""What transformers' processors know by their tokenizers and settings."""


def expected(family: str, setup: Setup, arrays: dict[str, Any]) -> str:
    """The text that transformers' processor of the family writes for an image."""
    if family in ("pixtral", "mistral3"):  # Its module needs PyTorch. This is what it writes.
        side = {"pixtral": 16, "mistral3": 28}[family]
        height, width = (int(n) // side for n in arrays["image_sizes"][0])
        return "".join((["[IMG]"] * width + ["[IMG_BREAK]"]) * height).removesuffix("[IMG_BREAK]") + "[IMG_END]"
    package = {"qwen2_5_vl": "qwen2_vl", "internvl_chat": "internvl"}.get(family, family)
    if family in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        package = "qwen3_vl"
    module = import_module(f"transformers.models.{package}.processing_{package}")
    (name,) = (n for n in module.__all__ if n.endswith("Processor"))
    own = NAMES | {
        "image_token": family_of(setup).token,
        "patch_size": 14,
        "image_processor": SimpleNamespace(merge_size=2),
    }
    if family == "gemma4":
        own |= {"boi_token": "<|image>", "eoi_token": "<image|>"}
    if family == "internvl_chat":
        own["image_seq_length"] = 4
    return getattr(module, name).replace_image_token(SimpleNamespace(**own), arrays, 0)


@pytest.fixture(scope="module", params=FOLDERS)
def worker(request: pytest.FixtureRequest) -> Worker:
    return Worker(FOLDERS[request.param], 60.0)


@pytest.mark.parametrize("count", [-1, 10**10])
def test_a_folder_cannot_ask_for_any_number_of_tokens(count: int) -> None:
    worker = Worker(structs.replace(FOLDERS["gemma3"], processor={"image_seq_length": count}), 60.0)
    answer = worker.answer(encode(Job(picture(40, 20), False)))
    assert isinstance(answer, Failed) and "no possible number of tokens" in answer.why


def test_an_image_takes_what_it_takes_in_transformers(worker: Worker) -> None:
    setup = worker._setup
    family, seen = family_of(setup), set()
    for size in SIZES:
        arrays = worker._processor(worker_image(size))
        layout = family.layout(setup, worker._processor.patch, worker._processor.merge, arrays)
        assert layout.text.count(family.token) == len(layout.runs)
        first, *rest = layout.text.split(family.token)
        text = first + "".join(family.token * run + piece for run, piece in zip(layout.runs, rest, strict=True))
        assert text == expected(setup.family, setup, arrays)
        if "pixel_attention_mask" in arrays:  # which the engine is not given
            assert arrays["pixel_attention_mask"].all()
        seen.add(sum(layout.runs))
    assert len(seen) > 1 or setup.family in ("llava", "gemma3")


def worker_image(size: tuple[int, int]) -> Any:
    from mlx_tandem.generation.vision.decoding import decoded

    return decoded(picture(*size))


def test_the_same_image_has_the_same_digest_and_another_one_another(worker: Worker) -> None:
    answers = [worker.answer(encode(Job(picture(*size), False))) for size in ((96, 64), (96, 64), (64, 96))]
    assert all(isinstance(answer, Made) for answer in answers)
    first, same, other = (answer.digest for answer in answers if isinstance(answer, Made))
    assert first == same != other
    assert isinstance(answers[0], Made)
    assert "pixel_values" in load(answers[0].arrays)


def test_every_family_has_a_processor_and_a_folder_here() -> None:
    assert set(VISION_FAMILIES) == set(FOLDERS)
    assert {family.processor for family in VISION_FAMILIES.values()} <= set(PROCESSORS)


def test_an_image_has_a_bounded_number_of_tokens() -> None:
    worker = Worker(Setup("qwen2_vl", TOWER, {"min_pixels": 4, "max_pixels": 10**9}, {}), 60.0)
    answer = worker.answer(encode(Job(picture(3000, 2000, "JPEG"), False)))
    assert isinstance(answer, Made)
    assert MAX_IMAGE_TOKENS * 0.9 < sum(answer.runs) <= MAX_IMAGE_TOKENS


def test_an_image_is_no_larger_than_the_positions_of_pixtrals_encoder_reach() -> None:
    tower = {"vision_config": {"model_type": "pixtral", "image_size": 64, "patch_size": 16}}
    worker = Worker(Setup("pixtral", tower, {"patch_size": 16, "size": {"longest_edge": 1024}}, {}), 60.0)
    answer = worker.answer(encode(Job(picture(200, 300), False)))
    assert isinstance(answer, Made)
    assert load(answer.arrays)["pixel_values"].shape[-2:] == (64, 48)


def test_of_the_equal_frames_of_a_patch_one_is_sent() -> None:
    """It is the one from which all values of transformers' own processor follow."""
    worker = Worker(FOLDERS["qwen3_5"], 60.0)
    image = worker_image((96, 64))
    whole = worker._processor._processor(
        images=[np.asarray(image)], input_data_format="channels_last", return_tensors="np"
    )["pixel_values"]
    one = worker._processor(image)["pixel_values"]
    assert one.shape == (len(whole), 3 * 16 * 16)
    by_channel = one.reshape(len(one), 3, 16 * 16)
    assert np.array_equal(whole.reshape(len(whole), 3, 2, 16 * 16), np.stack([by_channel, by_channel], axis=2))


def test_a_line_is_refused() -> None:
    with pytest.raises(BadImage, match="times as long"):
        worker_image((402, 2))
