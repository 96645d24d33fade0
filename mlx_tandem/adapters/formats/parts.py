"""Types that both adapter formats share: shapes, weights, where a tensor belongs, and how a folder is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from mlx_tandem.adapters import CONFIG as CONFIG
from mlx_tandem.errors import ModelError
from mlx_tandem.types import AdapterInfo

Array = npt.NDArray[np.float32]
"""A float32 array on the host."""

Format = Literal["mlx-lm", "peft"]
"""The adapter formats that are read."""

WEIGHTS: dict[Format, str] = {"mlx-lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}
"""Name of the file of weights in each format."""

MAX_NAME = 200
"""Most characters of a name from a file that an error repeats."""


class LinearShape(NamedTuple):
    """The shape of a linear of the served model. `experts` is 0 unless it holds one matrix per expert."""

    inputs: int
    outputs: int
    experts: int = 0


@dataclass(frozen=True)
class AdapterWeights:
    """One adapter, ready for the device.

    `tensors[path]` is (A, B), float32 and C-contiguous: A [inputs, r], B [r, outputs], or with a leading expert
    axis. The scale is multiplied into B, so the module's delta is x @ A @ B. Ranks may differ between modules.
    """

    info: AdapterInfo
    tensors: dict[str, tuple[Array, Array]]


def refuse(where: str, field: str | None, problem: str, *, code: str = "invalid_adapter") -> NoReturn:
    """Raise ModelError about `field`, a key or tensor of the file `where`, or about the request's own field `where`."""
    name = (field or "")[:MAX_NAME]
    raise ModelError(f"{where}: {name + ' ' if name else ''}{problem}", param=name or where, code=code)


class Half(NamedTuple):
    """The place of one tensor in a module's A or B. `expert` is set if the file holds one tensor per expert."""

    tensor: str
    expert: int | None
    rank: int
    scale: float
    turn: bool  # whether the last two axes must be swapped


@dataclass
class Spec:
    """The tensors to load: for each module's path those of A and those of B."""

    scale: float
    modules: dict[str, tuple[list[Half], list[Half]]]
    invocation: tuple[int, ...] = ()  # as in AdapterInfo


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")


def layer_of(path: str) -> int | None:
    """Return the number of the layer that a module lies in, None if it lies in none."""
    m = _LAYER.search(path)
    return int(m.group(1)) if m else None


def target_of(path: str) -> str:
    """Return the module's name within its layer, or its whole path if it lies outside the layers."""
    m = _LAYER.search(path)
    return path[m.end() :] if m else path


def linear_at(path: str, tensor: str, file: str, linears: Mapping[str, LinearShape]) -> LinearShape:
    """Return the shape of the linear at `path`. Raise ModelError if the served model cannot adapt it."""
    shape = linears.get(path)
    if shape is None:
        refuse(file, tensor, f"adapts {path[:200]!r}, which the served model does not have or cannot adapt")
    return shape
