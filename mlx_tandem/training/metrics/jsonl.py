"""The JSONL file of metrics: one object a line, bounded by rotation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlx_tandem.training.metrics.writer import Passing, Sample

MOST_BYTES = 64 << 20
"""Bytes of a file from which a new one is begun. The one before is kept as NAME.1, and older ones are removed."""


class JsonLines:
    """Appends lines to a file. Each is written at once, so that the file can be followed while it grows."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.time):
        """Open the file, which may exist. `clock` returns Unix seconds. Raises OSError."""
        self._path, self._most, self._clock = path, most_bytes, clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd, self._size = self._opened()
        self._is_cut = False  # whether the last line was not written to its end
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._append(b"\n")  # an earlier process ended inside a line

    def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        self._write({"time": self._clock(), "kind": kind, "step": step, **values})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append a line for each sample."""
        for sample in samples:
            known = {name: value for name, value in msgspec.to_builtins(sample).items() if value is not None}
            self._write({"time": self._clock(), "kind": "sample", "step": step, **known})

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _opened(self) -> tuple[int, int]:
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return fd, os.fstat(fd).st_size

    def _write(self, row: Mapping[str, Any]) -> None:
        """Append one line. Raises Passing when the drive does not take it; later ones may be taken."""
        line = msgspec.json.encode(row) + b"\n"
        try:
            if self._size and self._size + len(line) > self._most:
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
                old = self._fd
                self._fd, self._size = self._opened()
                self._is_cut = False
                os.close(old)
            self._append(b"\n" + line if self._is_cut else line)
        except OSError as e:
            raise Passing(e.strerror or str(e)) from e

    def _append(self, line: bytes) -> None:
        while line:
            written = os.write(self._fd, line)
            self._size += written
            line = line[written:]
            self._is_cut = bool(line)
