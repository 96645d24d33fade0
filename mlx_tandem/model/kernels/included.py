"""Text of kernels in files that the compiler includes.

MLX hashes all that a kernel was made from whenever it launches it: most of a microsecond for 6 kB, several hundred
times a step. Of a file it sees the name, which says what is in it.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from mlx_tandem import files

LOOK_SECONDS = 1.0
"""That a file is believed to be there: a step that is not compiled asks a thousand times."""


class Included:
    """`line` stands for `text` in a source. It is the text itself where no file can be had."""

    def __init__(self, text: str, folder: Path | None = None):
        """In `folder`, the user's cache if that is not given."""
        self._data = text.encode()
        folder = files.cache_folder() / "sources" if folder is None else folder
        self._path = folder.absolute() / f"{hashlib.sha256(self._data).hexdigest()}.h"
        self._looked = -LOOK_SECONDS
        self._is_used = not any(c in str(self._path) for c in '"\\\n') and self._write()
        self.line = f'#include "{self._path}"\n' if self._is_used else text

    def keep(self) -> None:
        """To be called before anything is compiled: somebody may have emptied the cache."""
        now = time.monotonic()
        if self._is_used and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._write()

    def _write(self) -> bool:
        """Whether the file is there, and what it should be."""
        try:
            if not self._path.exists() or self._path.read_bytes() != self._data:
                files.make_folder(self._path.parent)
                files.replace(self._path, self._data)
        except OSError:
            return False
        return True
