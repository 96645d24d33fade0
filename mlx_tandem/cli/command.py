"""Commands that run a server: every setting as an option, other servers' flags, and the way into the background."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperOption

from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.cli.console import fail, warn
from mlx_tandem.cli.flags import Refused, translate
from mlx_tandem.cli.help import Command
from mlx_tandem.cli.option_values import split_arms, split_controls, split_pairs, split_words
from mlx_tandem.cli.options import OPTIONS, parameters

if TYPE_CHECKING:
    from mlx_tandem.config import Config

Folder = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Folder or hub id of the base model; the built-in one if absent."),
]
File = Annotated[Path | None, typer.Option(help="YAML file with any of these settings (docs/command-line.md).")]
Background = Annotated[bool, typer.Option("--daemon", help="Continue in the background once the server is ready.")]

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print how memory would be divided and what fits, and end; load nothing.")
]


_HOSTFILE = re.compile(r"^[^#\n]*\bhostfile\b", re.MULTILINE)
"""The name of the setting in a text of settings, outside comments."""


@dataclass(frozen=True)
class Root:
    """The options that stand before the command."""

    verbose: bool
    called_as: str  # a key of CALLERS

    def words(self) -> list[str]:
        """Return these options as words of a command line."""
        return [*(["-v"] if self.verbose else []), *(["--called-as", self.called_as] * (self.called_as != "tandem"))]


class ServeCommand(Command):
    """A command that also accepts command lines written for other servers, and whose help names their defaults."""

    def note(self, ctx: Any, param: Any) -> str:
        """Return the default of the program under whose name this one was called; empty if it has none of its own."""
        called_as = ctx.obj.called_as if isinstance(ctx.obj, Root) else "tandem"
        value = CALLERS[called_as].defaults.get(OPTIONS.get(param.name, ""))
        if value is None:
            return ""
        return f"As {called_as}: {value:g}." if isinstance(value, float) else f"As {called_as}: {value}."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate other servers' flags, then parse the options."""
        options = [p for p in self.params if isinstance(p, TyperOption)]
        takes_value = {flag: not p.is_flag for p in options for flag in (*p.opts, *p.secondary_opts)}
        ctx.meta["words"] = list(args)
        try:
            args, warnings = translate(args, takes_value)
        except Refused as e:
            raise typer.BadParameter(str(e), param_hint=e.flag) from None
        for warning in warnings:
            warn(warning)
        return super().parse_args(ctx, args)


def with_every_setting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the `**given` of a command's function by one parameter per setting."""
    signature = inspect.signature(function, eval_str=True)
    *own, _ = signature.parameters.values()
    positional = [p for p in own if p.kind is not p.KEYWORD_ONLY]
    last = [p for p in own if p.kind is p.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=[*positional, *parameters(), *last])  # type: ignore[attr-defined]
    return function


def as_settings(folder: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the arguments and options of a command line mean, by the names of their parameters."""
    if folder is not None and given["model"] not in (None, folder):
        raise typer.BadParameter("the model is given twice", param_hint="MODEL")
    return {
        **given,
        "model": folder or given["model"],
        "adapter": split_pairs(given["adapter"]),
        "alias": split_arms(given["alias"]),
        "ab_test": split_controls(given["ab_test"]),
        "lora_target_modules": split_words(given["lora_target_modules"]),
        "report_to": split_words(given["report_to"]),
        "environment_variables": split_words(given["environment_variables"]),
        "allowed_origins": split_words(given["allowed_origins"]),
        "allow_image_hosts": split_words(given["allow_image_hosts"]),
    }


def settings_of(ctx: typer.Context, file: Path | None, folder: str | None, given: Mapping[str, Any]) -> Config:
    """Return the settings of a command line. End the process with one line and status 1 if one cannot be used."""
    from mlx_tandem.cli.settings import SettingsError, build

    caller = CALLERS[ctx.obj.called_as]
    try:
        return build(file, caller.options(as_settings(folder, given)), caller.defaults)
    except SettingsError as e:
        fail(str(e))


def _names_hosts(file: Path | None) -> bool:
    """Return whether a file of settings sets `hostfile`.

    Only its text is searched: reading the settings twice would repeat their warnings, and a pipe cannot be read twice.
    """
    try:
        return file is not None and file.is_file() and bool(_HOSTFILE.search(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return False  # The command that reads the settings says why.


def run(
    ctx: typer.Context,
    command: tuple[str, ...],
    folder: str | None,
    config: Path | None,
    daemon: bool,
    given: Mapping[str, Any],
    defaults: Mapping[str, object] | None = None,
    *,
    dry_run: bool = False,
) -> NoReturn:
    """Run the server of `tandem COMMAND` in the foreground or the background; the process ends with its exit status.

    `given` are the options that were given. `defaults`, by the path of the setting in config.py, apply where neither
    the options nor the file say anything.
    """
    settings = as_settings(folder, given)
    own = [*ctx.obj.words(), *command, *(word for word in ctx.meta["words"] if word not in ("--daemon", "--dry-run"))]
    if dry_run:
        from mlx_tandem.cli.dry_run import show

        show(config, settings, ctx.obj.called_as, defaults, own)
        raise SystemExit(0)
    if os.environ.keys() & {"MLX_RANK", "MLX_HOSTFILE"} or given["distributed_hostfile"] or _names_hosts(config):
        from mlx_tandem.cli.launching import go

        go(config, settings, ctx.obj.called_as, defaults, own)
    if not daemon:
        from mlx_tandem.cli.serve import serve

        serve(config, settings, defaults, called_as=ctx.obj.called_as, verbose=ctx.obj.verbose)
    if given["api_key"]:
        reason = "a key on the command line cannot go to the background; use --api-key-file or TANDEM_API_KEY"
        raise typer.BadParameter(reason, param_hint="--api-key")
    if given["api_key_file"] and Path(given["api_key_file"]).is_fifo():
        reason = "a pipe cannot go to the background: what was read of it is gone"
        raise typer.BadParameter(reason, param_hint="--api-key-file")
    from mlx_tandem.cli import daemon as background
    from mlx_tandem.cli.serve import prepare

    background.folder()
    background.log_folder()
    # Settings are checked and hub ids fetched here, where the user sees it.
    served, sock = prepare(config, settings, ctx.obj.called_as, defaults)
    sock.close()
    if served.server.uds:
        reason = "a server in the background is found by its port; use a service manager for one on a unix socket"
        raise typer.BadParameter(reason, param_hint="--uds")
    raise SystemExit(background.start(own))
