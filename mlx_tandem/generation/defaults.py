"""Sampling values that a model folder recommends, used where the caller gives none."""

from __future__ import annotations

from pathlib import Path

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.small_files import read_object

FILE = "generation_config.json"
KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_folder(setting: str, model: Path) -> Path | None:
    """Return the folder whose `generation_config.json` has the sampling defaults, or None for no defaults.

    setting: "auto" for the model's own folder, which need not have the file; "vllm" or "none" for none; or another
    folder, which must have it. Raises ModelError.
    """
    if setting == "auto":
        return model
    if setting in ("vllm", "none"):
        return None
    folder = Path(setting)
    if not (folder / FILE).is_file():
        raise ModelError(
            f"there is no {FILE} in the folder {setting} of --generation-config", param="generation_config"
        )
    return folder


def sampling_defaults(folder: Path) -> dict[str, float | int]:
    """Values of `generation_config.json` that this server has a parameter for; {} without the file."""
    path = folder / FILE
    found: dict[str, float | int] = {}
    for key, value in (read_object(path) or {}).items():
        if key not in KEYS or value is None:
            continue
        if key == "top_p" and value == 0:  # some files write "off" like this
            continue
        try:
            found[key] = limits.check(key, value)
        except InvalidRequest as e:
            raise ModelError(f"{path}: {e.message}", param=key) from e
    return found
