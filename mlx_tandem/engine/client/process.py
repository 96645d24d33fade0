"""The engine as a process of its own: how it is started, watched and ended."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Protocol

import msgspec

from mlx_tandem import files
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine.client.ending import last_words
from mlx_tandem.printable import printable

KEPT_LINES = 50
"""Number of the last lines of the engine's standard error that are kept to find its last words."""

LINE_BYTES = 4096
"""Most bytes of one line; a longer line is cut into several."""

RECORD = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (mlx_tandem[\w.]*): (.*)")
"""A line of the engine's own log, as `engine_main.EngineLines` writes it."""

PIPE_SECONDS = 1.0
"""Seconds to wait for the end of standard error, which a compiler that the engine has started may still hold open."""

BUFFER_BYTES = 1 << 20
"""Bytes of each buffer of the socket. The default of macOS is 8 KB, less than the tokens of one step, so that the
engine would wait for the front in the middle of a frame.
"""


class EngineProcess(Protocol):
    """The part of an engine's process that the client needs."""

    def kill(self) -> None:
        """End the process now; a second call does nothing."""

    def wait(self, timeout: float) -> int | None:
        """Return the exit status once the process has ended, None when it still runs after `timeout` seconds."""

    def last_words(self) -> str:
        """Return what the process said last about why it has ended; empty when it said nothing."""


Launch = Callable[[], tuple[socket.socket, EngineProcess]]


class ChildProcess:
    """A child process that runs the engine.

    Each line that it logs becomes a record of this process's log. All other lines of its standard error, such as a
    library's error message, are passed on to this process's standard error, one printable line at a time.
    """

    def __init__(self, child: subprocess.Popen[bytes]):
        assert child.stderr is not None
        self._child = child
        self.pid = child.pid
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._listener = threading.Thread(target=self._listen, args=(child.stderr,), name="engine-stderr", daemon=True)
        self._listener.start()

    def kill(self) -> None:
        """End the process now; a second call does nothing."""
        self._child.kill()

    def wait(self, timeout: float) -> int | None:
        """Return the exit status, None when the process still runs after `timeout` seconds."""
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """Return the line of standard error that says best why the process has ended; empty without lines."""
        self._listener.join(PIPE_SECONDS)
        return last_words(tuple(self._said))

    def _listen(self, pipe: IO[bytes]) -> None:
        """Keep and pass on the lines of standard error until its end; on a thread of its own."""
        with pipe:
            begins = True  # whether the next piece begins a line; else it continues a long one
            while line := pipe.readline(LINE_BYTES):
                text = printable(line.rstrip(b"\n").decode("utf-8", "backslashreplace"))
                self._said.append(text)
                if begins and (record := RECORD.fullmatch(text)):
                    level, name, event = record.groups()
                    logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", event)
                else:
                    with contextlib.suppress(OSError):
                        files.write_all(2, text.encode() + b"\n")
                begins = line.endswith(b"\n")


def process_launch(config: EngineConfig, command: Sequence[str] = ("-P", "-m", "mlx_tandem.engine_main")) -> Launch:
    """Return a function that launches `python command --fd N --config JSON`.

    With -P Python looks for no modules in the folder in which the server was started, which may be the model's and hold
    code. The child gets a session of its own, so that Ctrl-C in a terminal reaches the front only, which then drains.
    The child notices the end of the front by the closed socket.
    """
    text = msgspec.json.encode(config).decode()

    def launch() -> tuple[socket.socket, EngineProcess]:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            for direction in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, direction, BUFFER_BYTES)
        try:
            child = subprocess.Popen(
                [sys.executable, *command, "--fd", str(theirs.fileno()), "--config", text],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours, ChildProcess(child)

    return launch
