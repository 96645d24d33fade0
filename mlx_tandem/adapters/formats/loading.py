"""Loads an adapter folder into arrays: checks pairs and shapes, then reads, hashes and scales the values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlx_tandem import limits
from mlx_tandem.adapters.formats import files, mlx_lm, peft
from mlx_tandem.adapters.formats.header import DTYPES, Tensor, read_header
from mlx_tandem.adapters.formats.parts import (
    CONFIG,
    WEIGHTS,
    AdapterWeights,
    Array,
    Format,
    LinearShape,
    Spec,
    refuse,
    target_of,
)
from mlx_tandem.types import AdapterInfo

PARSERS = {"mlx-lm": mlx_lm.parse, "peft": peft.parse}
"""The parser of each format."""


def read(
    folder: Path,
    linears: Mapping[str, LinearShape],
    *,
    max_rank: int,
    base_layers: int,
    follow_links: bool = False,
    root: Path | None = None,
    scaled: bool = True,
    vocab_size: int | None = None,
    hidden_size: int | None = None,
) -> AdapterWeights:
    """Return the adapter in `folder`, checked against the model's `linears` (by path) and `base_layers` layers.

    Args:
        folder: The adapter's folder, which a link may lead to unless a `root` is given.
        linears: The linears that adapters may change.
        max_rank: The highest rank that is accepted.
        base_layers: The number of the model's layers.
        follow_links: Whether the files may be symbolic links, as in a Hugging Face cache.
        root: A folder under which `folder` must lie, with no link on the way.
        scaled: Whether the scale is multiplied into B. Without it, B equals the file's values to the bit.
        vocab_size: Size of the model's vocabulary, in which invocation tokens must be.
        hidden_size: Numbers of a hidden state, for which a score head must be made; 0 for a model whose hidden states
            cannot be read, which has no reward models.

    Raises:
        ModelError: The adapter cannot be served; the message names the file and the field.
        TooLarge: A file is over its limit.
    """
    with files.directory(folder, root) as directory:
        config = files.configuration(directory, follow_links)
        kind = files.format_of(directory, config)
        with files.regular_file(directory, WEIGHTS[kind], limits.MAX_ADAPTER_BYTES, follow_links) as fd:
            header = read_header(fd, WEIGHTS[kind])
            spec = PARSERS[kind](config, header, linears, max_rank, base_layers)
            highest = max(spec.invocation, default=0)
            if vocab_size is not None and highest >= vocab_size:
                refuse(CONFIG, "alora_invocation_tokens", f"has {highest}; the model has {vocab_size} tokens")
            if spec.score_head and hidden_size is not None:
                _check_head(WEIGHTS[kind], spec.score_head, header[spec.score_head].shape[1], hidden_size)
            return load(fd, kind, header, spec, linears, scaled)


def _check_head(file: str, head: str, size: int, hidden_size: int) -> None:
    """Raise ModelError unless a score head of `size` numbers was made for hidden states of `hidden_size`."""
    if not hidden_size:
        refuse(file, head, "is a score head; this model's family has no known output head, so it has no reward models")
    if size != hidden_size:
        refuse(file, head, f"has {size} numbers; the served model's hidden states have {hidden_size}")


def check(file: str, header: Mapping[str, Tensor], spec: Spec, linears: Mapping[str, LinearShape]) -> None:
    """Raise ModelError unless every tensor has its partner and the shape that the model and the configuration ask
    for.
    """
    for path, (a, b) in spec.modules.items():
        shape = linears[path]
        experts_a, experts_b = ({h.expert for h in side} for side in (a, b))
        for halves, experts in ((a, experts_a), (b, experts_b)):
            if len(halves) > len(experts):
                refuse(file, halves[-1].tensor, f"adapts {path}, which another tensor adapts under another name")
        for half in a:
            if half.expert not in experts_b:
                refuse(file, half.tensor, "has no matching B tensor")
        for half in b:
            if half.expert not in experts_a:
                refuse(file, half.tensor, "has no matching A tensor")
        if None in experts_a and len(experts_a) > 1:
            refuse(file, a[0].tensor, "adapts the same module as a whole and expert by expert")
        for side, halves in enumerate((a, b)):
            for half in halves:
                want: tuple[int, ...] = (shape.inputs, half.rank) if side == 0 else (half.rank, shape.outputs)
                if half.turn:
                    want = want[::-1]
                if shape.experts and half.expert is None:
                    want = (shape.experts, *want)
                got = header[half.tensor].shape
                if got != want:
                    refuse(file, half.tensor, f"has shape {list(got)}; {path} at rank {half.rank} needs {list(want)}")


def load(
    fd: int,
    kind: Format,
    header: Mapping[str, Tensor],
    spec: Spec,
    linears: Mapping[str, LinearShape],
    scaled: bool = True,
) -> AdapterWeights:
    """Return the weights that `spec` names from the open file of weights, checked against `linears`."""

    def read(name: str) -> npt.NDArray[np.uint8]:
        t = header[name]
        return files.read_exactly(fd, t.offset, math.prod(t.shape) * DTYPES[t.dtype], WEIGHTS[kind])

    return _assemble(read, kind, header, spec, linears, scaled)


def from_arrays(
    config: Mapping[str, object], tensors: Mapping[str, Array], linears: Mapping[str, LinearShape]
) -> AdapterWeights:
    """Return what `read` would for a PEFT folder with this configuration and these tensors, including the digest."""
    header = {name: Tensor("F32", t.shape, 0) for name, t in tensors.items()}
    spec = peft.parse(config, header, linears, limits.MAX_LORA_RANK, 0)
    return _assemble(lambda name: tensors[name].reshape(-1).view(np.uint8), "peft", header, spec, linears, True)


def _assemble(
    read: Callable[[str], npt.NDArray[np.uint8]],
    kind: Format,
    header: Mapping[str, Tensor],
    spec: Spec,
    linears: Mapping[str, LinearShape],
    scaled: bool,
) -> AdapterWeights:
    file = WEIGHTS[kind]
    check(file, header, spec, linears)
    digest = hashlib.blake2b(f"mlx-tandem adapter 1 {kind}\n".encode(), digest_size=32)
    if spec.invocation:
        _feed(digest, ("invocation", *spec.invocation))
    head: Array | None = None
    if spec.score_head:
        t = header[spec.score_head]
        raw = read(spec.score_head)
        _feed(digest, (spec.score_head, t.dtype, *t.shape))
        digest.update(raw.data)
        head = decode(raw, t).reshape(-1)
        _check_values(head, 1.0, file, spec.score_head)
    tensors: dict[str, tuple[Array, Array]] = {}
    nbytes = 0
    for path, sides in sorted(spec.modules.items()):
        shape = linears[path]
        rank = max(half.rank for half in sides[0])
        lead = (shape.experts,) if shape.experts else ()
        pair = (np.zeros((*lead, shape.inputs, rank), np.float32), np.zeros((*lead, rank, shape.outputs), np.float32))
        for into, halves in zip(pair, sides, strict=True):
            for half in halves:
                t = header[half.tensor]
                raw = read(half.tensor)
                nbytes += raw.nbytes
                _feed(digest, (half.tensor, t.dtype, *t.shape, half.scale.hex()))
                digest.update(raw.data)
                values = decode(raw, t)
                scale = half.scale if into is pair[1] else 1.0
                _check_values(values, scale, file, half.tensor)
                values = values.swapaxes(-1, -2) if half.turn else values
                whole = into if half.expert is None else into[half.expert]
                rows, columns = values.shape[-2:]
                np.multiply(values, np.float32(scale if scaled else 1.0), out=whole[..., :rows, :columns])
        tensors[path] = pair
    ranks = [half.rank for a, _ in spec.modules.values() for half in a]
    info = AdapterInfo(
        digest=digest.hexdigest(),
        rank=max(ranks),
        scale=spec.scale,
        format=kind,
        targets=tuple(sorted({target_of(path) for path in tensors})),
        nbytes=nbytes,
        memory_bytes=sum(a.nbytes + b.nbytes for a, b in tensors.values()),
        invocation=spec.invocation,
        score_head=b"" if head is None else head.astype(np.float32).tobytes(),
    )
    return AdapterWeights(info, tensors, head)


def _check_values(values: Array, scale: float, file: str, tensor: str) -> None:
    """Raise ModelError for a tensor with a value that is not finite, or too large once it is scaled."""
    # This form of the comparison also fails for NaN. Beyond float16's limit the device would get infinity.
    if not float(np.abs(values).max(initial=0.0)) * scale <= limits.MAX_LORA_VALUE:
        refuse(file, tensor, f"holds NaN, infinity or a value over {limits.MAX_LORA_VALUE:g}")


def _feed(digest: hashlib.blake2b, fields: Iterable[object]) -> None:
    """Hash the fields, each preceded by its length, so that no two different lists of fields give the same bytes."""
    for field in fields:
        text = str(field).encode()
        digest.update(len(text).to_bytes(4, "little") + text)


def decode(raw: npt.NDArray[np.uint8], t: Tensor) -> Array:
    """Return the bytes of a tensor as float32; float32 itself is not copied."""
    if t.dtype == "F32":
        values = raw.view("<f4")
    elif t.dtype == "F16":
        values = raw.view("<f2").astype(np.float32)
    else:  # bfloat16 is the upper half of a float32
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return values.reshape(t.shape)
