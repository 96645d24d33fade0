"""Types that both adapter formats share: shapes, weights, where a tensor belongs, and how a folder is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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

    `score_head` [hidden] is set for a reward model: the score of a text is its product with the hidden state of the
    text's last token, which the output head would read.
    """

    info: AdapterInfo
    tensors: dict[str, tuple[Array, Array]]
    score_head: Array | None = None


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
    score_head: str = ""  # the tensor with the score head; empty: the adapter has none


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")


_LAYERS = ("layers.", "h.", "blocks.", "transformer.", "backbone.")
"""How the paths of layers begin inside of a language model."""


def layer_of(path: str) -> int | None:
    """Return the number of the layer that a module lies in, None if it lies in none."""
    m = _LAYER.search(path)
    return int(m.group(1)) if m else None


def target_of(path: str) -> str:
    """Return the module's name within its layer, or its whole path if it lies outside the layers."""
    m = _LAYER.search(path)
    return path[m.end() :] if m else path


_WRAPPERS = re.compile(r"(?:(?:base_model|model|language_model|text_model)\.)*")
"""The modules around a language model, whose names differ between libraries and their versions. The encoders of images
and sound lie in modules of other names.
"""


def inner_path(path: str) -> str:
    """Return a module's path without the names of the modules around the language model."""
    return path[_WRAPPERS.match(path).end() :]  # type: ignore[union-attr]  # The pattern matches every text.


class Modules:
    """The linears of the served model, found by each name that an adapter may have for them."""

    def __init__(self, linears: Mapping[str, LinearShape], layers: int, tensors: Iterable[str]):
        """Take the linears by their own paths.

        `layers` is the number of the model's layers, or 0 if it is not known, and `tensors` the names in the file.
        """
        self._linears = linears
        self._layers = layers
        self._tensors = tensors
        self._by_inner: dict[str, list[str]] = {}

    def paths(self, name: str) -> Sequence[str]:
        """Return the paths of the linears that a name may stand for: its own, or those that lie in other wrappers.

        A vision model's language model is `model.language_model.layers…` in transformers since its version 4.52,
        `language_model.model.layers…` before, `model.layers…` if it was trained alone, and has one of these names here.
        """
        if name in self._linears:
            return (name,)
        if not self._by_inner:
            for path in self._linears:
                self._by_inner.setdefault(inner_path(path), []).append(path)
        return self._by_inner.get(inner_path(name), ())

    def shape(self, name: str, tensor: str, file: str) -> tuple[str, LinearShape]:
        """Return the path and the shape of the linear of this name. Raise ModelError naming the tensor if none is
        served, or if the name may stand for several.
        """
        found = self.paths(name)
        if len(found) == 1:
            return found[0], self._linears[found[0]]
        if found:
            refuse(file, tensor, f"may adapt {found[0]!r} or {found[1]!r} of the served model")
        inner = (inner_path(each) for each in self._tensors)
        highest = max((layer_of(path) or 0 for path in inner if path.startswith(_LAYERS)), default=0)
        if 0 < self._layers <= highest:
            refuse(file, tensor, f"was made for a model with {highest + 1} layers; the served model has {self._layers}")
        refuse(file, tensor, f"adapts {name[:200]!r}, which the served model does not have or cannot adapt")
