"""`tandem service`: the commands and their options."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import typer

from mlx_tandem.cli.command import File, Folder, ServeCommand, settings_of, with_every_setting
from mlx_tandem.cli.help import Command, group

services = group("A server that the system starts and restarts, by systemd on Linux and launchd on a Mac.")


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise typer.BadParameter("must be letters, digits, '.', '_' and '-'")
    return name


Name = Annotated[str, typer.Option("--name", callback=_checked, help="Name of the service.")]
NAME = "mlx-tandem"


@services.command("install", cls=ServeCommand)
@with_every_setting
def install(
    ctx: typer.Context,
    folder: Folder = None,
    *,
    config: File = None,
    name: Name = NAME,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the file and the commands, and do nothing.")
    ] = False,
    **given: Any,
) -> None:
    """Start `tandem serve` with these arguments now and at every login, and again when it fails."""
    from mlx_tandem.cli import service

    if given["api_key"]:
        reason = "a key does not belong into the file of a service; use --api-key-file"
        raise typer.BadParameter(reason, param_hint="--api-key")
    drain = settings_of(ctx, config, folder, given).server.drain_seconds
    words = _without(ctx.meta["words"], "--name", "--dry-run")
    made = service.Service(name, ["serve", *words], os.getcwd(), round(drain) + service.MORE_SECONDS)
    service.install(made, dry_run=dry_run)


@services.command("uninstall", cls=Command)
def uninstall(name: Name = NAME) -> None:
    """Stop the service and remove its file."""
    from mlx_tandem.cli.service import uninstall as remove

    remove(name)


@services.command("status", cls=Command)
def status(name: Name = NAME) -> None:
    """Print what the system's service manager says of the service."""
    from mlx_tandem.cli.service import show

    raise SystemExit(show(name))


def _without(words: list[str], option: str, flag: str) -> list[str]:
    """Return the words of a command line without an option and its value, and without a flag."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif word != flag and not word.startswith(f"{option}="):
            kept.append(word)
    return kept
