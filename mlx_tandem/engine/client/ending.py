"""Explanations for people of how a process ended and of its last words."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

_SIGNALS = {
    signal.SIGKILL: "Something outside ended it, mostly the system for lack of memory. Close other programs.",
    signal.SIGILL: "The processor lacks an instruction that MLX or OpenBLAS was built with; a wheel for another one?",
    signal.SIGSEGV: "A library has crashed. The last lines that it wrote and the crash log of the system say where.",
    signal.SIGABRT: "A library has ended the process; its last lines say why.",
    signal.SIGBUS: "A library has crashed, or the drive is full.",
}

_CAUSES = tuple(
    map(
        re.compile,
        (
            r"what\(\): |libc\+\+abi: ",  # an exception that nobody caught in C++
            r"^Fatal Python error: ",  # a signal, as Python's fault handler reports it
            r"^[\w.]+(Error|Exception|Exit|Interrupt)\b",  # the last line of a traceback
            r"^(ERROR|CRITICAL) ",  # a line of the engine's own log
            r"(?i)\berror\b",
        ),
    )
)
"""Patterns of lines that say why a process has ended, the most informative first."""


def explain_end(status: int) -> tuple[str, str]:
    """Return how a process with this exit status (as Python reports it) ended, and what that means,
    which may be empty.
    """
    if status >= 0:
        return f"ended with status {status}", ""
    try:
        ended = signal.Signals(-status)
    except ValueError:
        return f"died of signal {-status}", ""
    return f"died of {ended.name}", _SIGNALS.get(ended, "")


def last_words(lines: Sequence[str]) -> str:
    """Return the line that says most clearly why the process that wrote `lines` has ended; empty without lines."""
    said = [line.strip() for line in lines if line.strip()]
    for cause in _CAUSES:
        for line in reversed(said):
            if cause.search(line):
                return line
    return said[-1] if said else ""
