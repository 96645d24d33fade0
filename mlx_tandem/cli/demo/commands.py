"""The commands `tandem demo` and `tandem demo learn` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_tandem.cli import outputs
from mlx_tandem.cli.help import Command, group

demo = group(
    "Watch the built-in model and its adapters answer the same questions in one batch, then stop.",
    no_args_is_help=False,
)


@demo.callback(invoke_without_command=True)
def answers(
    ctx: typer.Context,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to keep asking.")] = 10.0,
) -> None:
    """Show answers unless a command of the group was named."""
    if ctx.invoked_subcommand is None:
        from mlx_tandem.cli.demo.answers import demo as show

        show(seconds)


@demo.command(cls=Command)
def learn(
    updates: Annotated[int, typer.Option(min=1, help="Updates of the adapter, of 64 answers each.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions and of the adapter's first weights.")] = 0,
    streams: Annotated[int, typer.Option(min=0, max=64, help="Requests of others that are always under way.")] = 3,
    plot: Annotated[Path, typer.Option(callback=outputs.svg, help="Save the curve in this .svg file.")] = Path(
        "tandem-learn.svg"
    ),
) -> None:
    """Watch the built-in model learn the skill it is weak at while it answers others, then stop."""
    from mlx_tandem.cli.demo.learn import learn as show

    show(updates, seed, streams, plot)
