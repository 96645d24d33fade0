"""The video processors, which turn frames into arrays as those of transformers do, but without PyTorch.

In the Qwen families the frames of a group become one patch in time, and the encoders compute each group by itself. In
Gemma 4 a group is one frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL.Image import Image, Resampling

from mlx_tandem.generation.vision.decoding import BadImage
from mlx_tandem.generation.vision.messages import Setup
from mlx_tandem.generation.vision.processors import class_of, one_frame, pixel_limits
from mlx_tandem.limits import MAX_IMAGE_TOKENS, MAX_VIDEO_TOKENS
from mlx_tandem.model_folder import VISION_FAMILIES

_VALUES = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")
"""Settings of a video processor that are applied to each pixel."""

_HALF = [0.5, 0.5, 0.5]


class BadFrame(BadImage):
    """The error for a frame that cannot be used. `frame` is its number within its group."""

    def __init__(self, why: str, frame: int):
        super().__init__(why)
        self.frame = frame


class StillProcessor:
    """The video processor of a folder of Gemma 4, whose frames are images with fewer tokens.

    The constructor raises the errors of transformers, of any type.
    """

    def __init__(self, setup: Setup):
        names = (*_VALUES, "patch_size", "max_soft_tokens", "pooling_kernel_size", "resample")
        values = {name: setup.video_processor[name] for name in names if setup.video_processor.get(name) is not None}
        self._processor = class_of("Gemma4ImageProcessor")(**{"max_soft_tokens": 70} | values)

    def __call__(self, frames: Sequence[Image], count: int) -> dict[str, np.ndarray]:
        """Return the arrays of a group, which is one frame. They do not depend on `count`, the video's frames."""
        (frame,) = frames
        made = self._processor(images=[np.asarray(frame)], input_data_format="channels_last", return_tensors="np")
        return {name: np.ascontiguousarray(made[name]) for name in ("pixel_values", "image_position_ids")}

    def tokens(self, arrays: dict[str, np.ndarray]) -> int:
        """Return how many placeholders the frame with these arrays has."""
        patches = int((arrays["image_position_ids"] >= 0).all(axis=-1).sum())
        return patches // int(self._processor.pooling_kernel_size) ** 2


class FrameProcessor:
    """The video processor of a folder of a Qwen family.

    The constructor raises the errors of transformers, of any type.
    """

    def __init__(self, setup: Setup):
        values = {key: value for key, value in setup.video_processor.items() if value is not None}
        # From Qwen 3 VL on, the limits on pixels are those of all frames together.
        self._together = VISION_FAMILIES[setup.family].videos == "texts"
        usual = 16 if self._together else 14
        own = {name: values[name] for name in _VALUES if name in values}
        if self._together:
            own = {"image_mean": _HALF, "image_std": _HALF} | own
        self._patch = int(values.get("patch_size", usual))
        self._merge = int(values.get("merge_size", 2))
        self._frames = int(values.get("temporal_patch_size", 2))
        self._resample = Resampling(values.get("resample", Resampling.BICUBIC))
        self._limits = pixel_limits(values, 128 * (2 * usual) ** 2, 768 * (2 * usual) ** 2)
        self._processor = class_of("Qwen2VLImageProcessor")(
            do_resize=False, patch_size=self._patch, merge_size=self._merge, temporal_patch_size=1, **own
        )

    def __call__(self, frames: Sequence[Image], count: int) -> dict[str, np.ndarray]:
        """Return the arrays of a group of RGB frames, in a video of `count` frames, as `types.Image` has them.

        If frames are missing, the last one is repeated. Raises BadFrame if a frame has another size than the first.
        """
        for number, frame in enumerate(frames):
            if frame.size != frames[0].size:
                raise BadFrame("has another size than the frame before it", number)
        width, height = frames[0].size
        height, width = self.resized(height, width, count)
        scaled = [frame.resize((width, height), self._resample) for frame in frames]
        patches = [self._patches(frame) for frame in scaled]
        patches += patches[-1:] * (self._frames - len(patches))
        pixels = np.stack([p.reshape(len(p), 3, -1) for p in patches], axis=2)
        grid = np.array([[1, height // self._patch, width // self._patch]], np.int64)
        return {"pixel_values_videos": pixels.reshape(len(pixels), -1), "video_grid_thw": grid}

    def tokens(self, arrays: dict[str, np.ndarray]) -> int:
        """Return how many placeholders the group with these arrays has."""
        return int(arrays["video_grid_thw"].prod()) // self._merge**2

    def resized(self, height: int, width: int, count: int) -> tuple[int, int]:
        """Return the height and width to which the frames of a video of `count` frames are scaled."""
        side, groups = self._patch * self._merge, math.ceil(count / self._frames)
        most = min(MAX_IMAGE_TOKENS, MAX_VIDEO_TOKENS // groups) * side**2
        least, largest = self._limits
        if not self._together:
            largest = min(largest, most)
            return fitted(height, width, side, min(least, largest), largest)
        if height < side or width < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        counted = max(round(count / self._frames), 1) * self._frames
        largest = min(largest, most * min(count, counted))
        return fitted(height, width, side, min(least, largest), largest, count, counted)

    def _patches(self, frame: Image) -> np.ndarray:
        """Return the patches of one frame [patches, channels · side · side]."""
        made = self._processor(images=[np.asarray(frame)], input_data_format="channels_last", return_tensors="np")
        return one_frame(made["pixel_values"], 1, self._patch)


def frame_processor(setup: Setup) -> FrameProcessor | StillProcessor | None:
    """Return the video processor of a folder; None if its family has no videos."""
    way = VISION_FAMILIES[setup.family].videos
    if not way:
        return None
    return StillProcessor(setup) if way == "clock" else FrameProcessor(setup)


def fitted(
    height: int, width: int, side: int, least: int, most: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Return the height and width, multiples of `side`, to which frames are scaled within limits on all frames' pixels.

    They are the multiples that are nearest to the given ones if these are within the limits. As in transformers, the
    limits are compared with the pixels of `counted` frames, and the scale is computed from those of `frames`.
    """
    high, wide = round(height / side) * side, round(width / side) * side
    if counted * high * wide > most:
        scale = math.sqrt(frames * height * width / most)
        return max(side, math.floor(height / scale / side) * side), max(side, math.floor(width / scale / side) * side)
    if counted * high * wide < least:
        scale = math.sqrt(least / (frames * height * width))
        return math.ceil(height * scale / side) * side, math.ceil(width * scale / side) * side
    return high, wide
