"""The pool's side of one worker process: started when needed, ended when it misbehaves, started again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from mlx_tandem.training.rewards.messages import (
    MAX_ANSWER,
    OUT_OF_MEMORY,
    Busy,
    Failed,
    Kind,
    Scored,
    decode_answer,
    encode,
    receive,
    send,
)

log = logging.getLogger(__name__)

START_SECONDS = 60.0


class WorkerProcess:
    """Used by one thread at a time; `close` may come from another."""

    def __init__(self, seconds: float, memory_mb: int):
        self._limits = [str(seconds), str(memory_mb << 20)]
        self._child: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._stream: BinaryIO | None = None
        self._greeted = False
        self._scored = 0  # items that this child has answered
        self._closed = False
        self._lock = threading.Lock()  # of _child and _closed

    def score(self, items: Sequence[bytes]) -> list[Scored | Failed]:
        """An answer for each encoded item, in order. Never raises for what a worker does.

        An item that its worker dies of, or runs out of memory at, has another chance in a fresh one, unless that one
        was fresh: another item, or somebody outside, may have been the cause.
        """
        answers: list[Scored | Failed] = []
        while len(answers) < len(items):
            kind = self._run(items, answers)
            if kind is None:
                break
            fresh = self._scored == 0
            if not self._greeted:
                if not self._closed:
                    log.error("a reward worker could not be started (%s)", kind)
                return answers + [Failed(kind, "no worker")] * (len(items) - len(answers))
            if kind == "timeout" or fresh:
                answers.append(Failed(kind))
        return answers

    def _run(self, items: Sequence[bytes], answers: list[Scored | Failed]) -> Kind | None:
        """Let the child answer what is not answered yet. The kind of its end when it ends over that."""
        try:
            if self._child is None:
                self._start()
            assert self._sock is not None and self._stream is not None
            send(self._sock, encode(items[len(answers) :]))
            while len(answers) < len(items):
                answer = decode_answer(receive(self._stream, MAX_ANSWER))
                if isinstance(answer, Busy):
                    self._greeted = True
                    self._sock.settimeout(answer.seconds)
                else:
                    answers.append(answer)
                    self._scored += 1
            return None
        except TimeoutError:
            self.stop()
            return "timeout"
        except (OSError, EOFError, ValueError, msgspec.DecodeError):
            status = self.stop()
            if status == -signal.SIGALRM:
                return "timeout"
            return "memory" if status == OUT_OF_MEMORY else "died"

    def _start(self) -> None:
        self._greeted, self._scored = False, 0
        ours, theirs = socket.socketpair()
        try:
            with self._lock:
                if self._closed:
                    raise EOFError
                self._child = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "mlx_tandem.training.rewards.worker",
                        str(theirs.fileno()),
                        *self._limits,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is not for it, and its children end with it
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(START_SECONDS)
        self._sock, self._stream = ours, ours.makefile("rb")

    def stop(self) -> int:
        """End the child and what it has started; its exit status, 0 when there was none."""
        with self._lock:
            self._kill()
            status = self._child.wait() if self._child is not None else 0
            self._child = None
        if self._stream is not None and self._sock is not None:
            self._stream.close()
            self._sock.close()
            self._stream = self._sock = None
        return status

    def close(self) -> None:
        """End the child and start none again; `score` then returns. `stop` frees the rest."""
        with self._lock:
            self._closed = True
            self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says so of a group that has ended
                os.killpg(self._child.pid, signal.SIGKILL)
