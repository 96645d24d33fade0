"""The program of a template worker: `python -m mlx_tandem.generation.templates.worker FD SECONDS BYTES`.

The first frame on the socket FD is the template; it is compiled, and then rendered for every item that comes. The
kernel ends the process when compiling or one item takes longer than SECONDS of CPU time, and it may hold BYTES of
memory beyond what it starts with.
"""

from __future__ import annotations

import signal
import sys

from mlx_tandem.generation.templates.messages import Failed, Rendered, Setup, decode_setup, decode_values
from mlx_tandem.generation.templates.rendering import Renderer, said
from mlx_tandem.isolation.frames import receive
from mlx_tandem.isolation.program import connect, limit_memory, out_of_memory, say_busy, serve, time_limit

REAL_SECONDS_PER_SECOND = 20.0
"""Real time that a second of CPU time may take while others use the machine, too."""


class Worker:
    """Renders one template, which it compiles at once. What compiling raises is the answer to every item."""

    def __init__(self, setup: Setup, seconds: float):
        self._seconds = seconds
        self._failed: Failed | None = None
        try:
            with time_limit(signal.ITIMER_PROF, seconds):
                self._renderer = Renderer(setup)
        except MemoryError:
            out_of_memory()
        except Exception as e:  # constants are computed when a template is compiled, and may fail in any way
            self._failed = Failed("syntax", said(e))

    def answer(self, raw: bytes) -> Rendered | Failed:
        """Render the template with encoded values of its variables."""
        if self._failed is not None:
            return self._failed
        try:
            values = decode_values(raw)
            with time_limit(signal.ITIMER_PROF, self._seconds):
                return self._renderer.render(values)
        except MemoryError:
            out_of_memory()


def main(fd: str, seconds: str, size: str) -> None:
    sock = connect(fd)
    stream = sock.makefile("rb")
    setup = decode_setup(receive(stream))
    limit_memory(int(size))
    say_busy(sock, REAL_SECONDS_PER_SECOND * float(seconds))
    serve(sock, stream, Worker(setup, float(seconds)).answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
