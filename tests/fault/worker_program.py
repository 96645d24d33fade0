"""A program for worker processes: `python -m tests.fault.worker_program FD FOLDER SECONDS`.

It does what its items say, and may be silent for SECONDS. Each start adds a file to FOLDER; with one named
`fail` there, it ends.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import msgspec

from mlx_tandem.isolation.frames import Busy
from mlx_tandem.isolation.program import connect, limit_memory, out_of_memory, say_busy, serve, time_limit


class Said(msgspec.Struct, frozen=True, array_like=True, tag=True):
    text: str


decode_answer = msgspec.msgpack.Decoder(Said | Busy).decode


def answer(raw: bytes) -> Said:
    word, _, rest = raw.decode().partition(" ")
    try:
        with time_limit(signal.ITIMER_PROF, 0.2):
            if word == "die":
                os._exit(1)
            elif word == "spin":
                while True:
                    pass
            elif word == "sleep":
                time.sleep(1000)
            elif word == "alarm":
                signal.raise_signal(signal.SIGALRM)
            elif word == "hoard":
                kept = [b"x" * (1 << 20) for _ in range(1 << 20)]
                return Said(str(len(kept)))
            elif word == "much":
                return Said("x" * 10_000)
            elif word == "wait":  # until somebody opens the other end
                Path(rest).write_bytes(b"x")
    except MemoryError:
        out_of_memory()
    if word == "fork":
        child = os.fork()
        return Said(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) if child else "twice")
    if word == "core":  # most bytes of a core file
        return Said(str(resource.getrlimit(resource.RLIMIT_CORE)))
    return Said(str(os.getpid()) if word == "pid" else rest)


if __name__ == "__main__":
    sock = connect(sys.argv[1])
    folder = Path(sys.argv[2])
    (folder / f"start-{os.getpid()}").touch()
    limit_memory(64 << 20)
    if not (folder / "fail").exists():
        say_busy(sock, float(sys.argv[3]))
        serve(sock, sock.makefile("rb"), answer)
