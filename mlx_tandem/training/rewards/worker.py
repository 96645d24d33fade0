"""The program of a reward worker: `python -m mlx_tandem.training.rewards.worker FD SECONDS BYTES`.

It scores what comes over the socket FD. The kernel ends it when one item takes longer than SECONDS, and it may hold
BYTES of memory beyond what it starts with. What functions print to the standard output is thrown away.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import socket
import sys
import threading
from typing import BinaryIO, NoReturn

import msgspec

from mlx_tandem.limits import PARAMETERS
from mlx_tandem.training.rewards import own
from mlx_tandem.training.rewards.builtin import BUILTINS
from mlx_tandem.training.rewards.messages import (
    OUT_OF_MEMORY,
    Busy,
    Failed,
    Scored,
    decode_batch,
    decode_item,
    encode,
    receive,
    send,
)

LOAD_SECONDS = 60.0  # for the import of an own function
GRACE_SECONDS = 1.0  # after the time limit, for whoever stopped the timer
WATCH_SECONDS = 0.02

REWARD = PARAMETERS["reward"]


class NotANumber(Exception):
    """A function's value that is no reward; the message is its type."""


class Worker:
    def __init__(self, sock: socket.socket, seconds: float):
        self._sock = sock
        self._seconds = seconds
        self._own: dict[str, own.Function | Exception] = {}

    def run(self) -> None:
        """Until the other side is gone."""
        stream: BinaryIO = self._sock.makefile("rb")
        with contextlib.suppress(EOFError, OSError):
            self._send(Busy(self._seconds + GRACE_SECONDS))
            while True:
                for raw in decode_batch(receive(stream, sys.maxsize)):
                    self._send(self._answer(raw))

    def _answer(self, raw: bytes) -> Scored | Failed:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        try:
            return Scored(self._value(raw))
        except NotANumber as e:
            return Failed("invalid", str(e))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # what was allocated may still be held somewhere
        except BaseException as e:  # SystemExit and KeyboardInterrupt too: the item's fault, never ours
            return Failed("raised", type(e).__name__[:64])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _value(self, raw: bytes) -> float:
        total = 0.0
        item = decode_item(raw)
        for i, part in enumerate(item.parts):
            if builtin := BUILTINS.get(part.function):
                value: object = builtin.score(item.sample, msgspec.convert(part.options, builtin.options))
            else:
                function = self._loaded(part.function)
                copy = decode_item(raw)  # which it may change
                value = function(copy.sample, copy.parts[i].options)
            total += part.weight * _number(value)
        return _number(total)

    def _loaded(self, name: str) -> own.Function:
        if name not in self._own:
            self._send(Busy(LOAD_SECONDS + GRACE_SECONDS))
            signal.setitimer(signal.ITIMER_REAL, LOAD_SECONDS)
            try:
                self._own[name] = own.load(name)
            except Exception as e:
                self._own[name] = e
            self._send(Busy(self._seconds + GRACE_SECONDS))
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        function = self._own[name]
        if isinstance(function, Exception):
            raise function
        return function

    def _send(self, answer: Scored | Failed | Busy) -> None:
        send(self._sock, encode(answer))


def _number(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise NotANumber(type(value).__name__[:64])
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not REWARD.low <= number <= REWARD.high:  # NaN is nowhere
        raise NotANumber("out of range" if math.isfinite(number) else "not finite")
    return number


def limit_memory(size: int) -> None:
    """`size` bytes more than there are now. Over them allocations fail on Linux; elsewhere, where nothing enforces
    such a limit, the process ends shortly after."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as f:
            now = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + size, now + size))
    else:
        watch_memory(size)


def watch_memory(size: int) -> None:
    """End this process soon after its peak of resident memory has grown by `size` bytes."""
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


def main(fd: str, seconds: str, size: str) -> None:
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=lambda: os._exit(1))  # a copy of us would answer twice
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(int(size))
    Worker(sock, float(seconds)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
