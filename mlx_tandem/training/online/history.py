"""The reports of the last updates. A file beside the checkpoints keeps them when the server is restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from mlx_tandem import files
from mlx_tandem.training.online.serving import UpdateReport

log = logging.getLogger(__name__)

MOST = 1000
"""Most reports that are kept. The file has at most twice as many."""

LINE_BYTES = 10_000
"""Most bytes of a line that are read at once. This module writes no longer lines."""


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
        past: deque[UpdateReport] = deque(maxlen=MOST)
        try:
            with self._file.open("rb") as file:
                while line := file.readline(LINE_BYTES):
                    self._lines += 1
                    with contextlib.suppress(msgspec.MsgspecError):  # cut off by a crash, or of another version
                        past.append(msgspec.json.decode(line, type=UpdateReport))
        except FileNotFoundError:
            return []
        except OSError as e:
            log.warning("the history of earlier updates cannot be read: %s", e.strerror or e)
        return list(past)

    def _write(self, report: UpdateReport) -> None:
        try:
            if self._lines >= 2 * MOST:
                files.replace(self._file, b"".join(map(_line, list(self.updates))))
                self._lines = len(self.updates)
            else:
                with self._file.open("ab") as file:
                    file.write(_line(report))
                self._lines += 1
        except (OSError, files.StorageError) as e:
            if not self._failed:
                log.warning("the history of updates is not written: %s", e)
            self._failed = True


def _line(report: UpdateReport) -> bytes:
    return msgspec.json.encode(report) + b"\n"
