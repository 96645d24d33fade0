"""The folder of a disk cache: made, recognised, locked. One that holds anything else is never touched."""

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
SECRET = "key"
DIGESTS = "digests.json"  # see kv/weights.py

_SEGMENT = re.compile(r"segment-(\d{8})\.kv")
_KIND = "mlx-tandem KV cache"
_SETUP = {LOCK, *(new + name for name in (SECRET, DIGESTS) for new in ("", ".new-")), f".new-{MANIFEST}"}
"""What may lie in a folder that has no manifest yet."""


class Manifest(Struct, frozen=True):
    kind: str
    format: int


def default_folder() -> Path:
    return files.cache_folder() / "kv-cache"


class CacheFolder:
    """A cache's folder, locked by this process, 0700. `secret` keys the tags of all that is in it.

    Raises StorageError when it is another's (`foreign_folder`), in use by another process, whose number is in the
    message (`folder_in_use`), of another format (`unknown_format`), or cannot be written.
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
                ours = self._recognise(any_format)  # again: another process may have begun one
                self.secret = self._read_secret() if ours else b""
                if not create:
                    return
                os.chmod(self.path, 0o700)
                if not self.secret:  # what was tagged with a lost one can never be used and goes with the first scan
                    self.secret = secrets.token_bytes(32)
                    files.replace(self.path / SECRET, self.secret, ops)
                if not ours:
                    files.replace(self.path / MANIFEST, msgspec.json.encode(Manifest(_KIND, FORMAT)), ops)
            except BaseException:
                self._lock.release()
                raise

    def held(self) -> bool:
        """Whether the name still leads to the folder that was locked."""
        return self._lock.held()

    def segments(self) -> dict[int, Path]:
        """By number."""
        return {int(m[1]): p for p in self.path.iterdir() if (m := _SEGMENT.fullmatch(p.name))}

    def segment(self, number: int) -> Path:
        return self.path / f"segment-{number:08}.kv"

    def clear(self, ops: FileOps = DISK) -> None:
        """Everything that a cache has put there is gone; the folder and whatever else lies in it stay."""
        with files.storage(self.path):
            for path in [*self.segments().values(), *(self.path / name for name in sorted(_SETUP - {LOCK}))]:
                if path.exists():
                    ops.unlink(path)
            ops.unlink(self.path / MANIFEST)  # last: until then the folder is known as a cache's

    def close(self) -> None:
        self._lock.release()

    def _check_owner(self) -> None:
        if self.path.stat().st_uid != os.geteuid():
            raise StorageError(f"{self.path} belongs to another user: choose another folder", code="foreign_folder")

    def _recognise(self, any_format: bool) -> bool:
        """Whether there is a cache; False: there is nothing."""
        try:
            manifest = msgspec.json.decode((self.path / MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError:
            if {p.name for p in self.path.iterdir()} <= _SETUP:
                return False
            manifest = None
        except msgspec.MsgspecError:
            manifest = None
        if manifest is None or manifest.kind != _KIND:
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
