"""LoRA adapters as data: names and versions, aliases, slots, what is in memory, and the file formats."""

from __future__ import annotations

from pathlib import Path

from mlx_tandem.errors import ModelError
from mlx_tandem.model_folder import CONFIG as MODEL_CONFIG

CONFIG = "adapter_config.json"
"""Name of the configuration in both formats."""


def refuse_adapter(folder: Path) -> None:
    """Raise ModelError if a folder holds an adapter. An adapter is served beside its base model, not as a model."""
    if not (folder / MODEL_CONFIG).is_file() and (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} is an adapter, not a model: it is served beside its base model, with --adapter NAME {folder}; "
            "'tandem adapters inspect' says what is in it",
            param="model",
        )
