"""The image processors of transformers by the names that model folders use, in their variants without PyTorch.

A folder only chooses from this table and sets the processor's values: no code of the folder is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from PIL.Image import Image

from mlx_tandem.errors import ModelError
from mlx_tandem.generation.vision.decoding import BadImage
from mlx_tandem.generation.vision.messages import Setup
from mlx_tandem.limits import MAX_IMAGE_TOKENS
from mlx_tandem.model_folder import VISION_FAMILIES

PROCESSORS: Mapping[str, str] = {
    "CLIPImageProcessor": "clip",
    "SiglipImageProcessor": "siglip",
    "LlavaImageProcessor": "llava",
    "Gemma3ImageProcessor": "gemma3",
    "Gemma4ImageProcessor": "gemma4",
    "PixtralImageProcessor": "pixtral",
    "GotOcr2ImageProcessor": "got_ocr2",
    "Idefics3ImageProcessor": "idefics3",
    "SmolVLMImageProcessor": "smolvlm",
    "Qwen2VLImageProcessor": "qwen2_vl",
}
"""The package of transformers.models that has each processor."""

_NAMES = frozenset(("image_processor_type", "processor_class", "feature_extractor_type", "auto_map", "backend"))
"""Keys of a processor's configuration that choose a class, which this module does itself."""


def name_of(family: str, image_processor: Mapping[str, Any]) -> str:
    """Return the name of a folder's processor in PROCESSORS. Raises ModelError for one that is not there."""
    usual = VISION_FAMILIES[family].processor
    given = image_processor.get("image_processor_type") or usual
    if family == "internvl_chat":  # Its folders name CLIP's, which their own code does not use.
        given = usual
    name = given.removesuffix("Fast").removesuffix("Pil") if isinstance(given, str) else ""
    if name not in PROCESSORS:
        raise ModelError(f"image_processor_type {given!a} is not supported", param="image_processor_type")
    return name


def class_of(name: str) -> Any:
    """Return the class of a processor in PROCESSORS. Raises ImportError."""
    package = PROCESSORS[name]
    return getattr(import_module(f"transformers.models.{package}.image_processing_pil_{package}"), f"{name}Pil")


class Processor:
    """The image processor of a folder. The constructor raises the errors of transformers, of any type."""

    def __init__(self, setup: Setup):
        family, image_processor, processor = setup.family, setup.image_processor, setup.processor
        self.name = name_of(family, image_processor)
        values = {key: value for key, value in image_processor.items() if key not in _NAMES and value is not None}
        self._options: dict[str, Any] = {}
        match self.name:
            case "GotOcr2ImageProcessor":
                self._options["crop_to_patches"] = True
                if family == "internvl_chat":
                    values = _tiles(setup.config)
            case "Idefics3ImageProcessor" | "SmolVLMImageProcessor":
                self._options["return_row_col_info"] = True
            case "Gemma3ImageProcessor":
                self._options["do_pan_and_scan"] = False
            case "PixtralImageProcessor":
                side = _side(processor.get("patch_size") or values.get("patch_size") or 16)
                values["patch_size"] = side * int(processor.get("spatial_merge_size") or 1)
                _limit_side(values, setup.config)
            case "Qwen2VLImageProcessor":
                _limit_pixels(values)
        self._processor = class_of(self.name)(**values)
        self.patch: Any = values.get("patch_size", getattr(self._processor, "patch_size", None))
        self.merge = int(values.get("merge_size", getattr(self._processor, "merge_size", 1)))

    def __call__(self, image: Image) -> dict[str, np.ndarray]:
        """Return the arrays of an image in RGB as `types.Image` has them. Raises BadImage for one that is refused."""
        try:
            made = self._processor(
                images=[np.asarray(image)], input_data_format="channels_last", return_tensors="np", **self._options
            )
        except ValueError as e:  # Its own words, such as those about the ratio of the sides.
            raise BadImage(f"is refused by the model's processor: {str(e)[:200]}") from None
        arrays: dict[str, np.ndarray] = dict(made.items())
        if self.name == "Qwen2VLImageProcessor":
            arrays["pixel_values"] = one_frame(arrays["pixel_values"], self._processor.temporal_patch_size, self.patch)
        return {name: np.ascontiguousarray(value) for name, value in arrays.items()}


def one_frame(patches: np.ndarray, frames: int, side: int) -> np.ndarray:
    """Return the first frame of patches [patches, channels · frames · side · side], which an image repeats."""
    return patches.reshape(len(patches), -1, frames, side * side)[:, :, 0].reshape(len(patches), -1)


def _tiles(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the processor's values for a folder of `internvl_chat`: some are in config.json, others fixed."""
    tower = config.get("vision_config")
    size = config.get("force_image_size") or (tower.get("image_size") if isinstance(tower, Mapping) else None) or 448
    return {
        "size": {"height": int(size), "width": int(size)},
        "min_patches": int(config.get("min_dynamic_patch") or 1),
        "max_patches": int(config.get("max_dynamic_patch") or 12),
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


def _side(patch: Any) -> int:
    """Return the side of a patch, which is a number or an object with a height."""
    return int(patch["height"] if isinstance(patch, Mapping) else patch)


def _limit_side(values: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Lower the longest side of an image to what the positions of Pixtral's encoder reach."""
    tower, size = config.get("vision_config"), values.get("size")
    most = tower.get("image_size") if isinstance(tower, Mapping) else None
    if most:
        given = size.get("longest_edge") if isinstance(size, Mapping) else None
        values["size"] = {"longest_edge": min(int(given or most), int(most))}


def _limit_pixels(values: dict[str, Any]) -> None:
    """Lower the limit on the pixels of an image to the pixels of MAX_IMAGE_TOKENS tokens."""
    most = MAX_IMAGE_TOKENS * (int(values.get("patch_size", 14)) * int(values.get("merge_size", 2))) ** 2
    least, largest = pixel_limits(values, 56 * 56, 28 * 28 * 1280)
    for name in ("min_pixels", "max_pixels"):
        values.pop(name, None)
    values["size"] = {"shortest_edge": min(least, most), "longest_edge": min(largest, most)}


def pixel_limits(values: Mapping[str, Any], least: int, most: int) -> tuple[int, int]:
    """Return the least and the largest number of pixels in the values of one of Qwen's processors.

    The values name them `min_pixels` and `max_pixels`, or `shortest_edge` and `longest_edge`. least, most: the limits
    where the values have none.
    """
    given = values.get("size")
    size = given if isinstance(given, Mapping) else {}
    low = values.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or least
    high = values.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or most
    return int(low), int(high)
