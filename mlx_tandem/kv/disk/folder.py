"""The folder of a disk cache: created, recognised, locked. A folder that holds anything else is never touched."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.files import DISK, LOCK, FileOps, FolderLock, StorageError
from mlx_tandem.kv.disk.records import FORMAT

MANIFEST = "manifest.json"
"""File that makes a folder a cache's."""

SECRET = "key"
"""File with the key of the records' tags."""

DIGESTS = "digests.json"
"""File with digests of models that were read before: see kv/weights.py."""


_SEGMENT = re.compile(r"segment-(\d{8})\.kv")
_KIND = "mlx-tandem KV cache"
_SETUP = {LOCK, *(new + name for name in (SECRET, DIGESTS) for new in ("", ".new-")), f".new-{MANIFEST}"}
"""Names that may exist in a folder that has no manifest yet."""


class Manifest(Struct, frozen=True):
    """The contents of the manifest."""

    kind: str
    format: int


def default_folder() -> Path:
    """Return the cache's folder if none is configured."""
    return files.cache_folder() / "kv-cache"


class CacheFolder:
    """A cache's folder with mode 0700, locked by this process. `secret` is the key of all records' tags.

    Raises StorageError if the folder belongs to something else (`foreign_folder`), is in use by another process,
    whose number is in the message (`folder_in_use`), has another format (`unknown_format`), or cannot be written.
    """

    def __init__(self, path: Path, ops: FileOps = DISK, create: bool = True, any_format: bool = False) -> None:
        with files.storage(path):
            if create:
                files.make_folder(path, ops)
            self.path = path.resolve()
            self._check_owner()
            if not self._recognise(any_format) and not create:
                raise StorageError(f"{path} holds no KV cache", code="foreign_folder")
            self._lock = FolderLock(self.path)
            try:
                ours = self._recognise(any_format)  # checked again, since another process may have made one meanwhile
                self.secret = self._read_secret() if ours else b""
                if not create:
                    return
                os.chmod(self.path, 0o700)
                if not self.secret:  # records tagged with a lost key cannot be used; the first scan removes them
                    self.secret = secrets.token_bytes(32)
                    files.replace(self.path / SECRET, self.secret, ops)
                if not ours:
                    files.replace(self.path / MANIFEST, msgspec.json.encode(Manifest(_KIND, FORMAT)), ops)
            except BaseException:
                self._lock.release()
                raise

    def held(self) -> bool:
        """Return whether the name still leads to the folder that was locked."""
        return self._lock.held()

    def segments(self) -> dict[int, Path]:
        """Return the files of all segments by number."""
        return {int(m[1]): p for p in self.path.iterdir() if (m := _SEGMENT.fullmatch(p.name))}

    def segment(self, number: int) -> Path:
        """Return the file of segment `number`."""
        return self.path / f"segment-{number:08}.kv"

    def clear(self, ops: FileOps = DISK) -> None:
        """Remove every file that a cache has put there; the folder and all other files stay."""
        with files.storage(self.path):
            for path in [*self.segments().values(), *(self.path / name for name in sorted(_SETUP - {LOCK}))]:
                if path.exists():
                    ops.unlink(path)
            ops.unlink(self.path / MANIFEST)  # last, because without it the folder is not recognised as a cache's

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _check_owner(self) -> None:
        if self.path.stat().st_uid != os.geteuid():
            raise StorageError(f"{self.path} belongs to another user: choose another folder", code="foreign_folder")

    def _recognise(self, any_format: bool) -> bool:
        """Return whether the folder holds a cache; False if it is empty, or if it holds a cache whose manifest is
        damaged or missing. Raise StorageError if it holds anything else.
        """
        try:
            manifest = msgspec.json.decode((self.path / MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError:
            if {p.name for p in self.path.iterdir()} <= _SETUP:
                return False
            manifest = None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            manifest = None
        if manifest is None or manifest.kind != _KIND:
            if self._is_left():
                return False
            raise StorageError(
                f"{self.path} holds files that are no KV cache: choose a new or empty folder", code="foreign_folder"
            )
        if manifest.format != FORMAT and not any_format:
            raise StorageError(
                f"{self.path} holds a KV cache of format {manifest.format}, this version has {FORMAT}: choose another "
                f"folder, or empty it with `tandem cache clear`",
                code="unknown_format",
            )
        return True

    def _is_left(self) -> bool:
        """Return whether nothing but a cache can have made the folder: it has a lock and a key, and only such files."""
        names = {p.name for p in self.path.iterdir()}
        others = {name for name in names - _SETUP - {MANIFEST} if not _SEGMENT.fullmatch(name)}
        return {LOCK, SECRET} <= names and not others and bool(self._read_secret())

    def _read_secret(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self.path / SECRET, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                secret = os.read(fd, 33)
            finally:
                os.close(fd)
            if len(secret) == 32:
                return secret
        return b""
