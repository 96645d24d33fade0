"""The parent's side of one worker process: started when needed, ended when it misbehaves, started again."""

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
"""Real time that a program has until its first frame."""

READ_AHEAD = 1 << 20
"""Bytes of an answer that may lie in the buffer before more is asked for."""

LostKind = Literal["timeout", "memory", "died"]


@dataclass(frozen=True)
class Lost:
    """An item that its worker has ended over. `started` is False when no worker could be started for it."""

    kind: LostKind
    started: bool = True


@dataclass(frozen=True)
class Program(Generic[A]):
    """What a worker process runs: `python -m MODULE FD ARGUMENTS`. `decode` reads an answer's frame, which has at most
    `largest` bytes. `setup` is sent before the first item, unless it is empty."""

    module: str
    arguments: Sequence[str]
    decode: Callable[[bytes], A | Busy]
    largest: int
    setup: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""


class WorkerProcess(Generic[A]):
    """Answers items one after the other. Belongs to one event loop, and to one `ask` at a time."""

    def __init__(self, program: Program[A]):
        self._program = program
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._patience = START_SECONDS
        self._greeted = False
        self._answered = 0  # items, by this child
        self._closed = False

    async def ask(self, items: Sequence[bytes]) -> list[A | Lost]:
        """Return an answer for each encoded item, in order. Never raises for what a worker does.

        An item that its worker dies of, or runs out of memory at, has another chance in a fresh one, unless that one
        was fresh: another item, or somebody outside, may have been the cause.
        """
        answers: list[A | Lost] = []
        while len(answers) < len(items):
            kind = await self._run(items, answers)
            if kind is None:
                break
            if not self._greeted:
                return answers + [Lost(kind, started=False)] * (len(items) - len(answers))
            if kind == "timeout" or self._answered == 0:
                answers.append(Lost(kind))
        return answers

    async def start(self) -> None:
        """Have a child that is ready, if one can be started."""
        await self._run([], [])

    async def stop(self) -> int:
        """End the child and what it has started; return its exit status, 0 when there was none."""
        self._kill()
        child, self._child = self._child, None
        if self._writer is not None:
            self._writer.close()
            self._writer = self._reader = None
        return 0 if child is None else await asyncio.to_thread(child.wait)

    def close(self) -> None:
        """End the child and start none again; `ask` then returns. `stop` frees the rest."""
        self._closed = True
        self._kill()

    async def _run(self, items: Sequence[bytes], answers: list[A | Lost]) -> LostKind | None:
        """Let the child answer what is not answered yet. Return the kind of its end when it ends over that."""
        try:
            if self._child is None:
                await self._start()
            assert self._writer is not None
            while not self._greeted:
                await self._receive()
            if items:
                self._writer.write(framed(encode(items[len(answers) :])))
            while len(answers) < len(items):
                answer = await self._receive()
                if not isinstance(answer, Busy):
                    answers.append(answer)
                    self._answered += 1
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
            await asyncio.shield(self.stop())  # what it says next is the answer to a question that is forgotten
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
                start_new_session=True,  # Ctrl-C is not for it, and its children end with it
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
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says so of a group that has ended
                os.killpg(self._child.pid, signal.SIGKILL)
