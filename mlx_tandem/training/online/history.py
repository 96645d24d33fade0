"""The reports of the last updates. A file beside the checkpoints keeps them when the server is restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from mlx_tandem import files
from mlx_tandem.training.online.serving import UpdateReport

log = logging.getLogger(__name__)

MOST = 1000
"""Most reports that are kept. The file has at most twice as many."""

MOST_BYTES = 20_000_000
"""Bytes of the file's end that are read. The next report has a file with more written anew."""


class History:
    """The reports of updates, for people who watch the training. Learning does not depend on them.

    A thread writes the file, so that no update waits for the drive. A report that could not be written is missing
    after a restart.
    """

    def __init__(self, folder: Path) -> None:
        self.updates: deque[UpdateReport] = deque(maxlen=MOST)
        """Oldest first."""
        self._file = folder / "history.jsonl"
        self._writer = ThreadPoolExecutor(1, "tandem-history")
        self._written: deque[UpdateReport] = deque(maxlen=MOST)  # without those that wait for the writer
        self._lines = 0  # of the file
        self._failed = False

    async def read(self) -> None:
        """Read the reports that earlier servers wrote. Call it once, when this process has locked the folder."""
        past = await asyncio.get_running_loop().run_in_executor(self._writer, self._read)
        self.updates.extendleft(reversed(past))

    def append(self, report: UpdateReport) -> None:
        """Keep a report, and let the thread write it to the file."""
        self.updates.append(report)
        with contextlib.suppress(RuntimeError):  # at the interpreter's exit the thread takes no more work
            self._writer.submit(self._write, report)

    def _read(self) -> list[UpdateReport]:
        try:
            with self._file.open("rb") as file:
                start = max(file.seek(0, os.SEEK_END) - MOST_BYTES, 0)
                file.seek(start)
                lines = file.read(MOST_BYTES).rsplit(b"\n", 2 * MOST + 1)
        except FileNotFoundError:
            return []
        except OSError as e:
            log.warning("the history of earlier updates cannot be read: %s", e.strerror or e)
            return []
        self._lines = 2 * MOST if start else len(lines) - 1
        for line in lines:
            # A crash cuts lines off, and other versions have other fields. ValueError is that of msgspec, too.
            with contextlib.suppress(ValueError, RecursionError):
                self._written.append(msgspec.json.decode(line, type=UpdateReport))
        return list(self._written)

    def _write(self, report: UpdateReport) -> None:
        self._written.append(report)
        try:
            if self._lines >= 2 * MOST:
                files.replace(self._file, b"".join(map(_line, self._written)))
                self._lines = len(self._written)
            else:
                self._append(_line(report))
                self._lines += 1
        except (OSError, files.StorageError) as e:
            if not self._failed:
                log.warning("the history of updates is not written: %s", e)
            self._failed = True

    def _append(self, line: bytes) -> None:
        """Append a line to the file. Whatever a crash or a full drive has cut off there stays on a line of its own."""
        with self._file.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)


def _line(report: UpdateReport) -> bytes:
    return msgspec.json.encode(report) + b"\n"
