"""Inspects an adapter folder without its base model, and converts it to the other format."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from mlx_tandem import limits
from mlx_tandem.adapters.formats import CONFIG, WEIGHTS, Format, LinearShape, files, peft
from mlx_tandem.adapters.formats.header import DTYPES, Tensor, read_header
from mlx_tandem.adapters.formats.loading import PARSERS, check, decode, load
from mlx_tandem.adapters.formats.parts import Half, Spec, layer_of, refuse, target_of
from mlx_tandem.errors import ModelError

_SWITCH = re.compile(r"(.+)\.switch_mlp\.([A-Za-z0-9_]+)")
_OURS, _THEIRS, _HEAD = "language_model.model.", "model.language_model.", "lm_head"
"""The beginnings of the paths in a vision model's language model, in mlx-lm's and in transformers' classes."""

Tensors = dict[str, npt.NDArray[Any]]
"""Tensors of a safetensors file by name."""


@dataclass(frozen=True)
class Inspection:
    """The contents of an adapter folder. If there are `problems`, the other fields say what could still be found
    out.
    """

    path: str
    format: Format | None = None
    ranks: tuple[int, ...] = ()  # all ranks that occur, ascending
    scales: tuple[float, ...] = ()  # all factors of A @ B that occur, ascending
    targets: tuple[str, ...] = ()  # adapted modules without their layer; * stands for the number of an expert
    layers: tuple[int, ...] = ()  # layers that have an adapted module
    tensors: int = 0
    dtypes: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()  # tokens that invoke it, if it is an activated LoRA
    score_head: bool = False  # whether it is a reward model
    nbytes: int = 0  # bytes of the tensors in the file
    digest: str | None = None  # the server's digest; None with a tensor per expert, where it depends on the base model
    problems: tuple[str, ...] = ()  # why the adapter cannot be served with any base model


def inspect(folder: Path) -> Inspection:
    """Return what the folder holds, checked as far as that is possible without a base model.

    No error is raised for anything that is wrong with the adapter; it is among the problems.
    """
    found = Inspection(str(folder))
    try:
        with files.directory(folder) as directory:
            config = files.configuration(directory, follow_links=True)
            kind = files.format_of(directory, config)
            found = replace(found, format=kind)
            with files.regular_file(directory, WEIGHTS[kind], limits.MAX_ADAPTER_BYTES, follow_links=True) as fd:
                header = read_header(fd, WEIGHTS[kind])
                found = replace(
                    found,
                    tensors=len(header),
                    dtypes=tuple(sorted({t.dtype for t in header.values()})),
                    nbytes=sum(math.prod(t.shape) * DTYPES[t.dtype] for t in header.values()),
                )
                linears, spec = _spec(kind, config, header)
                found = replace(found, invocation=spec.invocation, score_head=bool(spec.score_head))
                halves = [half for a, _ in spec.modules.values() for half in a]
                found = replace(
                    found,
                    ranks=tuple(sorted({half.rank for half in halves})),
                    scales=tuple(sorted({half.scale for half in halves})),
                    targets=tuple(sorted({target_of(_any_expert(path)) for path in spec.modules})),
                    layers=tuple(sorted({layer for path in spec.modules if (layer := layer_of(path)) is not None})),
                )
                digest = load(fd, kind, header, spec, linears).info.digest  # reads, and so checks, the values too
                by_expert = any(peft.EXPERT.fullmatch(path) for path in spec.modules)
                return replace(found, digest=None if by_expert else digest)
    except ModelError as e:
        return replace(found, problems=(e.message,))


