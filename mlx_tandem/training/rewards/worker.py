"""The program of a reward worker: `python -m mlx_tandem.training.rewards.worker FD SECONDS BYTES`.

It scores what comes over the socket FD. The kernel ends it when one item takes longer than SECONDS, and it may hold
BYTES of memory beyond what it starts with. What functions print to the standard output is thrown away.
"""

from __future__ import annotations

import math
import signal
import socket
import sys

import msgspec

from mlx_tandem.isolation.program import (
    GRACE_SECONDS,
    connect,
    limit_memory,
    out_of_memory,
    say_busy,
    serve,
    time_limit,
)
from mlx_tandem.limits import PARAMETERS
from mlx_tandem.training.rewards import own
from mlx_tandem.training.rewards.builtin import BUILTINS
from mlx_tandem.training.rewards.messages import Failed, Scored, decode_item

LOAD_SECONDS = 60.0  # for the import of an own function

REWARD = PARAMETERS["reward"]


class NotANumber(Exception):
    """A function's value that is no reward; the message is its type."""


class Worker:
    """The loop of a reward worker, which scores one item after the other."""

    def __init__(self, sock: socket.socket, seconds: float):
        self._sock = sock
        self._seconds = seconds
        self._own: dict[str, own.Function | Exception] = {}

    def run(self) -> None:
        """Score items until the other side is gone."""
        say_busy(self._sock, self._seconds + GRACE_SECONDS)
        serve(self._sock, self._sock.makefile("rb"), self._answer)

    def _answer(self, raw: bytes) -> Scored | Failed:
        with time_limit(signal.ITIMER_REAL, self._seconds):
            try:
                return Scored(self._value(raw))
            except NotANumber as e:
                return Failed("invalid", str(e))
            except MemoryError:
                out_of_memory()
            except BaseException as e:  # SystemExit and KeyboardInterrupt too: the item's fault, never ours
                return Failed("raised", type(e).__name__[:64])

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
            say_busy(self._sock, LOAD_SECONDS + GRACE_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, LOAD_SECONDS)
            try:
                self._own[name] = own.load(name)
            except Exception as e:
                self._own[name] = e
            say_busy(self._sock, self._seconds + GRACE_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        function = self._own[name]
        if isinstance(function, Exception):
            raise function
        return function


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


def main(fd: str, seconds: str, size: str) -> None:
    """Run a worker on the socket with the descriptor `fd`, with limits in seconds per item and bytes of memory."""
    sock = connect(fd)
    limit_memory(int(size))
    Worker(sock, float(seconds)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
