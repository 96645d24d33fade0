"""Sampling values that a model folder recommends, used for parameters that a request leaves out."""

from __future__ import annotations

from pathlib import Path

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.small_files import read_object

FILE = "generation_config.json"
KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_folder(setting: str, model: Path) -> Path | None:
    """Return the folder whose `generation_config.json` has the sampling defaults, or None for no defaults.

    `setting` is "auto" for the model's own folder, in which the file may be missing; "vllm" or "none" for no defaults;
    or the path of another folder. Raises ModelError when that folder has no such file.
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
    """Return the values of `generation_config.json` that this server has parameters for; {} without the file.

    Raises ModelError for a value that is out of range.
    """
    path = folder / FILE
    found: dict[str, float | int] = {}
    for key, value in (read_object(path) or {}).items():
        if key not in KEYS or value is None:
            continue
        if key == "top_p" and value == 0:  # Some files turn top_p off like this.
            continue
        try:
            found[key] = limits.check(key, value)
        except InvalidRequest as e:
            raise ModelError(f"{path}: {e.message}", param=key) from e
    return found
