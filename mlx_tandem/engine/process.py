"""Starting the engine as a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from mlx_tandem.config import EngineConfig

BUFFER_BYTES = 1 << 20
"""Bytes that either end of the socket may be behind. macOS gives 8 KB unless told, less than the tokens of one step:
the engine would wait for the front in the middle of a frame."""


class EngineProcess(Protocol):
    """What the client needs of whatever runs the engine."""

    def kill(self) -> None:
        """End it now; a second call does nothing."""

    def wait(self, timeout: float) -> int | None:
        """Its exit status once it has ended, None when it still runs after `timeout` seconds."""


Launch = Callable[[], tuple[socket.socket, EngineProcess]]


class ChildProcess:
    """A child with the engine in it."""

    def __init__(self, child: subprocess.Popen[bytes]):
        self._child = child
        self.pid = child.pid

    def kill(self) -> None:
        self._child.kill()

    def wait(self, timeout: float) -> int | None:
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


def process_launch(config: EngineConfig, command: Sequence[str] = ("-m", "mlx_tandem.worker")) -> Launch:
    """A launch that runs `python command --fd N --config JSON`.

    The child gets a session of its own, so that Ctrl-C in a terminal reaches the front only, which then drains.
    It notices the end of the front by the closed socket.
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
