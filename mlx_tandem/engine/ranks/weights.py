"""Notices ranks that have the weights of different models, whose sums would be those of neither."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlx_tandem.errors import ModelError

SAMPLES = 64
"""Places of a file that are read, spread over all of it. Training changes nearly every number of a model."""

SAMPLE_BYTES = 4096
"""Bytes that are read at each place."""


def weights_digest(folder: Path) -> str:
    """Return a digest of the names and sizes of a folder's files of weights, and of samples of what they hold.

    Two models of one shape have different digests; a few changed bytes may go unnoticed. Raises ModelError for a file
    that cannot be read.
    """
    whole = hashlib.sha256()
    try:
        for path in sorted(folder.glob("model*.safetensors")):
            with path.open("rb") as file:
                size = file.seek(0, 2)
                whole.update(f"{size} {path.name}\n".encode(errors="surrogateescape"))
                for place in range(SAMPLES):
                    file.seek(max(size - SAMPLE_BYTES, 0) * place // (SAMPLES - 1))
                    whole.update(file.read(SAMPLE_BYTES))
    except OSError as e:
        raise ModelError(f"{e.filename or folder} cannot be read: {e.strerror}", param="model") from e
    return whole.hexdigest()
