"""The command `tandem`. Nothing heavy is imported before a command runs, so that `tandem --help` answers at once."""

from __future__ import annotations


def main(words: list[str] | None = None) -> None:
    """Run the command line, that of this process unless `words` are given; the process ends with its exit status."""
    try:
        from mlx_tandem.cli.app import app

        app(args=words, prog_name="tandem")
    except KeyboardInterrupt:  # outside of a command, while modules are imported
        raise SystemExit(130) from None
