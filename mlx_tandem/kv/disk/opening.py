"""Opens a disk cache on a thread of its own, since finding out which model its blocks belong to takes a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from mlx_tandem.config import DiskCacheConfig
from mlx_tandem.errors import TandemError
from mlx_tandem.kv.disk.cache import DiskCache, open_folder
from mlx_tandem.kv.disk.folder import DIGESTS
from mlx_tandem.kv.hashing import Namespace
from mlx_tandem.kv.weights import folder_digest

log = logging.getLogger(__name__)


class Opening:
    """A disk cache that is being opened. The folder is locked at once; the cache exists when the model's files are
    hashed.

    `namespace` is everything that the blocks have in common but the model. `wake` is called on another thread when
    this or the cache has something to `poll`. Raises StorageError if the folder cannot be used: see CacheFolder.
    """

    def __init__(self, config: DiskCacheConfig, model: Path, namespace: Namespace, wake: Callable[[], None]) -> None:
        self._config, self._model, self._namespace, self._wake = config, model, namespace, wake
        self._folder = open_folder(config)
        self.cache: DiskCache | None = None
        self._made: tuple[DiskCache, bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._open, name="kv-disk-opening", daemon=True).start()

    def poll(self) -> tuple[DiskCache, bytes] | None:
        """Return the cache and its base once it is open; None before, and None after the first time."""
        if self._made is None or self.cache is not None:
            return None
        self.cache = self._made[0]
        return self._made

    def close(self, timeout: float) -> None:
        """Close the cache; its queue is written if the drive takes it within `timeout` seconds."""
        with self._lock:
            self._closed = True
            made = self._made
            if made is None:
                self._folder.close()
        if made is not None:
            made[0].close(timeout)

    def _open(self) -> None:
        try:
            digest = folder_digest(self._model, self._folder.path / DIGESTS)
            base = replace(self._namespace, weights=digest).digest()
            with self._lock:
                if self._closed:
                    return
                self._made = DiskCache(self._config, base, self._wake, folder=self._folder), base
        except (OSError, TandemError) as e:
            log.warning("nothing is kept on the drive: %s", e)
        else:
            self._wake()
