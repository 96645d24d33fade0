"""The choices that are made by timing when an engine starts, as one value.

`Choices` is plain data: it can be kept in a file and given to another process, which then times nothing and builds the
same functions. Processes that compute one model together have to be given the same value, since a different kernel
rounds differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model import device
from mlx_tandem.model.cache.kvcache import LayerShape
from mlx_tandem.model.cache.states import StateShape
from mlx_tandem.model.footprint import linears
from mlx_tandem.model.kernels.division import Division
from mlx_tandem.model.kernels.skinny import Form
from mlx_tandem.model.kernels.wgmma import WideForm
from mlx_tandem.model.linears.skinny import Shape
from mlx_tandem.model.linears.tuning import Tuned
from mlx_tandem.model.loader import LoadedModel

FORMAT = 4
"""Version of the value; another one is refused."""


class Subject(Struct, frozen=True, forbid_unknown_fields=True):
    """The device, model and settings that choices are valid for."""

    device: str
    mlx: str
    model: str
    """A digest of everything of the model and the settings that decides which functions there are to choose from."""

    format: int = FORMAT

    @staticmethod
    def of(
        config: EngineConfig,
        model: LoadedModel,
        layers: list[LayerShape],
        vocab_size: int,
        states: Sequence[StateShape] = (),
    ) -> Subject:
        """Return the subject of a model that is served with these settings on this device."""
        facts = (
            model.model_type,
            str(model.dtype),
            model.quantization,
            sorted((path, str(shape)) for path, shape in linears(model.module).items()),
            # What a layer asks of attention is known only once the model has run, and follows from its type.
            [(str(layer.keys), str(layer.values), layer.window) for layer in layers],
            [str(state) for state in states],
            vocab_size,
            (config.cache, config.lora, config.scheduler.max_num_seqs, config.deterministic),
        )
        return Subject(device.describe(), version("mlx"), hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32])


class AttentionDivision(Struct, frozen=True, forbid_unknown_fields=True):
    """The attention back end, and how its work is divided for each kind of layer, in the order of their first layers.

    Kinds of layers whose keys its kernels cannot read are left out.
    """

    name: str
    reason: str
    divisions: tuple[Division, ...] = ()


class FormsByShape(NamedTuple):
    """Forms by number of tokens (in `eighths`) for linears of one shape: `forms` of kernels/skinny.py, and `wide` of
    kernels/wgmma.py.
    """

    shape: Shape
    forms: dict[int, Form]
    wide: dict[int, WideForm]


class Products(Struct, frozen=True, forbid_unknown_fields=True):
    """The products that the kernel for few rows computes, in steps of the base and in steps with adapters."""

    reason: str
    base: tuple[FormsByShape, ...] = ()
    adapted: tuple[FormsByShape, ...] = ()


class AdapterLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """The most tokens for which fused kernels compute adapters: of one adapter, and of several; 0: never."""

    reason: str
    same: int = 0
    mixed: int = 0


class SamplingKernels(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a kernel draws tokens among all tokens, and whether one draws among the likeliest."""

    reason: str
    plain: bool = False
    truncated: bool = False


class KernelChoices(Struct, frozen=True, forbid_unknown_fields=True):
    """The choices of `kernel_checks`."""

    store_problem: str
    """Why MLX's own operations write arrays in place and no kernel does; empty where a kernel does."""

    products: Products
    attention: AttentionDivision
    own_blocks: str
    """Why attention blocks run their own code; empty if they are on the fused path or cannot be."""

    adapters: AdapterLimits
    sampling: SamplingKernels


class Pace(Struct, frozen=True, forbid_unknown_fields=True):
    """The duration of steps, which the cost model is fitted to, and whether steps may be in flight together."""

    chunks: tuple[tuple[int, int, float], ...]
    """Prompt chunks: tokens, positions before them, milliseconds."""

    decodes: tuple[tuple[int, float], ...]
    """Decode steps: rows, milliseconds."""

    one_at_a_time: bool


class Choices(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that an engine chose by timing when it started."""

    subject: Subject
    kernels: KernelChoices
    tuned: Tuned
    pace: Pace

    def write(self, file: Path) -> None:
        """Write the value to a file, durably. Raise OSError where that fails."""
        files.replace(file, msgspec.json.encode(self))

    @staticmethod
    def read(file: Path) -> Choices:
        """Return the value in a file.

        Raises:
            OSError: The file cannot be read.
            ModelError: The file holds no choices of this version.
        """
        try:
            return msgspec.json.decode(file.read_bytes(), type=Choices)
        except msgspec.MsgspecError as e:
            raise ModelError(f"{file.name} holds no choices of this version: {e}") from e

    def require(self, subject: Subject) -> None:
        """Raise ModelError unless the choices were made for this subject."""
        for name in Subject.__struct_fields__:
            theirs, own = getattr(self.subject, name), getattr(subject, name)
            if theirs != own:
                raise ModelError(f"the choices made at start are for another {name}: {theirs}, and this is {own}")
