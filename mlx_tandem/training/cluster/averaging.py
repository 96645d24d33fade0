"""Averages of adapters: of each array of A and of B, weighted by the examples that each adapter was learned from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mlx_tandem import files, small_files
from mlx_tandem.adapters.formats import CONFIG, WEIGHTS
from mlx_tandem.errors import InvalidRequest

Arrays = dict[str, npt.NDArray[np.float32]]


def average(folders: Sequence[Path], weights: Sequence[float], target: Path) -> None:
    """Write the average of adapters in PEFT's format into the empty folder `target`.

    `weights` are positive. Raises InvalidRequest for adapters of different shapes or settings, and StorageError.
    """
    settings = small_files.read(folders[0] / CONFIG)
    arrays = _read(folders[0])
    sums = {name: np.zeros(array.shape, np.float64) for name, array in arrays.items()}
    for folder, weight in zip(folders, weights, strict=True):
        own = _read(folder)
        if small_files.read(folder / CONFIG) != settings or {n: a.shape for n, a in own.items()} != {
            name: total.shape for name, total in sums.items()
        }:
            raise InvalidRequest("the adapters of the trainers have different settings or shapes", param="version")
        for name, array in own.items():
            sums[name] += weight * array.astype(np.float64)
    mean = {name: (total / sum(weights)).astype(np.float32) for name, total in sums.items()}
    assert settings is not None
    with files.storage(target):
        files.create(target / CONFIG, settings)
        files.create(target / WEIGHTS["peft"], save(mean))
        files.sync_folder(target)


def _read(folder: Path) -> Arrays:
    """Return the arrays of an adapter. Raises InvalidRequest for other types of numbers than float32."""
    try:
        found = load_file(folder / WEIGHTS["peft"])
    except (OSError, SafetensorError, TypeError, KeyError) as e:
        raise InvalidRequest(f"the adapter cannot be averaged: {e}", param="version") from e
    if any(array.dtype != np.float32 for array in found.values()):
        raise InvalidRequest("the adapter cannot be averaged: it is not of float32", param="version")
    return found
