"""The write-ahead log of learning: every trajectory and every update, on the drive before anything follows from it.

One file at a time, `journal-NNNNNN.log`, with all that has happened since one checkpoint. It appears whole, with what
is carried over from the one before it; only then that one goes. What is not whole of the last write to a file was never
acknowledged and is cut off when the file is opened. Anything else that is wrong is an error, and nothing is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from mlx_tandem import files
from mlx_tandem.files import DISK, FileOps, StorageError
from mlx_tandem.training.open_trajectories import OpenTrajectories
from mlx_tandem.training.store import records
from mlx_tandem.training.store.records import Record, Records
from mlx_tandem.training.trajectories import Trajectory

LARGE = 64 << 20
"""Bytes from which a file is worth beginning again."""

BEHIND = 64 << 20
"""Bytes that may wait in memory for a drive that takes none, before nothing more is collected."""

_NAME = re.compile(r"journal-(\d{6,})\.log")


class Journal:
    """Appends are cheap and come in the order of the calls; `flush` makes them durable, all waiters with one sync.

    Used on one event loop; files are written on threads. After a failed write nothing is lost: what was not
    acknowledged stays in memory and is written again with the next flush.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        fd: int,
        size: int,
        count: int,
        cut: int,
        ops: FileOps,
        held: Callable[[], bool],
    ) -> None:
        self.folder = folder
        self.count = count  # records, those that wait for the drive among them
        self.cut = cut  # bytes of a write that was not acknowledged, removed when the file was opened
        self._number, self._fd, self._ops, self._held = number, fd, ops, held
        self._size = size  # of what is on the drive
        self._carried = 0  # bytes that the file began with
        self._broken = ""  # why nothing may be written any more
        self._pending: deque[bytes] = deque()
        self._waiting = 0  # bytes of these
        self._appended = 0  # records, by this object; the last of them are in _pending
        self._work: asyncio.Task[None] | None = None  # whatever writes

    @staticmethod
    def open(folder: Path, ops: FileOps = DISK, held: Callable[[], bool] = lambda: True) -> tuple[Journal, Records]:
        """Return the journal in `folder`, made when there is none, and what it holds. One process at a time may do so.

        `held` returns whether this process still has the lock that says so.

        Raises StorageError when the file is damaged or of another format, naming it and the place.
        """
        with files.storage(folder):
            files.make_folder(folder, ops)
            folder = folder.resolve()
            numbers = sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))
            number = numbers[-1] if numbers else 1
            path = _path(folder, number)
            if numbers:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            else:
                fd, _ = _begin(path, 1, records.head("", 0, (), ()), ops)
            try:
                found, size = records.read(path, fd, number)
                cut = os.fstat(fd).st_size - size
                if cut:
                    ops.truncate(fd, size)
                ops.sync(fd)  # what a process that was killed has written may be in memory only
                for older in numbers[:-1]:
                    ops.unlink(_path(folder, older))
            except BaseException:
                os.close(fd)
                raise
        return Journal(folder, number, fd, size, len(found), cut, ops, held), found

    @property
    def path(self) -> Path:
        """The file that records are appended to now."""
        return _path(self.folder, self._number)

    @property
    def size(self) -> int:
        """Bytes on the drive."""
        return self._size

    @property
    def is_closed(self) -> bool:
        """Whether the file has been closed."""
        return self._fd < 0

    @property
    def is_large(self) -> bool:
        """Whether the file has grown so much that it should begin again."""
        return self._size > max(LARGE, 4 * self._carried)

    @property
    def is_behind(self) -> bool:
        """Whether so much waits for the drive that nothing more should be appended before a `flush` has returned."""
        return self._waiting > BEHIND

    def append(self, record: Record) -> None:
        """Append a record, which is durable once a `flush` that is called from now on has returned."""
        self._pending.append(records.encode(record))
        self._waiting += len(self._pending[-1])
        self._appended += 1
        self.count += 1

    async def flush(self) -> None:
        """Wait until everything appended before is on the drive. Raises StorageError when it is not."""
        target = self._appended
        while self._appended - len(self._pending) < target:
            if self._work is None:
                await self._alone(self._write())
            else:
                await asyncio.wait([self._work])

    async def rotate(
        self,
        checkpoint: str,
        step: int,
        carried: Iterable[tuple[Trajectory, int]],
        seen: Sequence[str],
        waiting: OpenTrajectories | None = None,
    ) -> None:
        """Begin a new file after `checkpoint`, which is durable and holds all that was trained until now, and remove
        the old one. `carried` and `seen` are a buffer's `held` and `seen` at this moment, and `waiting` the
        trajectories without a reward: with the checkpoint they stand for every record appended before this call. Those
        appended later follow in the new file.

        Raises StorageError; the old file then goes on.
        """
        bodies = records.head(checkpoint, step, carried, seen, waiting)
        covered = self._appended
        while self._work is not None:
            await asyncio.wait([self._work])
        await self._alone(self._change(bodies, covered))

    async def replay(self) -> Records:
        """Return everything that was appended, made durable first."""
        await self.flush()
        found: list[Records] = []

        async def read() -> None:
            found.append((await asyncio.to_thread(records.read, self.path, self._fd, self._number))[0])

        while self._work is not None:
            await asyncio.wait([self._work])
        await self._alone(read())
        return found[0]

    def check(self) -> None:
        """Raise StorageError unless the file is still there under its name and no other process may write to it.

        A file that somebody has removed takes everything that is written to it, and nobody will find it there.
        """
        with files.storage(self.path):
            try:
                same = os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._fd))
            except (FileNotFoundError, NotADirectoryError):
                same = False
            if not (same and self._held()):
                raise StorageError(
                    f"{self.path} was removed or replaced while it was in use, so nothing is learned from new answers: "
                    "bring the folder back as it was, or restart the server"
                )

    def set_aside(self) -> Path:
        """Give the file a second name that no later start reads or removes, and return it."""
        kept = self.path.with_suffix(".kept")
        with files.storage(kept):
            if not kept.exists():
                files.link_or_copy(self.path, kept, self._ops)
                files.sync_folder(self.folder, self._ops)
        return kept

    async def close(self) -> None:
        """Make what was appended durable, or raise StorageError; either way the file is closed. Twice is once."""
        try:
            await self.flush()
        finally:
            while self._work is not None:
                await asyncio.wait([self._work])
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` while nothing else writes; a caller that is cancelled does not stop it half way."""

        def done(task: asyncio.Task[None]) -> None:
            self._work = None
            if not task.cancelled():
                task.exception()  # not reported a second time when nobody waits any more

        assert self._work is None
        task = self._work = asyncio.create_task(work)
        task.add_done_callback(done)
        await asyncio.wait([task])
        with files.storage(self.path):
            task.result()

    async def _write(self) -> None:
        bodies = list(self._pending)
        self._size = await asyncio.to_thread(self._extend, bodies)
        for _ in bodies:
            self._waiting -= len(self._pending.popleft())

    def _extend(self, bodies: list[bytes]) -> int:
        self._refuse_broken()
        # What a write that failed has left there is overwritten: the same records are the first of `bodies`.
        os.lseek(self._fd, self._size, os.SEEK_SET)
        data = records.frame(bodies, self._number, self._size)
        files.write_all(self._fd, data, self._ops)
        self._ops.sync(self._fd)
        self.check()
        return self._size + len(data)

    async def _change(self, bodies: list[bytes], covered: int) -> None:
        self._refuse_broken()
        await asyncio.to_thread(self.check)
        old, new = self.path, _path(self.folder, self._number + 1)
        try:
            fd, size = await asyncio.to_thread(_begin, new, self._number + 1, bodies, self._ops)
        except OSError as e:
            if new.exists():  # the next start would believe it, so nothing may go to the old one
                self._broken = f"{new} could be neither finished nor removed ({e.strerror or e}); restart the server"
            raise
        for _ in range(covered - (self._appended - len(self._pending))):
            self._waiting -= len(self._pending.popleft())
        self._number, self._size, self._carried = self._number + 1, size, size
        self.count = len(bodies) + len(self._pending)
        os.close(self._fd)
        self._fd = fd
        with contextlib.suppress(OSError):  # the next `open` does it
            self._ops.unlink(old)

    def _refuse_broken(self) -> None:
        if self._broken:
            raise StorageError(self._broken)


def _path(folder: Path, number: int) -> Path:
    return folder / f"journal-{number:06}.log"


def _begin(path: Path, number: int, bodies: list[bytes], ops: FileOps) -> tuple[int, int]:
    """Make the file `path`, durably, and return a descriptor of it and its size."""
    data = records.frame(bodies, number, 0)
    new = path.with_name(f".new-{path.name}")
    if new.exists():
        ops.unlink(new)
    fd = ops.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        files.write_all(fd, data, ops)
        ops.sync(fd)
        ops.rename(new, path)
        files.sync_folder(path.parent, ops)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            ops.unlink(path)
        raise
    return fd, len(data)