def convert(source: Path, target: Path, to: Format) -> None:
    """Write the adapter in `source` as the new folder `target` in the format `to`, completely or not at all.

    Values are not changed: the scale becomes `lora_alpha` and vice versa, float16 and float32 stay as they are,
    bfloat16 becomes float32. Raise ModelError naming what the format `to` cannot express.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        refuse(str(target), None, "exists and is not an empty folder: choose another OUT")
    with files.directory(source) as directory:
        config = files.configuration(directory, follow_links=True)
        kind = files.format_of(directory, config)
        if kind == to:
            refuse("--to", None, f"{source} is in the format {to} already")
        with files.regular_file(directory, WEIGHTS[kind], limits.MAX_ADAPTER_BYTES, follow_links=True) as fd:
            header = read_header(fd, WEIGHTS[kind])
            adapter = _Adapter(fd, config, header, *_spec(kind, config, header))
            written, tensors = _to_peft(adapter) if to == "peft" else _to_mlx_lm(adapter)
    _write(target, written, tensors, WEIGHTS[to])


class _Adapter(NamedTuple):
    """An open adapter folder that has been checked."""

    fd: int
    config: Mapping[str, Any]
    header: Mapping[str, Tensor]
    linears: Mapping[str, LinearShape]
    spec: Spec

    def values(self, half: Half) -> npt.NDArray[Any]:
        """Return a half as the model multiplies with it, unscaled: A [inputs, r] or B [r, outputs]."""
        t = self.header[half.tensor]
        raw = files.read_exactly(self.fd, t.offset, math.prod(t.shape) * DTYPES[t.dtype], half.tensor)
        values: npt.NDArray[Any] = raw.view("<f2").reshape(t.shape) if t.dtype == "F16" else decode(raw, t)
        return values.swapaxes(-1, -2) if half.turn else values


def _spec(kind: Format, config: Mapping[str, Any], header: Mapping[str, Tensor]) -> tuple[dict[str, LinearShape], Spec]:
    """Return the linears that the tensors themselves describe, and the folder's content checked against them."""
    linears: dict[str, LinearShape] = {}
    for name, tensor in header.items():
        path, _, leaf = name.removesuffix(".weight").rpartition(".")
        side = leaf.lower()
        if side not in ("lora_a", "lora_b"):
            continue  # the format's own rules refuse it
        if len(tensor.shape) not in ((2, 3) if kind == "mlx-lm" else (2,)):
            refuse(WEIGHTS[kind], name, f"has shape {list(tensor.shape)}, which is not a LoRA matrix's")
        # (in, r) and (r, out) in mlx-lm; (E, r, in) and (E, out, r) in its switch layers, (r, in) and (out, r) in PEFT
        first = (side == "lora_a") == (kind == "mlx-lm" and len(tensor.shape) == 2)
        size = tensor.shape[-2 if first else -1]
        path = path.removeprefix(peft.PREFIX) if kind == "peft" else path
        known = linears.get(path, LinearShape(0, 0))
        known = known._replace(experts=tensor.shape[0] if len(tensor.shape) == 3 else 0)
        linears[path] = known._replace(inputs=size) if side == "lora_a" else known._replace(outputs=size)
    spec = PARSERS[kind](config, header, linears, limits.MAX_LORA_RANK, 0)
    check(WEIGHTS[kind], header, spec, linears)
    return linears, spec


def _any_expert(path: str) -> str:
    m = peft.EXPERT.fullmatch(path)
    return f"{m.group(1)}.experts.*.{m.group(3)}" if m else path


# --- to PEFT -----------------------------------------------------------------------------------------------------


def _to_peft(adapter: _Adapter) -> tuple[dict[str, Any], Tensors]:
    tensors: Tensors = {}
    paths = []
    for path, sides in adapter.spec.modules.items():
        names = _peft_names(path, adapter.linears[path].experts)
        paths += names
        for side, (half,) in zip("AB", sides, strict=True):
            values = adapter.values(half).swapaxes(-1, -2)
            for name, matrix in zip(names, values if adapter.linears[path].experts else [values], strict=True):
                tensors[f"{peft.PREFIX}{name}.lora_{side}.weight"] = matrix
    parameters = adapter.config["lora_parameters"]
    half = next(iter(adapter.spec.modules.values()))[0][0]
    base, dropout = _text(adapter.config.get("model")), _dropout(parameters.get("dropout"))
    return _peft_config(base, half.rank, _alpha(half.scale, half.rank), dropout, paths), tensors


