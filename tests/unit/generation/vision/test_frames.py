"""Frames become the arrays that mlx-vlm and transformers make of them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL.Image import Image

from mlx_tandem.generation.vision.decoding import decoded
from mlx_tandem.generation.vision.frames import FrameProcessor, StillProcessor, fitted, frame_processor
from mlx_tandem.generation.vision.messages import Failed, GroupJob, Job, Made, Setup
from mlx_tandem.generation.vision.worker import Worker
from mlx_tandem.isolation.frames import encode
from mlx_tandem.limits import MAX_FRAMES, MAX_IMAGE_TOKENS, MAX_VIDEO_TOKENS
from mlx_tandem.model.vision import library
from tests.images import picture

QWEN2 = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 40}
QWEN3 = {"size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 400}, "patch_size": 16}


def processor(family: str, values: dict[str, Any]) -> FrameProcessor:
    return FrameProcessor(Setup(family, {}, {}, {}, values))


def frames(count: int, width: int, height: int) -> list[Image]:
    """Frames of noise that differ."""
    whole = decoded(picture(width, height * count))
    return [whole.crop((0, n * height, width, (n + 1) * height)) for n in range(count)]


@pytest.fixture(scope="module")
def reference() -> Any:
    """mlx-vlm's video processor of Qwen 3 VL, which needs no PyTorch either."""
    if not library.is_installed():
        pytest.skip("mlx-vlm is not installed")
    library.family("qwen3_vl")
    sys.modules.pop("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    return import_module("mlx_vlm.models.qwen3_vl.processing_qwen3_vl").Qwen3VLVideoProcessor


@pytest.mark.parametrize(("count", "group"), [(1, 2), (2, 2), (6, 2), (5, 3)])
@pytest.mark.parametrize(("width", "height"), [(96, 64), (333, 200)])
def test_groups_are_what_mlx_vlm_makes_of_a_video(
    count: int, group: int, width: int, height: int, reference: Any
) -> None:
    own, video = processor("qwen3_vl", QWEN3 | {"temporal_patch_size": group}), frames(count, width, height)
    groups = [own(video[first : first + group], count) for first in range(0, count, group)]
    least, most = QWEN3["size"]["shortest_edge"], QWEN3["size"]["longest_edge"]  # type: ignore[index]
    whole = reference(min_pixels=least, max_pixels=most, temporal_patch_size=group)([video])
    assert whole["video_grid_thw"].tolist() == [[len(groups), *groups[0]["video_grid_thw"][0, 1:]]]
    pixels = np.concatenate([group["pixel_values_videos"] for group in groups])
    assert np.allclose(pixels, whole["pixel_values_videos"], atol=1e-6)


SIDES = st.integers(1, 2000)


@given(SIDES, SIDES, st.integers(1, 64), st.integers(1, 2048))
def test_frames_of_qwen_2_are_scaled_as_transformers_scales_each(
    height: int, width: int, least: int, most: int
) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    # This import takes seconds, and runs of other tests collect this module too.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    limits = least * 784, max(least, most) * 784
    assert fitted(height, width, 28, *limits) == smart_resize(height, width, 28, *limits)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize(("least", "most"), [(4, 1 << 30), (1 << 29, 1 << 30)])
def test_a_video_has_a_bounded_number_of_tokens(family: str, least: int, most: int) -> None:
    """Whatever the folder's limits are. A size that is rounded up may exceed the bounds by one row of tokens."""
    own = processor(family, {"min_pixels": least, "max_pixels": most})
    for width, height in ((1920, 1080), (1, 1), (30, 400)):
        for count in (1, 2, 7, MAX_FRAMES):
            high, wide = own.resized(height, width, count)
            side = 32 if family == "qwen3_vl" else 28
            tokens = (high // side) * (wide // side)
            assert high % side == wide % side == 0 < tokens
            assert tokens <= 1.1 * MAX_IMAGE_TOKENS and tokens * -(-count // 2) <= 1.2 * MAX_VIDEO_TOKENS


def test_frames_of_gemma_4_are_what_mlx_vlm_makes_of_a_video() -> None:
    if not library.is_installed():
        pytest.skip("mlx-vlm is not installed")
    library.family("gemma4")
    sys.modules.pop(name := "mlx_vlm.models.gemma4.processing_gemma4")
    video = frames(3, 200, 120)
    whole = import_module(name).Gemma4VideoProcessor()([np.stack([np.asarray(f).transpose(2, 0, 1) for f in video])])
    own = frame_processor(Setup("gemma4", {}, {}, {}, {}))
    assert isinstance(own, StillProcessor)
    made = [own([frame], 3) for frame in video]
    assert np.allclose(np.stack([m["pixel_values"][0] for m in made]), whole["pixel_values_videos"][0], atol=1e-6)
    assert np.array_equal(np.stack([m["image_position_ids"][0] for m in made]), whole["video_position_ids"][0])
    assert [own.tokens(m) for m in made] == whole["num_soft_tokens_per_frame"] * 3
    assert frame_processor(Setup("llava", {}, {}, {}, {})) is None


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(Setup("qwen2_vl", {"vision_config": {}}, {}, {}, QWEN2), 60.0)


def job(*files: bytes, count: int = 4) -> bytes:
    return encode(GroupJob([Job(file, False) for file in files], count))


def test_a_group_has_one_digest_and_its_order_another(worker: Worker) -> None:
    one, other = picture(56, 56), picture(56, 56, "JPEG")
    answers = [worker.answer(job(*files)) for files in ((one, other), (one, other), (other, one), (one, one), (one,))]
    first, again, turned, twice, padded = (answer.digest for answer in answers if isinstance(answer, Made))
    assert first == again and twice == padded and len({first, turned, twice}) == 3
    assert isinstance(answers[0], Made)
    assert (answers[0].runs, answers[0].size) == ([4], (56, 56))


def test_a_frame_of_gemma_4_is_an_image_of_fewer_tokens() -> None:
    worker = Worker(Setup("gemma4", {"vision_config": {}}, {}, {}, {}), 60.0)
    image, frame = worker.answer(encode(Job(picture(96, 64), False))), worker.answer(job(picture(96, 64), count=9))
    assert isinstance(image, Made) and isinstance(frame, Made)
    assert sum(frame.runs) <= 70 < sum(image.runs) <= 280 and frame.size == (96, 64)


@pytest.mark.parametrize(
    ("files", "frame", "why"),
    [
        ((picture(56, 56), picture(56, 28)), 1, "another size"),
        ((picture(56, 56), b"no image"), 1, "is no PNG"),
        ((picture(402, 2), picture(56, 28)), 0, "times as long"),
    ],
)
def test_a_frame_that_cannot_be_used_is_numbered(
    files: tuple[bytes, ...], frame: int, why: str, worker: Worker
) -> None:
    answer = worker.answer(job(*files))
    assert isinstance(answer, Failed) and (answer.frame, why in answer.why) == (frame, True)
