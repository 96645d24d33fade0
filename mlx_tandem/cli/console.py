"""How the command line speaks: results on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from mlx_tandem.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


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


def show(what: RenderableType) -> None:
    """A table or a text; wide enough for a table when nobody's terminal limits it."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    console.print(what)
