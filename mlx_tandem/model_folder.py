"""What both the engine and the front read in a model folder's config.json: its parts, and the family of its images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mlx_tandem import limits
from mlx_tandem.errors import ModelError

CONFIG = "config.json"
"""The file of a model folder that describes the model."""

TEXT_PARTS = ("text_config", "llm_config")
"""Names under which folders of vision models describe their language model. Others describe it at the top."""


class VisionFamily(NamedTuple):
    """How images are processed for a model family. Most of it is decided by mlx-vlm's modules and transformers'
    processors.

    In all families the embeddings of an image replace those of its placeholders, and no token attends to later ones.
    """

    processor: str
    """The image processor of folders that name none."""

    layout: str
    """The text and tokens that an image has in a prompt, by their key in `generation.vision.layouts.LAYOUTS`."""

    axes: Literal["", "consecutive", "alternating"] = ""
    """The order in which the frequencies of ropes belong to the axes of positions; empty if positions have one axis."""

    videos: Literal["", "groups", "seconds", "texts", "clock"] = ""
    """How the model is told the times of a video's frames; empty if no videos are served.

    Except with `clock`, a group of frames becomes one patch in time. With `groups`, its position on the axis of time is
    its number; with `seconds`, its time in seconds times the folder's `tokens_per_second`; with `texts`, a text before
    the group gives its time in seconds. With `clock`, each frame is an image by itself, and a text before it gives its
    time in minutes and seconds.
    """

    unscaled: bool = False
    """Whether the family's language model scales the embeddings of tokens but not those of images. mlx-lm's code scales
    both.
    """

    own_text_part: bool = False
    """Whether mlx-lm loads the language model by the `model_type` of its text part, not of the folder."""


VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "llava": VisionFamily("CLIPImageProcessor", "llava"),
    "gemma3": VisionFamily("Gemma3ImageProcessor", "gemma3"),
    "gemma4": VisionFamily("Gemma4ImageProcessor", "gemma4", videos="clock", unscaled=True),
    "pixtral": VisionFamily("PixtralImageProcessor", "pixtral"),
    "mistral3": VisionFamily("PixtralImageProcessor", "pixtral"),
    "internvl_chat": VisionFamily("GotOcr2ImageProcessor", "internvl", own_text_part=True),
    "idefics3": VisionFamily("Idefics3ImageProcessor", "idefics3", own_text_part=True),
    "smolvlm": VisionFamily("SmolVLMImageProcessor", "idefics3", own_text_part=True),
    "qwen2_vl": VisionFamily("Qwen2VLImageProcessor", "qwen", "consecutive", "groups"),
    "qwen2_5_vl": VisionFamily("Qwen2VLImageProcessor", "qwen", "consecutive", "seconds"),
    "qwen3_vl": VisionFamily("Qwen2VLImageProcessor", "qwen", "alternating", "texts"),
    "qwen3_5": VisionFamily("Qwen2VLImageProcessor", "qwen", "alternating", "texts"),
    "qwen3_5_moe": VisionFamily("Qwen2VLImageProcessor", "qwen", "alternating", "texts"),
    "qwen3_vl_moe": VisionFamily("Qwen2VLImageProcessor", "qwen", "alternating", "texts"),
}
"""Families by the `model_type` of their folders, which is also mlx-vlm's name for them. The tests compare each with
mlx-vlm.
"""


_USUAL_PATCH = 14  # pixels; mlx-vlm's side of a patch for most families that do not name theirs


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json's contents that describes the language model."""
    return next((settings[name] for name in TEXT_PARTS if settings.get(name)), settings)


def check_text(settings: Mapping[str, Any], file: str) -> None:
    """Raise ModelError, naming `file` and the field, unless the parts of config.json are objects and the numbers of the
    language model lie in their ranges.
    """
    for field in (*TEXT_PARTS, "vision_config", "quantization", "quantization_config", "rope_scaling"):
        if not isinstance(settings.get(field), dict | None):
            raise ModelError(f"{file}: {field} must be an object", param=field)
    limits.check_model(limits.MODEL, settings, file)
    for field in TEXT_PARTS:
        limits.check_model(limits.MODEL, settings.get(field) or {}, file, field)
    limits.check_model(limits.QUANTIZATION, settings.get("quantization") or {}, file, "quantization")


def check_vision(settings: Mapping[str, Any], file: str) -> None:
    """Raise ModelError, naming `file` and the field, unless the numbers of the part for images lie in their ranges."""
    limits.check_model(limits.IMAGES, settings, file)
    tower = settings.get("vision_config") or {}
    limits.check_model(limits.VISION, tower, file, "vision_config")
    patch = min(_integers(tower.get("patch_size")), default=_USUAL_PATCH)
    for field, size in (
        ("vision_config.image_size", tower.get("image_size")),
        ("force_image_size", settings.get("force_image_size")),
    ):
        if max(_integers(size), default=0) > limits.MAX_GRID * patch:
            raise ModelError(f"{file}: {field} must be at most {limits.MAX_GRID} patches", param=field)
    for place in ("", *TEXT_PARTS):
        part = settings.get(place) if place else settings
        for field in ("rope_scaling", "rope_parameters"):
            own = part.get(field) if isinstance(part, Mapping) else None
            if isinstance(own, Mapping):
                limits.check_model(limits.ROPE, own, file, f"{place}.{field}" if place else field)


def _integers(value: Any) -> list[int]:
    """Return the integers of a setting that is a number or a list of numbers."""
    return [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)]


def check_processor(values: Mapping[str, Any], file: str, place: str = "") -> None:
    """Raise ModelError, naming `file` and the field, unless the numbers of an image processor lie in their ranges.

    A size is a number, or an object of numbers such as a height and a width. `place` is the object of the file that
    holds the values.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, Mapping) else {name: value}
    limits.check_model(limits.PROCESSOR, flat, file, place)
