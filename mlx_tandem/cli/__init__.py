"""The command `tandem`. Nothing heavy is imported before a command runs: `tandem --help` answers at once."""

from __future__ import annotations


def main() -> None:
    """Run the command line; the process ends with its exit status."""
    from mlx_tandem.cli.app import app

    app(prog_name="tandem")
