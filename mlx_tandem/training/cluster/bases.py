"""The identity of a base model: one SHA-256 over the names and contents of the files that its answers depend on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlx_tandem.errors import ModelError

SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Endings of the files that count: weights, settings, tokenizer and templates. Others, such as a README, do not."""

THREADS = 8
"""Files that are read at once."""


def digest(folder: Path) -> str:
    """Return the SHA-256 of a model folder. Reads all of its weights. Raises ModelError for one that cannot be read."""
    try:
        paths = sorted(_files(folder), key=lambda path: path.name)
        with ThreadPoolExecutor(THREADS) as threads:
            parts = list(threads.map(_hash, paths))
    except OSError as e:
        raise ModelError(f"{e.filename or folder} cannot be read: {e.strerror}", param="model") from e
    whole = hashlib.sha256(b"mlx-tandem base 1\n")
    for path, part in zip(paths, parts, strict=True):
        whole.update(f"{part} {path.name}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as there:
        for entry in there:
            if entry.name.endswith(SUFFIXES) and entry.is_file():
                yield Path(entry.path)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
