"""Puts the text of kernels into files that the compiler includes.

MLX hashes the whole source of a kernel whenever it launches it, which takes most of a microsecond for 6 kB, several
hundred times a step. With an include it hashes the file's name only, and the name is a digest of the text.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from mlx_tandem import files

LOOK_SECONDS = 1.0
"""Seconds for which a file is assumed to be there: a step that is not compiled asks a thousand times."""


class Included:
    """A text of a kernel: `line` is the line of source that includes it, or the text itself if no file can be
    written.
    """

    def __init__(self, text: str, folder: Path | None = None):
        """Write `text` into `folder`, by default the user's cache folder."""
        self._data = text.encode()
        folder = files.cache_folder() / "sources" if folder is None else folder
        self._path = folder.absolute() / f"{hashlib.sha256(self._data).hexdigest()}.h"
        self._looked = -LOOK_SECONDS
        self._is_used = not any(c in str(self._path) for c in '"\\\n') and self._write()
        self.line = f'#include "{self._path}"\n' if self._is_used else text

    def keep(self) -> None:
        """Write the file again if it is gone; call it before anything is compiled, since a user may empty the cache."""
        now = time.monotonic()
        if self._is_used and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._write()

    def _write(self) -> bool:
        """Return whether the file exists with the right contents, after writing it if need be."""
        try:
            if not self._path.exists() or self._path.read_bytes() != self._data:
                files.make_folder(self._path.parent)
                files.replace(self._path, self._data)
        except OSError:
            return False
        return True
