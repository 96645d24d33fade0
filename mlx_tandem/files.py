"""The only writer of durable files: what these functions have returned from survives a crash and a loss of power.

A file or folder appears under its name whole or not at all: it is written beside it under a name that starts with a
dot, brought to the drive, and renamed. Every file is 0600 and every folder 0700.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from mlx_tandem.errors import TandemError


class StorageError(TandemError):
    """What lies on disk cannot be used or written; the message names the file and says what helps."""

    code = "storage_error"


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """An OSError within is raised as StorageError about `path`."""
    try:
        yield
    except OSError as e:
        name = f" ({e.filename})" if e.filename and str(e.filename) != str(path) else ""
        raise StorageError(f"{path} cannot be used{name}: {e.strerror or e}") from e


class FileOps(Protocol):
    """The operations that durability rests on. Each raises OSError; tests make the n-th one fail."""

    def open(self, path: Path, flags: int) -> int: ...
    def read(self, fd: int, into: bytearray | memoryview, offset: int) -> int: ...
    def write(self, fd: int, data: bytes | memoryview) -> int: ...
    def sync(self, fd: int) -> None: ...
    def truncate(self, fd: int, size: int) -> None: ...
    def close(self, fd: int) -> None: ...
    def rename(self, old: Path, new: Path) -> None: ...
    def link(self, old: Path, new: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...
    def mkdir(self, path: Path) -> None: ...
    def rmdir(self, path: Path) -> None: ...


class Disk:
    """The real ones."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def read(self, fd: int, into: bytearray | memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Down to the drive's own medium: macOS's fsync stops at the drive's cache."""
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
                return
            except OSError as e:
                if e.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):  # a network drive has no such call
                    raise
        os.fsync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)


DISK = Disk()


def read_all(fd: int, into: bytearray | memoryview, offset: int, ops: FileOps = DISK) -> int:
    """How much of `into` the file could fill from `offset` on, however little one read gives."""
    rest, done = memoryview(into), 0
    while done < len(rest) and (count := ops.read(fd, rest[done:], offset + done)):
        done += count
    return done


def write_all(fd: int, data: bytes | memoryview, ops: FileOps = DISK) -> None:
    """All of `data`, however little one write takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[ops.write(fd, rest) :]


def create(path: Path, data: bytes | Iterable[bytes], ops: FileOps = DISK) -> None:
    """A new file with `data`, on the drive; its name is not yet, see `sync_folder`. Raises FileExistsError."""
    fd = ops.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for part in [data] if isinstance(data, bytes) else data:
            write_all(fd, part, ops)
        ops.sync(fd)
    finally:
        ops.close(fd)


def replace(path: Path, data: bytes | Iterable[bytes], ops: FileOps = DISK) -> None:
    """`path` holds `data` when this returns, and what it held before when it raises, unless only the last step, to
    bring the new name to the drive, has failed."""
    new = path.with_name(f".new-{path.name}")
    if new.exists():
        ops.unlink(new)
    try:
        create(new, data, ops)
        ops.rename(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            ops.unlink(new)
        raise
    sync_folder(path.parent, ops)


def sync_folder(path: Path, ops: FileOps = DISK) -> None:
    """The names in it to the drive."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY, ops)


def sync_file(path: Path, ops: FileOps = DISK) -> None:
    """What any process has written to it, to the drive."""
    _sync(path, os.O_RDONLY, ops)


def _sync(path: Path, flags: int, ops: FileOps) -> None:
    fd = ops.open(path, flags)
    try:
        ops.sync(fd)
    finally:
        ops.close(fd)


def cache_folder() -> Path:
    """The user's own, for what this program can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-tandem"


def make_folder(path: Path, ops: FileOps = DISK) -> None:
    """`path` and what is missing above it, durably. One that is there is left as it is."""
    if path.is_dir():
        return
    make_folder(path.parent, ops)
    ops.mkdir(path)
    sync_folder(path.parent, ops)


def remove_tree(path: Path, ops: FileOps = DISK) -> None:
    """`path` and all below it; nothing when it is not there. Links are removed, never followed."""
    if path.is_symlink() or path.is_file():
        ops.unlink(path)
    elif path.exists():
        for entry in path.iterdir():
            remove_tree(entry, ops)
        ops.rmdir(path)


def link_or_copy(old: Path, new: Path, ops: FileOps = DISK) -> None:
    """The regular file `old` under a second name; a copy where the file system has no links. On the drive."""
    try:
        ops.link(old, new)
    except OSError as e:
        if isinstance(e, FileExistsError):
            raise
        copy(old, new, ops)


def copy(old: Path, new: Path, ops: FileOps = DISK) -> None:
    """A new file with what `old` holds, on the drive."""
    with old.open("rb") as source:
        create(new, iter(lambda: source.read(1 << 20), b""), ops)


LOCK = ".lock"


class FolderLock:
    """One process at a time in a folder. The kernel lets go of it however the process ends.

    Raises StorageError, with the number of the process that has it, when it is taken.
    """

    def __init__(self, folder: Path) -> None:
        path = self._path = folder / LOCK
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "of unknown number"
            os.close(self._fd)
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StorageError(
                f"{folder} is in use by process {holder}: stop it, or choose another folder", code="folder_in_use"
            ) from e
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def held(self) -> bool:
        """Whether the folder under its name is still the one that was locked."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd))
        except OSError:
            return False

    def release(self) -> None:
        """Twice is once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
