"""The commands of `tandem` and their options; the modules beside this one do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mlx_tandem import __version__
from mlx_tandem.cli import keys
from mlx_tandem.cli.adapters import URL, AsJson, CaCert, Key, KeyFile, Server, Url, adapters, served
from mlx_tandem.cli.bench.commands import bench
from mlx_tandem.cli.cache import cache
from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.cli.checkpoints import checkpoints
from mlx_tandem.cli.command import Background, DryRun, File, Folder, Root, ServeCommand, run, with_every_setting
from mlx_tandem.cli.configuration import configuration
from mlx_tandem.cli.demo.commands import demo
from mlx_tandem.cli.help import Command, group
from mlx_tandem.cli.learn import learn
from mlx_tandem.cli.models import models
from mlx_tandem.cli.named_keys import key
from mlx_tandem.cli.plan import plan
from mlx_tandem.cli.services import services
from mlx_tandem.cli.train import train

app = group("One base model in memory, many LoRA adapters served from it in one batch.", is_root=True)
app.add_typer(adapters, name="adapters")
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(cache, name="cache")
app.add_typer(key, name="key")
app.add_typer(train, name="train")
app.add_typer(learn, name="learn")
app.add_typer(bench, name="bench")
app.add_typer(demo, name="demo")
app.add_typer(configuration, name="config")
app.add_typer(services, name="service")


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
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more details.")] = False,
    called_as: Annotated[str, typer.Option(hidden=True)] = "tandem",
) -> None:
    """Handle the options that stand before the command."""
    if called_as not in CALLERS:
        raise typer.BadParameter(f"'{called_as}' is not one of {', '.join(CALLERS)}", param_hint="--called-as")
    ctx.obj = Root(verbose, called_as)


def serve(
    ctx: typer.Context,
    folder: Folder = None,
    *,
    config: File = None,
    daemon: Background = False,
    dry_run: DryRun = False,
    **given: Any,
) -> None:
    """Serve a model and its adapters over HTTP. Flags of vLLM, mlx-lm-server, MOLA and mlx-server are accepted, too."""
    run(ctx, ("serve",), folder, config, daemon, given, dry_run=dry_run)


app.command(cls=ServeCommand)(with_every_setting(serve))


@app.command(cls=Command)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A name that the server has, or a folder or hub id to serve for the chat."
        ),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Name of an adapter of the server that answers.", autocompletion=served)
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask this, print the answer, and end.")] = None,
    system: Annotated[str, typer.Option(help="Tell the model how to answer.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0: always the likeliest token.")] = None,
    url: Url = URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Chat with a model of a running server, or of one that is started for the chat. With --prompt or a text from a
    pipe, answer once.
    """
    from mlx_tandem.cli.chat.command import chat as run_chat

    options = {"max_tokens": max_tokens, "temperature": temperature}
    given = {name: value for name, value in options.items() if value is not None}
    raise SystemExit(run_chat(model, adapter, prompt, system, Server(url, api_key, api_key_file, cacert), given))


@app.command(cls=Command)
def launch(
    program: Annotated[
        Literal["claude", "codex", "opencode", "aider"],
        typer.Argument(metavar="PROGRAM", help="claude, codex, opencode or aider."),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="What the program gets as its own arguments.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A model or adapter of the server; the base if absent.", autocompletion=served
        ),
    ] = None,
    url: Annotated[str, typer.Option("--url", "--server", help="The server to use.")] = URL,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the settings, the environment and the command, and end.")
    ] = False,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Start a coding agent that uses a running server. Its settings are in a folder of their own."""
    from mlx_tandem.cli.launch import launch as start

    start(program, Server(url, api_key, api_key_file, cacert), model, arguments or [], dry_run=dry_run)


@app.command(cls=Command)
def top(
    url: Url = URL,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end, as without a terminal.")] = False,
    as_json: AsJson = False,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Show live what a running server does: speed, requests, memory, adapters and learning; q or Ctrl-C ends it."""
    from mlx_tandem.cli.console import fail, output
    from mlx_tandem.cli.live import Screen, ServerGone, follow
    from mlx_tandem.cli.top import drawn, looks, show_once

    console = output()
    key = keys.of_client(api_key, api_key_file, url)
    try:
        if once or as_json or not console.is_terminal:
            show_once(url, key, cacert, console, as_json)
        else:
            with Screen(console, drawn) as screen:
                follow(looks(url, key, interval, cacert), screen.show)
    except ServerGone as e:
        fail(str(e))


