"""The identity of a base model: one SHA-256 over the names and contents of the files that its answers depend on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
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
        paths = list(_files(folder))
        with ThreadPoolExecutor(THREADS) as threads:
            hashes = dict(zip((path.name for path in paths), threads.map(hash_file, paths), strict=True))
    except OSError as e:
        raise ModelError(f"{e.filename or folder} cannot be read: {e.strerror}", param="model") from e
    return combined(hashes)


def combined(hashes: Mapping[str, str]) -> str:
    """Return the digest of a folder whose files, by name, have these SHA-256."""
    whole = hashlib.sha256(b"mlx-tandem base 1\n")
    for name, sha256 in sorted(hashes.items()):
        whole.update(f"{sha256} {name}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as there:
        for entry in there:
            if entry.name.endswith(SUFFIXES) and entry.is_file():
                yield Path(entry.path)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
