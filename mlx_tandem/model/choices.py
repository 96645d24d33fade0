"""The choices that are made by timing when an engine starts, as one value.

`Choices` is plain data: it is kept on the drive for the next start, and can be given to another process, which then
times nothing and builds the same functions. Processes that compute one model together have to be given the same value,
since a different kernel rounds differently.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msgspec
from msgspec import Struct, structs

from mlx_tandem import files
from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend
from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.cache.states import StateShape
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.ops.attention.choice import AttentionDivision
from mlx_tandem.model.ops.lora.choice import AdapterLimits
from mlx_tandem.model.ops.products.few_rows import Products
from mlx_tandem.model.ops.products.tuning import Tuned
from mlx_tandem.model.ops.sampling.choice import SamplingKernels

log = logging.getLogger(__name__)

FORMAT = 7
"""Version of the value; another one is refused."""

MOST_KEPT = 64
"""Most files with choices on the drive. Beyond that the oldest is removed."""

_NVIDIA = Path("/proc/driver/nvidia/version")


class Subject(Struct, frozen=True, forbid_unknown_fields=True):
    """The device, model and settings that choices are valid for."""

    device: str
    driver: str
    """The version of the GPU's driver, or of macOS, which contains it; empty for a CPU."""

    mlx: str
    sources: str
    """A digest of the source texts of this package that run on the device or check what runs there."""

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
        parts = [part for part in (model.module, model.mtp) if part is not None]
        facts = (
            model.settings,
            str(model.dtype),
            model.quantization,
            [_precision(path, module) for part in parts for path, module in part.named_modules()],
            # What a layer asks of attention is known only once the model has run, and follows from its type.
            [(str(layer.keys), str(layer.values), layer.window) for layer in layers],
            [str(state) for state in states],
            vocab_size,
            # Whether adapters are configured decides when their kernels are chosen, and not between which.
            (
                config.cache,
                structs.replace(config.lora, prepare=False),
                config.scheduler.max_num_seqs,
                config.deterministic,
            ),
            version("mlx-lm"),
        )
        digest = hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]
        here = backend.current()
        return Subject(here.describe(), here.driver(), version("mlx"), sources(), digest)


def _precision(path: str, module: nn.Module) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return the path of a module, the shapes of its own arrays, and how its weight is packed."""
    own = [(name, f"{array.shape} {array.dtype}") for name, array in module.items() if isinstance(array, mx.array)]
    return path, own, [str(getattr(module, name, "")) for name in ("group_size", "bits", "mode")]


@cache
def sources() -> str:
    """Return a digest of the texts of this package that run on the device or check what does."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*")):
        if file.is_file() and file.suffix != ".pyc":
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


class KernelChoices(Struct, frozen=True, forbid_unknown_fields=True):
    """The choices of `kernel_checks`."""

    mask_axes: int
    """Axes of the model's masks between rows and queries."""

    store_problem: str
    """Why MLX's own operations write arrays in place and no kernel does; empty where a kernel does."""

    products: Products
    attention: AttentionDivision
    own_blocks: str
    """Why attention blocks run their own code; empty if they are on the fused path or cannot be."""

    adapters: AdapterLimits | None
    """None: no adapter was configured or loaded, so nothing was chosen."""

    sampling: SamplingKernels
    rule_problem: str | None = None
    """Why mlx-lm's functions compute the gated delta rule; empty if a kernel does, None if no layer needs it."""

    own_delta_nets: str | None = None
    """Why gated delta nets run their own code; empty if they are on the fused path, None if there are none."""


class Pace(Struct, frozen=True, forbid_unknown_fields=True):
    """The duration of steps, which the cost model is fitted to, and whether steps may be in flight together."""

    chunks: tuple[tuple[int, int, float], ...]
    """Prompt chunks: tokens, positions before them, milliseconds."""

    decodes: tuple[tuple[int, float], ...]
    """Decode steps: rows, milliseconds."""

    one_at_a_time: bool

    whole: bool = True
    """Whether later starts take this over. They time everything again if a decode step took very long."""


NO_PACE = Pace((), (), True, whole=False)
"""The pace of a rank that is led: it times no step, and is told which ones to begin."""


class Choices(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that an engine chose by timing when it started."""

    subject: Subject
    kernels: KernelChoices
    tuned: Tuned
    pace: Pace

    def write(self, file: Path) -> None:
        """Write the value to a file, durably. Raise OSError where that fails."""
        text = msgspec.json.encode(self)
        files.replace(file, _seal(text) + text)

    @staticmethod
    def read(file: Path) -> Choices:
        """Return the value in a file.

        Raises:
            OSError: The file cannot be read.
            ModelError: The file is damaged, or holds no choices of this version.
        """
        content = file.read_bytes()
        seal, text = content[:_SEAL_BYTES], content[_SEAL_BYTES:]
        if seal != _seal(text):
            raise ModelError(f"{file.name} is damaged or holds no choices")
        try:
            return msgspec.json.decode(text, type=Choices)
        except msgspec.MsgspecError as e:
            raise ModelError(f"{file.name} holds no choices of this version: {e}") from e

    def require(self, subject: Subject) -> None:
        """Raise ModelError unless the choices were made for this subject."""
        for name in Subject.__struct_fields__:
            theirs, own = getattr(self.subject, name), getattr(subject, name)
            if theirs != own:
                raise ModelError(f"the choices made at start are for another {name}: {theirs}, and this is {own}")


_SEAL_BYTES = 65


def _seal(text: bytes) -> bytes:
    """Return the first line of a file with this text. It reveals damage of the file."""
    return hashlib.sha256(text).hexdigest().encode() + b"\n"


class Kept:
    """The choices of earlier starts on the drive, each in a file that is named by its subject.

    If the folder cannot be read or written, the only effect is that the next start takes longer.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def find(self, subject: Subject) -> Choices | None:
        """Return the choices for this subject; None if there are none, or if they are damaged."""
        file = self._file(subject)
        try:
            found = Choices.read(file)
            found.require(subject)
        except FileNotFoundError:
            return None
        except (OSError, ModelError) as e:
            log.warning("the choices of the last start are not used: %s", e)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # the file that was not used for longest goes first
        return found

    def keep(self, choices: Choices) -> None:
        """Write choices for the next start."""
        file = self._file(choices.subject)
        try:
            files.make_folder(file.parent)
            choices.write(file)
            self._drop_old()
        except OSError as e:
            log.warning("the choices of this start are not kept, so the next one takes as long: %s", e)

    def drop(self, subject: Subject) -> None:
        """Remove the choices for this subject."""
        with contextlib.suppress(OSError):
            self._file(subject).unlink(missing_ok=True)

    def _drop_old(self) -> None:
        """Remove the files that were not used for longest, but for MOST_KEPT. Another process may do so, too."""
        used: dict[Path, float] = {}
        for file in self._folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                used[file] = file.stat().st_mtime
        for file in sorted(used, key=used.__getitem__)[:-MOST_KEPT]:
            file.unlink(missing_ok=True)

    def _file(self, subject: Subject) -> Path:
        digest = hashlib.sha256(msgspec.json.encode(subject)).hexdigest()[:32]
        return self._folder / f"{digest}.json"
