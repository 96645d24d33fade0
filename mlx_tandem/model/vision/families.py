"""The families of vision models whose images are served, and the reasons why other images are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_tandem.config import ModelConfig
from mlx_tandem.model.vision.positions import alternating, consecutive

AXES = {"qwen2_5_vl": consecutive, "qwen2_vl": consecutive, "qwen3_vl": alternating}
"""Families in which the tokens of an image have positions on several axes, each with the function that
returns the axis of each frequency."""

SERVED = frozenset(AXES) | {"gemma3", "idefics3", "internvl_chat", "llava", "mistral3", "pixtral", "smolvlm"}
"""Families by the `model_type` of their folders, which is also mlx-vlm's name for them. The tests compare each
with mlx-vlm.

In all of them the embeddings of an image replace those of its placeholders, and no token attends to later ones.
"""

OWN_TEXT_PART = frozenset({"idefics3", "internvl_chat", "smolvlm"})
"""Families that mlx-lm does not know by their own name, though it knows their language models; see `text_part`."""


def has_images(settings: Mapping[str, Any]) -> bool:
    """Return whether a folder with these settings describes a part for images."""
    return bool(settings.get("vision_config"))


def refusal(config: ModelConfig, settings: Mapping[str, Any], *, installed: bool) -> str:
    """Return why the images of a folder with these settings are not served, in words; empty if they are."""
    family = settings["model_type"]
    if family not in SERVED:
        return f"images of model_type {family!r} are not served here"
    if not installed:
        return "images need the extra `vision`: pip install 'mlx-tandem[vision]'"
    if config.random_weights:
        return "images are not served with random weights"
    return "" if config.images else "images are turned off (--no-images)"
