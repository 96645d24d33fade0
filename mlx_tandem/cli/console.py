"""How the command line speaks: results on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from mlx_tandem.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def fail(message: str) -> NoReturn:
    """One clear line and exit status 1."""
    print(printable(f"tandem: {message}"), file=sys.stderr)
    raise SystemExit(1)


def warn(message: str) -> None:
    """One line that starts with `tandem: warning:`."""
    print(printable(f"tandem: warning: {message}"), file=sys.stderr, flush=True)


def show(what: RenderableType) -> None:
    """A table or a text; wide enough for a table when nobody's terminal limits it."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    console.print(what)
