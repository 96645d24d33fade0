"""The models of this machine: the built-in one, those in the hub's cache, and those in folders; and what fits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_tandem.config import EngineConfig, ModelConfig
from mlx_tandem.engine.budget import sequences
from mlx_tandem.errors import ModelError, TandemError
from mlx_tandem.model_folder import CONFIG
from mlx_tandem.printable import printable
from mlx_tandem.small_files import read_object
from mlx_tandem.types import MemoryBudget

LENGTH = 8192
"""Tokens of the sequences that are counted, if the model takes as many."""

BYTES_EACH = 4.5 / 8
"""Bytes of a parameter in 4 bits, with the scales of its group."""

SHARE = 0.5
"""Share of the memory that the weights of a model that is recommended have at most; the rest is for its cache."""

RECOMMENDED = {
    "mlx-community/Qwen3-32B-4bit": 32.8e9,
    "mlx-community/Qwen3-14B-4bit": 14.8e9,
    "mlx-community/Qwen3-8B-4bit": 8.2e9,
    "mlx-community/Qwen3-4B-4bit": 4.0e9,
    "mlx-community/Qwen3-1.7B-4bit": 1.7e9,
    "mlx-community/Qwen3-0.6B-4bit": 0.6e9,
}
"""Models that are recommended, the largest first, with their numbers of parameters."""


@dataclass(frozen=True)
class Listed:
    """A model on this machine."""

    name: str
    """The word by which `tandem serve` finds it; empty for the built-in model, which needs no name."""
    folder: str
    bytes: int
    """Size of its weights in their files."""
    family: str
    bits: int | None
    """Bits of its quantised weights; None if they are not quantised."""
    fits: bool
    reason: str = ""
    """Why it does not."""
    tokens: int = 0
    """Length of the sequences that were counted."""
    sequences: int = 0
    """How many of that length fit at once, of those that a server runs at once if it is not told otherwise."""


def found(folders: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the names and folders of the models in the hub's cache, after those in `folders`."""
    for folder in folders:
        for below in sorted(folder.iterdir()):
            if _is_model(below):
                yield str(below), below
    yield from _cached()


def has_models(folder: Path) -> bool:
    """Return whether a folder is no model itself but has models in it."""
    try:
        return folder.is_dir() and not (folder / CONFIG).exists() and any(map(_is_model, folder.iterdir()))
    except OSError:
        return False  # It cannot be read.


def _is_model(folder: Path) -> bool:
    try:
        return (folder / CONFIG).is_file() and any(folder.glob("*.safetensors"))
    except OSError:
        return False  # It cannot be read.


def _cached() -> Iterator[tuple[str, Path]]:
    """Yield the ids and folders of the models in the hub's cache, by what its branch `main` was when it was fetched."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        newest = max(repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified), default=None)
        if repository.repo_type == "model" and newest is not None and _is_model(newest.snapshot_path):
            yield repository.repo_id, newest.snapshot_path


def listed(folders: Iterable[Path]) -> tuple[list[Listed], int, str]:
    """Return the models of this machine, the bytes that a server may use, and why it may use no more."""
    from mlx_tandem import demo
    from mlx_tandem.planning import plans

    models = [("", demo.MODEL_PATH), *found(folders)]
    engines = [EngineConfig(model=ModelConfig(path=str(folder))) for _, folder in models]
    limit, reason, planned = plans(engines)
    rows = [_listed(name, engine, plan) for (name, _), engine, plan in zip(models, engines, planned, strict=True)]
    return rows, limit, reason


def _listed(name: str, engine: EngineConfig, plan: tuple[MemoryBudget, int] | TandemError) -> Listed:
    folder = Path(engine.model.path)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    family, bits = _described(folder)
    if isinstance(plan, TandemError):
        return Listed(name, str(folder), weights, family, bits, fits=False, reason=plan.message)
    memory, longest = plan
    length = min(LENGTH, longest)
    count = min(sequences(memory, engine.cache.block_size, length), engine.scheduler.max_num_seqs)
    return Listed(name, str(folder), weights, family, bits, fits=True, tokens=length, sequences=count)


def _described(folder: Path) -> tuple[str, int | None]:
    """Return the family of a model and the bits of its weights, as far as its folder says them."""
    try:
        settings = read_object(folder / CONFIG) or {}
    except ModelError:
        return "", None
    quantised = settings.get("quantization") or {}
    bits = quantised.get("bits") if isinstance(quantised, dict) else None
    return str(settings.get("model_type") or ""), bits if isinstance(bits, int) else None


def recommended(limit: int) -> tuple[str, int] | None:
    """Return the id and the size in bytes of the largest model that is recommended for so much memory; None for none.

    The sizes follow from the numbers of parameters.
    """
    sizes = ((name, int(parameters * BYTES_EACH)) for name, parameters in RECOMMENDED.items())
    return next(((name, size) for name, size in sizes if size <= SHARE * limit), None)


def show(folders: Iterable[Path], as_json: bool) -> None:
    """Print the models of this machine, and which one is recommended for its memory."""
    rows, limit, reason = listed(folders)
    advice = recommended(limit)
    if as_json:
        advised = None if advice is None else {"id": advice[0], "bytes": advice[1]}
        said = {"models": [asdict(row) for row in rows], "memory": limit, "memory_reason": reason}
        print(json.dumps(said | {"recommended": advised}, indent=2))
        return
    from rich.table import Table

    from mlx_tandem.cli.console import output

    table = Table(box=None, pad_edge=False)
    for title in ("model", "GB", "bits", "sequences that fit"):
        table.add_column(title, overflow="fold")
    for row in rows:
        fits = f"{row.sequences} of {row.tokens:,} tokens" if row.fits else f"none: {row.reason}"
        size = f"{row.bytes / 1e9:.2f}"
        table.add_row(*(printable(text) for text in (row.name or "(built in)", size, _bits(row), fits)))
    console = output()
    console.print(table)
    lines = [f"A server may use {limit / 1e9:.1f} GB here: {reason}."]
    if advice is not None:
        lines.append(f"Recommended by size: {advice[0]} ({advice[1] / 1e9:.1f} GB); tandem pull {advice[0]}")
    for line in lines:
        console.print(printable(line), soft_wrap=not console.is_terminal, highlight=False)


def _bits(row: Listed) -> Any:
    return "" if row.bits is None else str(row.bits)
