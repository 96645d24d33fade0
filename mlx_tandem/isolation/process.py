"""The parent's side of one worker process: start it when needed, end it when it misbehaves, start it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import msgspec

from mlx_tandem.isolation.frames import HEADER, OUT_OF_MEMORY, Busy, encode, framed

log = logging.getLogger(__name__)

A = TypeVar("A")

START_SECONDS = 60.0
"""Seconds of real time that a program has until its first frame."""

READ_AHEAD = 1 << 20
"""Bytes of an answer that may lie in the buffer before reading pauses."""

LostKind = Literal["timeout", "memory", "died"]
"""Why a worker ended."""


@dataclass(frozen=True)
class Lost:
    """Result of an item over which its worker ended. `started` is False if no worker could be started for it."""

    kind: LostKind
    started: bool = True


@dataclass(frozen=True)
class Program(Generic[A]):
    """The program of a worker process: `python -m MODULE FD ARGUMENTS`."""

    module: str
    arguments: Sequence[str]
    decode: Callable[[bytes], A | Busy]
    """Reads the frame of an answer."""

    largest: int
    """Most bytes of such a frame."""

    setup: bytes = b""
    """Frame that is sent before the first item, unless it is empty."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to this process's environment."""


class WorkerProcess(Generic[A]):
    """A worker that answers items one after the other. It belongs to one event loop and to one `ask` at a time."""

    def __init__(self, program: Program[A]):
        self._program = program
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._patience = START_SECONDS
        self._greeted = False
        self._answered = 0  # items, by this child
        self._is_new = False  # whether the child was started for the items that it has now
        self._closed = False

    async def ask(
        self, items: Sequence[bytes], answered: Callable[[A | Lost], None] = lambda answer: None
    ) -> list[A | Lost]:
        """Return an answer for each encoded item, in order. Nothing that a worker does raises an error.

        `answered` is called with each answer as soon as it is there.

        An item over which the worker dies or runs out of memory is tried again in a worker that is started for it,
        unless that one was: another item, or another program while the worker was idle, may have been the cause.
        """
        answers: list[A | Lost] = []

        def add(answer: A | Lost) -> None:
            answers.append(answer)
            answered(answer)

        while len(answers) < len(items):
            kind = await self._run(items[len(answers) :], add)
            if kind is None:
                break
            if not self._greeted:
                for _ in items[len(answers) :]:
                    add(Lost(kind, started=False))
            elif kind == "timeout" or (self._is_new and self._answered == 0):
                add(Lost(kind))
        return answers

    async def start(self) -> None:
        """Start a child if there is none, and wait until it is ready."""
        await self._run([], lambda answer: None)

    async def stop(self) -> int:
        """End the child and its own children; return its exit status, 0 if there was none."""
        self._kill()
        child, self._child = self._child, None
        if self._writer is not None:
            self._writer.close()
            self._writer = self._reader = None
        return 0 if child is None else await asyncio.to_thread(child.wait)

    def close(self) -> None:
        """End the child for good; a running `ask` then returns. `stop` frees the rest."""
        self._closed = True
        self._kill()

    async def _run(self, items: Sequence[bytes], add: Callable[[A | Lost], None]) -> LostKind | None:
        """Let the child answer the items and add each answer; return why it ended, None if it did not."""
        try:
            self._is_new = self._child is None
            if self._is_new:
                await self._start()
            assert self._writer is not None
            while not self._greeted:
                await self._receive()
            if items:
                self._writer.write(framed(encode(items)))
            left = len(items)
            while left:
                answer = await self._receive()
                if not isinstance(answer, Busy):
                    self._answered += 1
                    left -= 1
                    add(answer)
            return None
        except TimeoutError:
            await self.stop()
            return self._lost("timeout")
        except (OSError, EOFError, ValueError, msgspec.DecodeError):
            status = await self.stop()
            if status in (-signal.SIGALRM, -signal.SIGPROF):
                return self._lost("timeout")
            return self._lost("memory" if status == OUT_OF_MEMORY else "died")
        except asyncio.CancelledError:
            await asyncio.shield(self.stop())  # its next frame would be the answer to an item that nobody waits for
            raise

    def _lost(self, kind: LostKind) -> LostKind:
        if not self._greeted and not self._closed:
            log.error("%s could not be started (%s)", self._program.module, kind)
        return kind

    async def _receive(self) -> A | Busy:
        assert self._reader is not None
        async with asyncio.timeout(self._patience):
            size = int.from_bytes(await self._reader.readexactly(HEADER), "big")
            if size > self._program.largest:
                raise ValueError(f"a frame of {size} bytes")
            answer = self._program.decode(await self._reader.readexactly(size))
        if isinstance(answer, Busy):
            self._greeted, self._patience = True, answer.seconds
        return answer

    async def _start(self) -> None:
        self._greeted, self._answered, self._patience = False, 0, START_SECONDS
        if self._closed:
            raise EOFError
        program = self._program
        ours, theirs = socket.socketpair()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", program.module, str(theirs.fileno()), *program.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | dict(program.environment),
                start_new_session=True,  # Ctrl-C does not reach it, and its children can be ended with it
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=READ_AHEAD)
        if program.setup:
            self._writer.write(framed(program.setup))

    def _kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a group that has ended
                os.killpg(self._child.pid, signal.SIGKILL)
