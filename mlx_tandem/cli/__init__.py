"""The command `tandem`. Nothing heavy is imported before a command runs, so that `tandem --help` answers at once."""

from __future__ import annotations

import io
import sys

from mlx_tandem.errors import TandemError


def main(words: list[str] | None = None) -> None:
    """Run the command line `words`, by default that of this process, and end the process with its exit status.

    An error of this program that no command has handled also ends the process with one line.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding does not have becomes a question mark
    try:
        from mlx_tandem.cli.app import app

        try:
            app(args=words, prog_name="tandem")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        from mlx_tandem.cli.console import leave_pipe

        leave_pipe()
    except TandemError as e:
        from mlx_tandem.cli.console import fail

        fail(e.message)
    except KeyboardInterrupt:  # outside of a command, while modules are imported
        raise SystemExit(130) from None
