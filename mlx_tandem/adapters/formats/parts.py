"""The words of the adapter formats: shapes, weights, where a tensor belongs, and how a folder is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from mlx_tandem.errors import ModelError
from mlx_tandem.types import AdapterInfo

Array = npt.NDArray[np.float32]
Format = Literal["mlx-lm", "peft"]

CONFIG = "adapter_config.json"
WEIGHTS: dict[Format, str] = {"mlx-lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}
MAX_NAME = 200  # characters of a name from a file that an error repeats


class LinearShape(NamedTuple):
    """A linear of the served model. `experts` is 0 unless the module holds one matrix per expert."""

    inputs: int
    outputs: int
    experts: int = 0


@dataclass(frozen=True)
class AdapterWeights:
    """One adapter, ready for the device.

    `tensors[path]` is (A, B), float32 and C-contiguous: A [inputs, r], B [r, outputs], or with a leading expert
    axis. The scale is folded into B, so the module's delta is x @ A @ B. Ranks may differ between modules.
    """

    info: AdapterInfo
    tensors: dict[str, tuple[Array, Array]]


def refuse(where: str, field: str | None, problem: str, *, code: str = "invalid_adapter") -> NoReturn:
    """Raise ModelError. `where` is a file of the folder or the request's own field; `field` a key or a tensor of the
    file."""
    name = (field or "")[:MAX_NAME]
    raise ModelError(f"{where}: {name + ' ' if name else ''}{problem}", param=name or where, code=code)


class Half(NamedTuple):
    """One tensor's place in a module's A or B. `expert` is set when the file holds one tensor per expert."""

    tensor: str
    expert: int | None
    rank: int
    scale: float
    turn: bool  # its last two axes are swapped with respect to ours


@dataclass
class Spec:
    """What to load: per module path the tensors of A and those of B."""

    scale: float
    modules: dict[str, tuple[list[Half], list[Half]]]


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")


def layer_of(path: str) -> int | None:
    """The layer that a module lies in, if any."""
    m = _LAYER.search(path)
    return int(m.group(1)) if m else None


def target_of(path: str) -> str:
    """The module's name within its layer; the whole path for a module outside the layers."""
    m = _LAYER.search(path)
    return path[m.end() :] if m else path


def linear_at(path: str, tensor: str, file: str, linears: Mapping[str, LinearShape]) -> LinearShape:
    shape = linears.get(path)
    if shape is None:
        refuse(file, tensor, f"adapts {path[:200]!r}, which the served model does not have or cannot adapt")
    return shape
