"""Starting the engine as a process of its own."""

from __future__ import annotations

import contextlib
import os
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
from mlx_tandem.engine.ending import last_words
from mlx_tandem.printable import printable

KEPT_LINES = 50
"""The last lines of the engine's standard error, among which its last words are looked for."""
LINE_BYTES = 4096
"""Of one line; what is longer becomes several."""
PIPE_SECONDS = 1.0
"""That the end of standard error is waited for: a compiler that the engine has started may still hold it."""


class EngineProcess(Protocol):
    """What the client needs of whatever runs the engine."""

    def kill(self) -> None:
        """End it now; a second call does nothing."""

    def wait(self, timeout: float) -> int | None:
        """Its exit status once it has ended, None when it still runs after `timeout` seconds."""

    def last_words(self) -> str:
        """Return what it said last about why it has ended; empty when it said nothing."""


Launch = Callable[[], tuple[socket.socket, EngineProcess]]


class ChildProcess:
    """A child with the engine in it. What it writes on standard error goes on to ours, a printable line at a time."""

    def __init__(self, child: subprocess.Popen[bytes]):
        assert child.stderr is not None
        self._child = child
        self.pid = child.pid
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._listener = threading.Thread(target=self._listen, args=(child.stderr,), name="engine-stderr", daemon=True)
        self._listener.start()

    def kill(self) -> None:
        self._child.kill()

    def wait(self, timeout: float) -> int | None:
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        self._listener.join(PIPE_SECONDS)
        return last_words(tuple(self._said))

    def _listen(self, pipe: IO[bytes]) -> None:
        with pipe:
            while line := pipe.readline(LINE_BYTES):
                text = printable(line.rstrip(b"\n").decode("utf-8", "backslashreplace"))
                self._said.append(text)
                with contextlib.suppress(OSError):
                    files.write_all(2, text.encode() + b"\n")


def process_launch(config: EngineConfig, command: Sequence[str] = ("-P", "-m", "mlx_tandem.worker")) -> Launch:
    """Return a launch that runs `python command --fd N --config JSON`. With -P Python looks for no modules in the
    folder in which the server was started: that may be the model's, and hold code.

    The child gets a session of its own, so that Ctrl-C in a terminal reaches the front only, which then drains.
    It notices the end of the front by the closed socket.
    """
    text = msgspec.json.encode(config).decode()

    def launch() -> tuple[socket.socket, EngineProcess]:
        ours, theirs = socket.socketpair()
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
