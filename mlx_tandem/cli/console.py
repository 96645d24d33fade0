"""Output of the command line: results go to standard output, everything else to standard error."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from mlx_tandem.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def fail(message: str) -> NoReturn:
    """Print one clear line and end the process with status 1."""
    say(message)
    raise SystemExit(1)


def say(message: str) -> None:
    """Print one line that starts with `tandem:`."""
    print(printable(f"tandem: {message}"), file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print one line that starts with `tandem: warning:`."""
    say(f"warning: {message}")


def size_text(size: int) -> str:
    """Return a number of bytes in GB or MB, as wide as the others of a column."""
    return f"{size / 1e9:9,.2f} GB" if size >= 1e9 else f"{size / 1e6:9,.1f} MB"


def leave_pipe() -> NoReturn:
    """End the process quietly after whoever read its output has gone, as `head` does.

    The exit status is the one that shells report for a program that a closed pipe ends.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())  # so that what is left in the buffer does not fail again at the end
    raise SystemExit(128 + signal.SIGPIPE)


def output() -> Console:
    """Return the console of standard output: as wide as its terminal, or 132 columns if there is none.

    It shows texts as they are, without markup.
    """
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            leave_pipe()

    console = Output(markup=False, emoji=False)
    return console if console.is_terminal else Output(markup=False, emoji=False, width=132)


def show(what: RenderableType) -> None:
    """Print a table or a text."""
    output().print(what)
