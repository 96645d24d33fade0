"""The commands and their options; what they do is in the modules beside this one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from mlx_tandem import __version__
from mlx_tandem.cli.adapters import adapters
from mlx_tandem.cli.bench.commands import bench
from mlx_tandem.cli.console import warn
from mlx_tandem.cli.flags import Refused, translate
from mlx_tandem.cli.options import parameters, split_arms, split_pairs
from mlx_tandem.cli.programs import CALLERS

app = typer.Typer(
    help="One base model in memory, many LoRA adapters served from it in one batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(adapters, name="adapters")
app.add_typer(bench, name="bench")


@dataclass(frozen=True)
class Root:
    """What stands before the command."""

    verbose: bool
    called_as: str  # of CALLERS

    def words(self) -> list[str]:
        return [*(["-v"] if self.verbose else []), *(["--called-as", self.called_as] * (self.called_as != "tandem"))]


class ServeCommand(TyperCommand):
    """Takes command lines that were written for other servers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {flag: not p.is_flag for p in self.params if isinstance(p, TyperOption) for flag in p.opts}
        ctx.meta["words"] = list(args)
        try:
            args, warnings = translate(args, takes_value)
        except Refused as e:
            raise typer.BadParameter(str(e), param_hint=e.flag) from None
        for warning in warnings:
            warn(warning)
        return super().parse_args(ctx, args)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-tandem {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, for finding out what happens.")] = False,
    called_as: Annotated[str, typer.Option(hidden=True)] = "tandem",
) -> None:
    if called_as not in CALLERS:
        raise typer.BadParameter(f"'{called_as}' is not one of {', '.join(CALLERS)}", param_hint="--called-as")
    ctx.obj = Root(verbose, called_as)


def serve(
    ctx: typer.Context,
    folder: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder or hub id of the base model; the built-in one if absent."),
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these settings (docs/command-line.md).")
    ] = None,
    daemon: Annotated[bool, typer.Option("--daemon", help="Go on in the background once the server is ready.")] = False,
    **given: Any,
) -> None:
    """Serve a model and its adapters over HTTP. Flags of vLLM, mlx-lm-server, MOLA and mlx-server are taken too."""
    if folder is not None and given["model"] not in (None, folder):
        raise typer.BadParameter("the model is given twice", param_hint="MODEL")
    settings = given | {
        "model": folder or given["model"],
        "adapter": split_pairs(given["adapter"]),
        "alias": split_arms(given["alias"]),
    }
    if not daemon:
        from mlx_tandem.cli.serve import serve as run

        run(config, settings, called_as=ctx.obj.called_as, verbose=ctx.obj.verbose)
    if given["api_key"]:
        reason = "a key on the command line cannot go to the background; use --api-key-file or TANDEM_API_KEY"
        raise typer.BadParameter(reason, param_hint="--api-key")
    if given["api_key_file"] and Path(given["api_key_file"]).is_fifo():
        reason = "a pipe cannot go to the background: what was read of it is gone"
        raise typer.BadParameter(reason, param_hint="--api-key-file")
    from mlx_tandem.cli import daemon as background
    from mlx_tandem.cli.serve import prepare

    # What is wrong is said here, and what is fetched is fetched here.
    _, sock = prepare(config, settings, ctx.obj.called_as)
    sock.close()
    words = [word for word in ctx.meta["words"] if word != "--daemon"]
    raise SystemExit(background.start([*ctx.obj.words(), "serve", *words]))


def _with_every_setting(function: Any) -> Any:
    """`given` spelled out: one parameter for each setting."""
    signature = inspect.signature(function, eval_str=True)
    *own, _ = signature.parameters.values()
    positional = [p for p in own if p.kind is not p.KEYWORD_ONLY]
    last = [p for p in own if p.kind is p.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=[*positional, *parameters(), *last])
    return function


app.command(cls=ServeCommand)(_with_every_setting(serve))


_Port = Annotated[int, typer.Option(help="Port of the server.")]
_Timeout = Annotated[float, typer.Option(min=0.0, help="Seconds that it may take to finish what runs.")]


@app.command()
def stop(port: _Port = 8000, timeout: _Timeout = 45.0) -> None:
    """Stop a server that was started with --daemon."""
    from mlx_tandem.cli.daemon import stop as run

    run(port, timeout)


@app.command()
def restart(port: _Port = 8000, timeout: _Timeout = 45.0) -> None:
    """Stop a server that was started with --daemon and start it again with the same arguments."""
    from mlx_tandem.cli.daemon import restart as run

    raise SystemExit(run(port, timeout))


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to keep asking.")] = 10.0,
) -> None:
    """Watch the built-in model and its adapters answer the same questions in one batch, then stop."""
    from mlx_tandem.cli.demo import demo as run

    run(seconds)