def to_peft(
    modules: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]],
    rank: int,
    alpha: float,
    *,
    rslora: bool = False,
    dropout: float = 0.0,
    score_head: npt.NDArray[np.float32] | None = None,
) -> tuple[dict[str, Any], Tensors]:
    """Return PEFT's configuration and tensors of an adapter.

    `modules[path]` is (A [inputs, r], B [r, outputs]), unscaled, or with a leading expert axis. With `rslora` the scale
    is alpha / sqrt(rank). With a `score_head` [hidden] it is a reward model. Raise ModelError for modules that PEFT has
    no name for.
    """
    tensors: Tensors = {}
    paths = []
    for path, pair in modules.items():
        experts = pair[0].shape[0] if pair[0].ndim == 3 else 0
        names = _peft_names(path, experts)
        paths += names
        for side, values in zip("AB", pair, strict=True):
            turned = values.swapaxes(-1, -2)
            for name, matrix in zip(names, turned if experts else [turned], strict=True):
                tensors[f"{peft.PREFIX}{name}.lora_{side}.weight"] = np.ascontiguousarray(matrix)
    config = _peft_config("", rank, int(alpha) if float(alpha).is_integer() else alpha, dropout, paths)
    config |= {"use_rslora": rslora}
    if score_head is not None:
        tensors[peft.SCORE_HEAD] = np.ascontiguousarray(score_head.reshape(1, -1))
        config |= {"task_type": peft.SCORES, "modules_to_save": ["score"]}
    return config, tensors


def _peft_config(base: str, rank: int, alpha: float, dropout: float, paths: list[str]) -> dict[str, Any]:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return config | _peft_targets(paths)


def _peft_names(path: str, experts: int) -> list[str]:
    """Return PEFT's names for a module: one per expert, where Mixtral's leaves have names of their own.

    The language model of a vision model has the name that it has in transformers since version 4.52.
    """
    if path.startswith(_OURS):
        path = _THEIRS + path.removeprefix(_OURS)
    if path == f"language_model.{_HEAD}":
        path = _HEAD
    if not experts:
        return [path]
    m = _SWITCH.fullmatch(path)
    if m is None:
        refuse(WEIGHTS["mlx-lm"], path, "holds all experts under a name that has no known counterpart in PEFT")
    block, leaf = m.groups()
    if block.endswith("block_sparse_moe"):
        leaf = next((theirs for theirs, ours in peft.MIXTRAL.items() if ours == leaf), leaf)
    return [f"{block}.experts.{e}.{leaf}" for e in range(experts)]


def _peft_targets(paths: list[str]) -> dict[str, Any]:
    """Return the configuration's target modules: names and layers if every layer has the same modules, else full
    paths.

    With experts full paths are needed, because PEFT would take the expert's number for the layer's. In a vision model
    they are needed, because the encoder's modules may have the same names.
    """
    layers, targets = {layer_of(p) for p in paths}, {target_of(p) for p in paths}
    by_expert = any(peft.EXPERT.fullmatch(p) for p in paths)
    pairs = {(layer_of(p), target_of(p)) for p in paths}
    if None in layers or by_expert or paths[0].startswith(_THEIRS) or pairs != set(product(layers, targets)):
        return {"target_modules": sorted(paths)}
    return {"target_modules": sorted(targets), "layers_to_transform": sorted(n for n in layers if n is not None)}


def _alpha(scale: float, rank: int) -> float | int:
    """Return the alpha that divided by the rank gives the scale, or differs from it in the last bit."""
    product = scale * rank
    candidates = (product, math.nextafter(product, math.inf), math.nextafter(product, 0.0))
    alpha = next((c for c in candidates if c / rank == scale), product)
    if alpha > limits.MAX_LORA_ALPHA:
        refuse(CONFIG, "lora_parameters.scale", f"gives a lora_alpha over the limit of {limits.MAX_LORA_ALPHA:g}")
    return int(alpha) if alpha.is_integer() else alpha


