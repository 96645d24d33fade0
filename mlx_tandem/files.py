"""The only writer of durable files but for SQLite: when one of these functions has returned, its result survives a
crash or a power loss.

A file or folder appears under its name whole or not at all: it is written under a name that starts with a dot,
brought to the drive, and renamed. Every file is 0600 and every folder 0700.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from mlx_tandem.errors import TandemError

NO_HOME = Path("/nonexistent")
"""Debian's home folder for users without one."""

MOST_NAME_BYTES = 240
"""Most bytes of the name of a result. They leave room for the longer name of the temporary file."""


class StorageError(TandemError):
    """A file on disk cannot be used or written; the message names it and says what helps."""

    code = "storage_error"


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """Raise an OSError inside the block as StorageError about `path`."""
    try:
        yield
    except OSError as e:
        name = f" ({e.filename})" if e.filename and str(e.filename) != str(path) else ""
        raise StorageError(f"{path} cannot be used{name}: {e.strerror or e}") from e


class FileOps(Protocol):
    """The file operations that durability depends on. Each raises OSError; tests make the n-th one fail."""

    def open(self, path: Path, flags: int) -> int:
        """Return a descriptor of the file, which is created with mode 0600 if `flags` say so. Links are not
        followed.
        """

    def read(self, fd: int, into: bytearray | memoryview, offset: int) -> int:
        """Read into `into` from `offset` on; return how many bytes were read."""

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Write `data` at the descriptor's position; return how many bytes were written."""

    def sync(self, fd: int) -> None:
        """Bring the file to the drive's own medium."""

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file, or extend it by zeros, to `size` bytes."""

    def close(self, fd: int) -> None:
        """Close the descriptor."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename `old` to `new`, which is replaced if it exists."""

    def link(self, old: Path, new: Path) -> None:
        """Give the file `old` a second name `new`."""

    def unlink(self, path: Path) -> None:
        """Remove a name of a file."""

    def mkdir(self, path: Path) -> None:
        """Make a folder with mode 0700."""

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""


class Disk:
    """The file operations of this system."""

    def open(self, path: Path, flags: int) -> int:
        """Return a descriptor of the file."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def read(self, fd: int, into: bytearray | memoryview, offset: int) -> int:
        """Read into `into` from `offset` on."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Write `data`."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Bring the file to the drive's own medium: macOS's fsync would stop at the drive's cache."""
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
                return
            except OSError as e:
                if e.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):  # a network drive has no such call
                    raise
        os.fsync(fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cut or extend the file."""
        os.ftruncate(fd, size)

    def close(self, fd: int) -> None:
        """Close the descriptor."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder."""
        os.rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name."""
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Remove a name of a file."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make a folder."""
        os.mkdir(path, 0o700)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


DISK = Disk()


def read_all(fd: int, into: bytearray | memoryview, offset: int, ops: FileOps = DISK) -> int:
    """Fill `into` from `offset` on, in as many reads as it takes; return how many bytes there were."""
    rest, done = memoryview(into), 0
    while done < len(rest) and (count := ops.read(fd, rest[done:], offset + done)):
        done += count
    return done


def write_all(fd: int, data: bytes | memoryview, ops: FileOps = DISK) -> None:
    """Write all of `data`, in as many writes as it takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[ops.write(fd, rest) :]


def create(path: Path, data: bytes | Iterable[bytes], ops: FileOps = DISK) -> None:
    """Write a new file with `data` to the drive. Raise FileExistsError if the name is taken.

    The name itself is on the drive only after `sync_folder`.
    """
    fd = ops.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for part in [data] if isinstance(data, bytes) else data:
            write_all(fd, part, ops)
        ops.sync(fd)
    finally:
        ops.close(fd)


def replace(path: Path, data: bytes | Iterable[bytes], ops: FileOps = DISK) -> None:
    """Write `data` to `path` so that it holds either the old or the new contents, never a part.

    If this raises, `path` holds what it held before, unless only the last operation, which brings the new name to
    the drive, has failed.
    """
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
    """Bring the names in a folder to the drive."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY, ops)


def sync_file(path: Path, ops: FileOps = DISK) -> None:
    """Bring everything that any process has written to a file to the drive."""
    _sync(path, os.O_RDONLY, ops)


def _sync(path: Path, flags: int, ops: FileOps) -> None:
    fd = ops.open(path, flags)
    try:
        ops.sync(fd)
    finally:
        ops.close(fd)


def cache_folder() -> Path:
    """Return the user's own folder for files that this program can make again. It may be impossible to make it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "mlx-tandem"


def own_adapters() -> Path:
    """Return the user's own folder of adapters for the built-in model. It may be impossible to make it.

    A server of that model reads from it if it has no other adapter root.
    """
    return Path(os.environ.get("XDG_DATA_HOME") or _home() / ".local" / "share") / "mlx-tandem" / "adapters"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor the system's list of users has a home
        return NO_HOME


def make_folder(path: Path, ops: FileOps = DISK) -> None:
    """Make `path` and its missing parents durably; an existing folder is left as it is."""
    if path.is_dir():
        return
    make_folder(path.parent, ops)
    ops.mkdir(path)
    sync_folder(path.parent, ops)


def remove_tree(path: Path, ops: FileOps = DISK) -> None:
    """Remove `path` and everything below it, if it exists. Links are removed, never followed."""
    if path.is_symlink() or path.is_file():
        ops.unlink(path)
    elif path.exists():
        for entry in path.iterdir():
            remove_tree(entry, ops)
        ops.rmdir(path)


def link_or_copy(old: Path, new: Path, ops: FileOps = DISK) -> None:
    """Give the regular file `old` a second name on the drive, or copy it where the file system has no links."""
    try:
        ops.link(old, new)
    except OSError as e:
        if isinstance(e, FileExistsError):
            raise
        copy(old, new, ops)


def copy(old: Path, new: Path, ops: FileOps = DISK) -> None:
    """Write a new file with the contents of `old` to the drive."""
    with old.open("rb") as source:
        create(new, iter(lambda: source.read(1 << 20), b""), ops)


LOCK = ".lock"
"""Name of the lock file in a folder."""


class FolderLock:
    """A lock that lets one process at a time use a folder. The kernel releases it however the process ends.

    Taking it raises StorageError with the number of the process that holds it.
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
        """Return whether the folder under this name is still the one that was locked."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd))
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_usable(folder: Path) -> None:
    """Raise StorageError if another process has taken a folder, or if it can be neither written nor made."""
    with storage(folder):
        if folder.is_dir():
            FolderLock(folder).release()
            return
        if folder.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    _check_room(folder)


def check_writable(file: Path) -> None:
    """Raise StorageError if a file can be neither written nor made. Nothing is changed."""
    with storage(file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if file.is_socket():  # which cannot be opened by its name
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        if file.exists():
            if not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        if len(os.fsencode(file.name)) > MOST_NAME_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    _check_room(file)


def _check_room(path: Path) -> None:
    """Raise StorageError unless a file can be made in the nearest folder above `path` that exists."""
    with storage(path):
        above = next(parent for parent in Path(os.path.realpath(path)).parents if parent.exists())
        try:
            tempfile.TemporaryFile(dir=above).close()
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(above)) from e