@app.command(cls=Command)
def status(
    url: Url = URL,
    as_json: AsJson = False,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Show once what a running server does, as `tandem top` does live."""
    top(url, 1.0, True, as_json, api_key, api_key_file, cacert)


_Port = Annotated[int, typer.Option(help="Port of the server.")]
_Timeout = Annotated[float, typer.Option(min=0.0, help="Seconds that running requests have to finish.")]


@app.command(cls=Command)
def stop(port: _Port = 8000, timeout: _Timeout = 45.0) -> None:
    """Stop a server that was started with --daemon."""
    from mlx_tandem.cli.daemon import stop as end

    end(port, timeout)


@app.command(cls=Command)
def restart(port: _Port = 8000, timeout: _Timeout = 45.0) -> None:
    """Stop a server that was started with --daemon and start it again with the same arguments."""
    from mlx_tandem.cli.daemon import restart as again

    raise SystemExit(again(port, timeout))


@app.command(cls=Command)
def ps(as_json: AsJson = False) -> None:
    """List the servers that were started with --daemon."""
    from mlx_tandem.cli.background import show_servers

    show_servers(as_json)


@app.command(cls=Command)
def logs(
    port: _Port = 8000,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=1_000_000, help="How many of the last lines.")
    ] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the server ends, or Ctrl-C.")] = False,
) -> None:
    """Print the log of a server that was started with --daemon."""
    from mlx_tandem.cli.background import show_log

    show_log(port, lines, follow)


app.command(cls=Command)(models)
app.command(cls=Command)(plan)


@app.command(cls=Command)
def pull(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="organisation/name on the Hugging Face hub, or with @revision.")
    ],
    as_json: AsJson = False,
) -> None:
    """Fetch a model from the Hugging Face hub. After an interruption the same command goes on where it was."""
    from mlx_tandem.cli.pull import pull as fetch

    fetch(model, as_json)


@app.command(cls=Command)
def doctor(
    only: Annotated[
        str, typer.Option(help="Names of checks, separated by commas; what they need is checked, too.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, for programs.")] = False,
    as_block: Annotated[
        bool, typer.Option("--report", help="Run every check and fold the report into one block for an issue.")
    ] = False,
    mac: Annotated[
        bool,
        typer.Option("--mac", help="Measure for ten minutes what is unknown of Macs; print one block for an issue."),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="With --mac: folder of a model to measure instead of a random one."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --mac: do little of everything, to try the command.")
    ] = False,
) -> None:
    """Check that everything works on this machine, and print a report to paste into an issue. Status 1 if something
    fails.
    """
    if mac:
        from mlx_tandem.cli.doctor.mac import command, stages

        if only or as_json or as_block:
            raise typer.BadParameter("goes with none of --only, --json and --report", param_hint="--mac")
        raise SystemExit(command.examine(stages.ALL, model, quick=quick))
    if model is not None or quick:
        raise typer.BadParameter("goes with --mac only", param_hint="--model" if model is not None else "--quick")
    from mlx_tandem.cli.doctor.checks import CHECKS, chosen
    from mlx_tandem.cli.doctor.command import examine

    if as_block and (only or as_json):
        raise typer.BadParameter("goes with neither --only nor --json", param_hint="--report")
    try:
        checks = chosen(only)
    except KeyError as e:
        known = ", ".join(check.name for check in CHECKS)
        raise typer.BadParameter(f"{e} is not one of {known}", param_hint="--only") from None
    raise SystemExit(examine(checks, as_json, as_block))
