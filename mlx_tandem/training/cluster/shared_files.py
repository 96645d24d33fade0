"""The files of adapters that a leader shows to others, each by its hash only."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from mlx_tandem import limits
from mlx_tandem.adapters.formats import CONFIG, WEIGHTS
from mlx_tandem.adapters.formats.files import configuration, directory, format_of, read_exactly, regular_file
from mlx_tandem.errors import ModelError, NotFound
from mlx_tandem.training.cluster.wire import CHUNK, File, FileName
from mlx_tandem.types import AdapterSource


class Place(NamedTuple):
    """Where a file lies."""

    source: AdapterSource
    file: File


class SharedFiles:
    """The files of the versions that are shared. Reading waits for the drive."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}  # by SHA-256

    def describe(self, source: AdapterSource) -> tuple[File, ...]:
        """Return the files of an adapter's folder, which are shown from now on. Raises ModelError."""
        with directory(Path(source.path), None if source.root is None else Path(source.root)) as folder:
            kind = format_of(folder, configuration(folder, source.follow_links))
            names: tuple[FileName, ...] = (CONFIG, WEIGHTS[kind])  # type: ignore[assignment]
            files = tuple(File(name, *_hash(folder, name, source.follow_links)) for name in names)
        self._places |= {file.sha256: Place(source, file) for file in files}
        return files

    def keep(self, hashes: set[str]) -> None:
        """Show no other files than these."""
        self._places = {sha256: place for sha256, place in self._places.items() if sha256 in hashes}

    def read(self, sha256: str, offset: int) -> bytes:
        """Return the next bytes of a file from `offset` on, at most CHUNK. Raises NotFound for one that is not shown.

        Whoever gets the last bytes compares the whole with its hash.
        """
        place = self._places.get(sha256)
        if place is None:
            raise NotFound("there is no such file", param="sha256")
        source, file = place
        try:
            with (
                directory(Path(source.path), None if source.root is None else Path(source.root)) as folder,
                regular_file(folder, file.name, limits.MAX_ADAPTER_BYTES, source.follow_links) as fd,
            ):
                size = min(CHUNK, os.fstat(fd).st_size - offset)
                return read_exactly(fd, offset, size, file.name).tobytes() if size > 0 else b""
        except ModelError as e:
            raise NotFound(f"the file is no longer there: {e.message}", param="sha256") from e


def _hash(folder: int, name: str, follow_links: bool) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file in an open folder."""
    found = hashlib.sha256()
    with regular_file(folder, name, limits.MAX_ADAPTER_BYTES, follow_links) as fd:
        size = os.fstat(fd).st_size
        for offset in range(0, size, CHUNK):
            found.update(read_exactly(fd, offset, min(CHUNK, size - offset), name).data)
    return size, found.hexdigest()
