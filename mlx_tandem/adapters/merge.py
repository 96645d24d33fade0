"""Merges an adapter into its base model, as a new model folder that needs no adapter."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlx_tandem import files as durable
from mlx_tandem import limits
from mlx_tandem.adapters.formats import Array, LinearShape, files, loading
from mlx_tandem.adapters.formats.header import DTYPES, Tensor, read_header
from mlx_tandem.adapters.formats.parts import refuse
from mlx_tandem.small_files import read_object

MOST_BYTES = 1 << 40
"""Most bytes of a file of weights."""

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"})
"""Ends of the names of files with weights. All other files of a model's folder are copied."""

PIECE = 16 << 20
"""Most bytes of a tensor that are copied at once."""


def merge(adapter: Path, model: Path, target: Path, scale: float = 1.0) -> list[str]:
    """Write the model in `model` with the adapter's delta times `scale` added as the new folder `target`.

    The types of the weights stay as they are: sums are computed in float32 and rounded to them. The folder is there
    completely or not at all. Return the paths of the modules that were changed. Raise ModelError naming what cannot be
    merged: a quantised model, a module without a weight of its own, an activated LoRA, or a reward model.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        refuse(str(target), None, "exists and is not an empty folder: choose another OUT")
    settings = read_object(model / "config.json")
    if settings is None:
        refuse(str(model), None, "has no config.json: it is no model folder")
    for key in ("quantization", "quantization_config"):
        if settings.get(key):
            refuse("config.json", key, "is set: merge into the model before it is quantised, and quantise then")
    with ExitStack() as stack:
        directory = stack.enter_context(files.directory(model))
        names = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
        if not names:
            refuse(str(model), None, "has no file of weights that ends in .safetensors")
        fds = {
            name: stack.enter_context(files.regular_file(directory, name, MOST_BYTES, follow_links=True))
            for name in names
        }
        headers = {name: read_header(fd, name) for name, fd in fds.items()}
        linears = _linears(headers)
        found = loading.read(adapter, linears, max_rank=limits.MAX_LORA_RANK, base_layers=0, follow_links=True)
        if found.info.invocation:
            refuse(str(adapter), None, "is an activated LoRA, which changes nothing before its tokens")
        if found.score_head is not None:
            refuse(str(adapter), None, "is a reward model: its score head has no place in the model's weights")
        deltas = {f"{path}.weight": (a, b * np.float32(scale)) for path, (a, b) in found.tensors.items()}
        with durable.storage(target):
            _write(model, target, {name: _merged(fds[name], name, headers[name], deltas) for name in names})
    return sorted(found.tensors)


def _linears(headers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, LinearShape]:
    """Return the shapes of all matrices that an input is multiplied with, by the paths of their modules."""
    found: dict[str, LinearShape] = {}
    for header in headers.values():
        for name, tensor in header.items():
            path, _, leaf = name.rpartition(".")
            if leaf == "weight" and len(tensor.shape) == 2 and "embed" not in path.rpartition(".")[2]:
                found[path] = LinearShape(tensor.shape[1], tensor.shape[0])
    return found


def _merged(
    fd: int, file: str, header: Mapping[str, Tensor], deltas: Mapping[str, tuple[Array, Array]]
) -> Iterator[bytes]:
    """Yield the bytes of a file of weights with the deltas added. Types and places of its tensors stay as they are."""
    start = min(tensor.offset for tensor in header.values())
    yield files.read_exactly(fd, 0, start, file).tobytes()
    for name, tensor in sorted(header.items(), key=lambda item: item[1].offset):
        size = math.prod(tensor.shape) * DTYPES[tensor.dtype]
        if name in deltas:
            raw = files.read_exactly(fd, tensor.offset, size, file)
            a, b = deltas[name]
            yield _encoded(loading.decode(raw, tensor) + (a @ b).T, tensor, file, name)
            continue
        for at in range(0, size, PIECE):
            yield files.read_exactly(fd, tensor.offset + at, min(PIECE, size - at), file).tobytes()


def _encoded(values: npt.NDArray[np.float32], tensor: Tensor, file: str, name: str) -> bytes:
    """Return numbers as the bytes of a tensor, rounded to its type. Raise ModelError if one does not fit."""
    if tensor.dtype == "F32":
        raw = values.astype("<f4").tobytes()
    elif tensor.dtype == "F16":
        with np.errstate(over="ignore"):
            raw = values.astype("<f2").tobytes()
    else:  # bfloat16 is the upper half of a float32; ties go to the even one
        bits = values.astype("<f4").view("<u4")
        raw = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype("<u2").tobytes()
    if not np.isfinite(loading.decode(np.frombuffer(raw, np.uint8), tensor)).all():
        refuse(file, name, f"has sums that are too large for {tensor.dtype}")
    return raw


def _write(model: Path, target: Path, weights: Mapping[str, Iterator[bytes]]) -> None:
    """Write a model's folder beside the target, which takes the target's name when it is complete."""
    target = Path(os.path.abspath(target))
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    scratch.mkdir(parents=True)
    try:
        for name, parts in weights.items():
            durable.create(scratch / name, parts)
        for entry in sorted(model.iterdir()):
            if entry.is_file() and entry.suffix not in WEIGHTS:
                durable.create(scratch / entry.name, entry.read_bytes())
        durable.sync_folder(scratch)
        scratch.rename(target)
        durable.sync_folder(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
