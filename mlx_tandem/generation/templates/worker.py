"""The program of a template worker: `python -m mlx_tandem.generation.templates.worker FD SECONDS BYTES`.

The first frame on the socket FD is the template, which is compiled once. Each further frame is an item to render. The
kernel ends the process when compiling or an item takes more than SECONDS of CPU time. The process may use BYTES of
memory besides the memory that it starts with.
"""

from __future__ import annotations

import signal
import sys

from mlx_tandem.generation.templates.messages import Failed, Rendered, Setup, decode_setup, decode_values
from mlx_tandem.generation.templates.rendering import Renderer, said
from mlx_tandem.isolation.frames import receive
from mlx_tandem.isolation.program import connect, limit_memory, out_of_memory, say_busy, serve, time_limit

REAL_SECONDS_PER_SECOND = 20.0
"""Seconds of real time that one second of CPU time may take while other programs use the machine."""


class Worker:
    """A renderer of one template, which the constructor compiles. If that fails, every item gets the failure."""

    def __init__(self, setup: Setup, seconds: float):
        self._seconds = seconds
        self._failed: Failed | None = None
        try:
            with time_limit(signal.ITIMER_PROF, seconds):
                self._renderer = Renderer(setup)
        except MemoryError:
            out_of_memory()
        except Exception as e:  # Compiling evaluates constant expressions, which may raise anything.
            self._failed = Failed("syntax", said(e))

    def answer(self, raw: bytes) -> Rendered | Failed:
        """Return the prompt for the encoded values of the template's variables. A lack of memory ends the process."""
        if self._failed is not None:
            return self._failed
        try:
            values = decode_values(raw)
            with time_limit(signal.ITIMER_PROF, self._seconds):
                return self._renderer.render(values)
        except MemoryError:
            out_of_memory()


def main(fd: str, seconds: str, size: str) -> None:
    """Compile the template and render items until the socket is closed."""
    sock = connect(fd)
    stream = sock.makefile("rb")
    setup = decode_setup(receive(stream))
    limit_memory(int(size))
    say_busy(sock, REAL_SECONDS_PER_SECOND * float(seconds))
    serve(sock, stream, Worker(setup, float(seconds)).answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