# --- to mlx-lm ---------------------------------------------------------------------------------------------------


def _to_mlx_lm(adapter: _Adapter) -> tuple[dict[str, Any], Tensors]:
    if adapter.spec.invocation:
        refuse(CONFIG, "alora_invocation_tokens", "is set; mlx-lm's format has no activated LoRA")
    if adapter.spec.score_head:
        refuse(WEIGHTS["peft"], adapter.spec.score_head, "is a score head, which mlx-lm's format has no place for")
    modules = adapter.spec.modules
    first, *others = (half for a, _ in modules.values() for half in a)
    for half in others:
        if half.rank != first.rank:
            refuse(CONFIG, "rank_pattern", f"gives {half.tensor} another rank than {first.tensor}; mlx-lm has one")
        if half.scale != first.scale:
            refuse(CONFIG, "alpha_pattern", f"gives {half.tensor} another scale than {first.tensor}; mlx-lm has one")
    tensors: Tensors = {}
    stacks: dict[str, dict[int, str]] = {}
    for path, sides in modules.items():
        if m := peft.EXPERT.fullmatch(path):
            block, expert, leaf = m.groups()
            stacks.setdefault(f"{_ours(block)}.switch_mlp.{peft.MIXTRAL.get(leaf, leaf)}", {})[int(expert)] = path
        else:
            for side, (half,) in zip("ab", sides, strict=True):
                tensors[f"{_ours(path)}.lora_{side}"] = adapter.values(half)
    for path, experts in stacks.items():
        members = _stacked(path, experts, adapter.linears)
        for i, side in enumerate("ab"):
            stack = [adapter.values(modules[member][i][0]).swapaxes(-1, -2) for member in members]
            tensors[f"{path}.lora_{side}"] = np.stack(stack)
    config = {
        "fine_tune_type": "lora",
        "model": _text(adapter.config.get("base_model_name_or_path")),
        "num_layers": -1,  # all: the base's number is unknown here, and a layer without tensors stays as it is
        "lora_parameters": {
            "rank": first.rank,
            "scale": first.scale,
            "dropout": _dropout(adapter.config.get("lora_dropout")),
            "keys": sorted({target_of(name.rpartition(".")[0]) for name in tensors}),
        },
    }
    return config, tensors


def _ours(path: str) -> str:
    """Return mlx-lm's path of a module."""
    return _OURS + path.removeprefix(_THEIRS) if path.startswith(_THEIRS) else path


def _stacked(path: str, experts: Mapping[int, str], linears: Mapping[str, LinearShape]) -> list[str]:
    """Return the experts' modules in order. Raise ModelError unless they are 0, 1, 2 … and have one shape."""
    missing = set(range(max(experts) + 1)) - experts.keys()
    members = [experts[e] for e in sorted(experts)]
    if missing:
        refuse(WEIGHTS["peft"], members[0], f"has no partner for expert {min(missing)}; mlx-lm adapts all of {path}")
    if len({linears[m] for m in members}) > 1:
        refuse(WEIGHTS["peft"], members[0], "has another shape than the other experts; mlx-lm stacks them")
    return members


# --- writing -----------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _dropout(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1 else 0.0


def _write(target: Path, config: Mapping[str, Any], tensors: Tensors, weights: str) -> None:
    """Write all files into a folder beside the target, which takes the target's name when it is complete."""
    target = Path(os.path.abspath(target))
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        try:
            (scratch / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, scratch / weights)
            _flush(scratch / name for name in (CONFIG, weights))
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as e:
        refuse(str(target), None, f"cannot be written: {e.strerror}")


def _flush(paths: Iterable[Path]) -> None:
    for path in paths:
        with path.open("rb") as f:
            os.fsync(f.fileno())
