"""Whether the images of a folder are served, and the reasons why they are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_tandem.config import ModelConfig
from mlx_tandem.explain import installing
from mlx_tandem.model_folder import VISION_FAMILIES, text_settings


def has_images(settings: Mapping[str, Any]) -> bool:
    """Return whether a folder with these settings describes a part for images."""
    return bool(settings.get("vision_config"))


def refusal(config: ModelConfig, settings: Mapping[str, Any], *, installed: bool) -> str:
    """Return why the images of a folder with these settings are not served, in words; empty if they are."""
    family = settings["model_type"]
    if family not in VISION_FAMILIES:
        return f"images of model_type {family!r} are not served here"
    if way := text_settings(settings).get("use_bidirectional_attention"):
        return (
            f"tokens of an image attend to later ones in this model (use_bidirectional_attention is {way!r}), which is "
            "not served here"
        )
    if not installed:
        return f"images need the extra `vision`: {installing('vision')}"
    if config.random_weights:
        return "images are not served with random weights"
    return "" if config.images else "images are turned off (--no-images)"
