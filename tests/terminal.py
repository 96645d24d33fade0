"""A command on a terminal: its user's screen, as real programs draw on it."""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl

import pyte

PATIENCE_SECONDS = 120.0  # after which a test gives up


class Terminal:
    """A process whose input, output and errors are a pseudo-terminal of its own, and what the screen shows.

    `on_change` is called with the screen's lines after each piece that the process has written.
    """

    def __init__(self, words: list[str], columns: int, rows: int):
        self.on_change: Callable[[list[str]], None] = lambda lines: None
        ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=env | {"TERM": "xterm"}
        )
        os.close(theirs)
        self._descriptor = ours
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """The screen from top to bottom, without blanks at the right and empty lines at the end."""
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def read_until(self, shown: Callable[[list[str]], bool]) -> list[str]:
        """Read what the process writes until the screen is as `shown` wants it; the screen's lines."""
        while not shown(self.lines):
            assert self._read(), f"the process has ended:\n{self._text()}"
        return self.lines

    def read_to_end(self) -> list[str]:
        """Read what the process writes until it has ended; the screen's lines."""
        while self._read():
            pass
        return self.lines

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._descriptor, keys.encode())

    @property
    def shows_keys(self) -> bool:
        """Whether the terminal shows what is typed, as a shell needs it."""
        return bool(termios.tcgetattr(self._descriptor)[3] & termios.ECHO)

    @property
    def has_cursor(self) -> bool:
        """Whether the cursor can be seen."""
        return not self._screen.cursor.hidden

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size; its text is that which comes from now on."""
        self._screen.resize(rows, columns)
        ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> bool:
        """Whether the process has written something more."""
        assert select.select([self._descriptor], [], [], PATIENCE_SECONDS)[0], f"nothing happens:\n{self._text()}"
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # how Linux says that nobody has the other end any more
            return False
        self._stream.feed(data)
        self.on_change(self.lines)
        return bool(data)

    def _text(self) -> str:
        return "\n".join(self.lines)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._descriptor)


@contextmanager
def on_terminal(*words: str, columns: int, rows: int = 40) -> Iterator[Terminal]:
    """`tandem WORDS` on a terminal of this size."""
    terminal = Terminal([sys.executable, "-m", "mlx_tandem", *words], columns, rows)
    try:
        yield terminal
    finally:
        terminal.close()
