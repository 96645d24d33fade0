"""The adapter root, which holds adapter folders. Names and paths from callers never lead outside of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mlx_tandem.adapters import CONFIG
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.printable import printable
from mlx_tandem.types import AdapterSource

MAX_PATH = 4096  # characters


class AdapterRoot:
    """A folder of adapter folders. If the settings give an empty `path`, there is none and nothing is found."""

    def __init__(self, path: str):
        given = os.path.abspath(path) if path else None
        self.path = os.path.realpath(given) if given else None
        self._spellings = (self.path, given)  # Callers may spell the root with or without its symbolic links.

    def find(self, name: str) -> AdapterSource | None:
        """Return the adapter folder with exactly this name, which has to be a legal adapter name; None if missing."""
        if self.path is None:
            return None
        folder = os.path.join(self.path, name)
        if not os.path.isfile(os.path.join(folder, CONFIG)):
            return None
        with os.scandir(self.path) as there:  # On a disk that ignores case, `isfile` accepts other spellings, too.
            return AdapterSource(folder, self.path) if any(e.name == name for e in there) else None

    def resolve(self, path: str) -> AdapterSource:
        """Return the folder at `path`, which is absolute or relative to the root or to the server's working folder.

        Raises InvalidRequest naming `path` unless the folder lies under the root.
        """
        if self.path is None:
            raise InvalidRequest(
                "this server takes no paths: it was started without --adapter-root", param="path", code="no_paths"
            )
        if not path or printable(path, MAX_PATH) != path:
            raise InvalidRequest("path must name a folder, without control characters", param="path")
        places = [os.path.normpath(os.path.join(start, path)) for start in (self.path, os.getcwd())]
        inside = [
            os.path.join(self.path, os.path.relpath(place, root))
            for place in places
            for root in self._spellings
            if root is not None and os.path.commonpath((place, root)) == root and place != root
        ]
        if not inside:
            raise InvalidRequest("path must lie under the server's adapter root", param="path", code="no_paths")
        return AdapterSource(next((p for p in inside if os.path.isdir(p)), inside[0]), self.path)

    def folders(self) -> Iterator[tuple[str, AdapterSource]]:
        """Yield every adapter folder with its name, which need not be legal.

        Raises InvalidRequest when the root cannot be read.
        """
        if self.path is None:
            return
        try:
            with os.scandir(self.path) as there:
                names = [e.name for e in there if os.path.isfile(os.path.join(e.path, CONFIG))]
        except OSError as e:
            problem = f"the adapter root {self.path} cannot be read: {e.strerror}"
            raise InvalidRequest(problem, param="adapter_root") from e
        for name in names:
            yield name, AdapterSource(os.path.join(self.path, name), self.path)
