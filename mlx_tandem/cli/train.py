"""`tandem train`: learning as a job of its own."""

from __future__ import annotations

from typing import Any

import typer

from mlx_tandem.cli.command import Background, File, Folder, ServeCommand, run, with_every_setting
from mlx_tandem.cli.help import Command, group
from mlx_tandem.cli.reward import reward
from mlx_tandem.cli.sft import sft

train = group("Train adapters.")

DEFAULTS = {"engine.duty.mode": "training_only"}
"""Settings of `tandem train rl` that differ from those of `tandem serve`, by path in config.py."""


def rl(
    ctx: typer.Context,
    folder: Folder = None,
    *,
    config: File = None,
    daemon: Background = False,
    **given: Any,
) -> None:
    """Train an adapter on rewards, for prompts that requests or an --environment bring.

    This is a server with --enable-rl-training whose device is for training: its mode is training_only unless the
    file or --mode says otherwise.
    """
    run(ctx, ("train", "rl"), folder, config, daemon, {**given, "enable_rl_training": True}, DEFAULTS)


train.command(cls=ServeCommand)(with_every_setting(rl))
train.command("sft", cls=Command)(sft)
train.command("reward", cls=Command)(reward)
