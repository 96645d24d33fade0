"""`tandem train`: learning as a job of its own."""

from __future__ import annotations

from typing import Any

import typer

from mlx_tandem.cli.command import Background, File, Folder, ServeCommand, run, with_every_setting
from mlx_tandem.cli.sft import sft

train = typer.Typer(
    help="Train adapters.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEFAULTS = {"engine.duty.mode": "training_only"}


def rl(
    ctx: typer.Context,
    folder: Folder = None,
    *,
    config: File = None,
    daemon: Background = False,
    **given: Any,
) -> None:
    """Train an adapter on rewards: a server as of `tandem serve --enable-rl-training`, whose device is for training
    (--mode training_only, unless the file or the flag says another). Requests bring the prompts."""
    run(ctx, ("train", "rl"), folder, config, daemon, {**given, "enable_rl_training": True}, DEFAULTS)


train.command(cls=ServeCommand)(with_every_setting(rl))
train.command("sft")(sft)
