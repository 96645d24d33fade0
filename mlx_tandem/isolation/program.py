"""The worker's side: have the kernel limit time and memory of this process, and answer items until the parent is
gone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, NoReturn

from msgspec import Struct

from mlx_tandem.isolation.frames import OUT_OF_MEMORY, Busy, decode_batch, encode, receive, send

GRACE_SECONDS = 1.0
"""Seconds of real time that a limit is longer in the parent, so that the kernel's limit in the worker comes first."""

WATCH_SECONDS = 0.02
"""Seconds between two checks of the memory, where the kernel enforces no limit on it."""

_TIMERS = {signal.ITIMER_REAL: signal.SIGALRM, signal.ITIMER_PROF: signal.SIGPROF}


def connect(fd: str) -> socket.socket:
    """Return the socket to the parent; its descriptor is the program's first argument.

    From here on the timers of `time_limit` end the process. A forked copy of it ends at once, since it would answer
    twice, and a crash leaves no core file, which would hold prompts.
    """
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=lambda: os._exit(1))
    for number in _TIMERS.values():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TIMERS.values())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return sock


def say_busy(sock: socket.socket, seconds: float) -> None:
    """Tell the parent that the next answer may take `seconds` of real time. Every program begins with this call."""
    send(sock, encode(Busy(seconds)))


def serve(sock: socket.socket, stream: BinaryIO, answer: Callable[[bytes], Struct]) -> None:
    """Answer every item in order until the other side is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            for raw in decode_batch(receive(stream)):
                send(sock, encode(answer(raw)))


@contextlib.contextmanager
def time_limit(timer: int, seconds: float) -> Iterator[None]:
    """Have the kernel end this process if the block takes longer than `seconds`.

    `timer` is signal.ITIMER_REAL for real time, or signal.ITIMER_PROF for the CPU time of all threads.
    """
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0.0)


def limit_memory(size: int) -> None:
    """Let this process use `size` bytes more than it uses now.

    On Linux allocations over that fail. Elsewhere no limit is enforced, and the process ends shortly after passing
    it.
    """
    if sys.platform == "linux":
        with open("/proc/self/statm") as f:
            now = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + size, now + size))
    else:
        watch_memory(size)


def watch_memory(size: int) -> None:
    """End this process soon after its peak of resident memory has grown by `size` bytes.

    A single operation of the interpreter that allocates much is noticed only when it is over; `time_limit` bounds
    it.
    """
    unit = 1 if sys.platform == "darwin" else 1024

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def watch() -> NoReturn:
        while True:
            threading.Event().wait(WATCH_SECONDS)
            if peak() > limit:
                os._exit(OUT_OF_MEMORY)

    limit = peak() + size
    threading.Thread(target=watch, daemon=True).start()


def out_of_memory() -> NoReturn:
    """End this process after a failed allocation, since memory may still be held somewhere."""
    os._exit(OUT_OF_MEMORY)
