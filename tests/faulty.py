"""File operations that fail where a test wants them to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from mlx_tandem.files import Disk, remove_tree


class FaultFiles(Disk):
    """The disk, but operation `fail_at` (from 1 on; 0: none) and the `repeat` - 1 after it raise `error`.

    A write that fails has first written half of its bytes. A rename that fails has or has not happened, as `renamed`
    says.
    """

    def __init__(self, fail_at: int = 0, error: int = errno.ENOSPC, repeat: int = 1, renamed: bool = False) -> None:
        self.calls = 0
        self.fail_at, self.error, self.repeat, self.renamed = fail_at, error, repeat, renamed

    @property
    def failed(self) -> bool:
        return 0 < self.fail_at <= self.calls

    def _fails(self) -> bool:
        self.calls += 1
        return 0 < self.fail_at <= self.calls < self.fail_at + self.repeat

    def _check(self) -> None:
        if self._fails():
            self._raise()

    def _raise(self) -> None:
        raise OSError(self.error, os.strerror(self.error))

    def open(self, path: Path, flags: int) -> int:
        self._check()
        return super().open(path, flags)

    def read(self, fd: int, into: bytearray | memoryview, offset: int) -> int:
        self._check()
        return super().read(fd, memoryview(into)[: max(1, len(into) // 2)], offset)  # short reads are legal

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self._fails():
            super().write(fd, data[: len(data) // 2])
            self._raise()
        return super().write(fd, data[: max(1, len(data) // 2)])  # short writes are legal

    def sync(self, fd: int) -> None:
        self._check()
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._check()
        super().truncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        if self._fails():
            if self.renamed:
                super().rename(old, new)
            self._raise()
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self._check()
        super().link(old, new)

    def unlink(self, path: Path) -> None:
        self._check()
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        self._check()
        super().mkdir(path)

    def rmdir(self, path: Path) -> None:
        self._check()
        super().rmdir(path)


class ForgetfulFiles(Disk):
    """A disk that keeps in memory whatever was not synced, until `lose_power` forgets it: bytes that were written, and
    new names."""

    def __init__(self) -> None:
        self._bytes: dict[int, list[tuple[int, bytes]]] = {}  # by inode
        self._names: list[tuple[Path, Path]] = []
        self._made: dict[Path, int] = {}  # new files and folders: inode of the folder that they are in
        self._paths: dict[int, Path] = {}

    def open(self, path: Path, flags: int) -> int:
        is_new = bool(flags & os.O_CREAT) and not path.exists()
        fd = super().open(path, flags)
        self._paths[os.fstat(fd).st_ino] = path
        if is_new:
            self._note(path)
        return fd

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._note(path)

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self._note(new)

    def _note(self, made: Path) -> None:
        self._made[made] = made.parent.stat().st_ino

    def write(self, fd: int, data: bytes | memoryview) -> int:
        at = os.lseek(fd, 0, os.SEEK_CUR)
        os.lseek(fd, len(data), os.SEEK_CUR)
        self._bytes.setdefault(os.fstat(fd).st_ino, []).append((at, bytes(data)))
        return len(data)

    def read(self, fd: int, into: bytearray | memoryview, offset: int) -> int:
        size = os.fstat(fd).st_size
        data = bytearray(os.pread(fd, size, 0))
        for at, written in self._bytes.get(os.fstat(fd).st_ino, []):
            data.extend(bytes(max(0, at + len(written) - len(data))))
            data[at : at + len(written)] = written
        found = data[offset : offset + len(into)]
        memoryview(into)[: len(found)] = found
        return len(found)

    def sync(self, fd: int) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._names = [(old, new) for old, new in self._names if new.parent.stat().st_ino != status.st_ino]
            self._made = {path: folder for path, folder in self._made.items() if folder != status.st_ino}
        for at, data in self._bytes.pop(status.st_ino, []):
            try:
                os.pwrite(fd, data, at)
            except OSError:  # read-only: any descriptor of a file syncs it
                with self._paths[status.st_ino].open("r+b") as f:
                    f.seek(at)
                    f.write(data)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._names.append((old, new))
        self._made = {
            new / path.relative_to(old) if path.is_relative_to(old) else path: folder
            for path, folder in self._made.items()
            if path != old  # it has a name that can be lost, whatever became of this one
        }

    def lose_power(self) -> None:
        for path in self._made:
            remove_tree(path)
        for old, new in reversed(self._names):
            if new.exists():
                os.rename(new, old)
        self._bytes, self._names, self._made = {}, [], {}


def contents(folder: Path) -> dict[str, Any]:
    """Every file below it, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
