"""Programs named like other servers' programs, whose command lines are translated into those of `tandem`."""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_args, get_type_hints

import typer

from mlx_tandem.cli import main
from mlx_tandem.cli.app import restart, serve, stop
from mlx_tandem.cli.command import File, Folder, Root, ServeCommand, run, with_every_setting
from mlx_tandem.cli.console import fail
from mlx_tandem.cli.help import Command, group
from mlx_tandem.config import RLTrainingConfig

TRAINING = ("rl", "sft")
"""Commands of `tandem train`."""

ALGORITHMS: tuple[str, ...] = get_args(get_type_hints(RLTrainingConfig)["algorithm"])
"""Algorithms of `tandem train rl`."""

BENCHMARK = ("--mode", "same,mixed,skew,long-decode-mixed")
"""Options of `tandem bench serve` that measure what MOLA's benchmark publishes."""

JAN = ("--profile", "jan", "--endpoint", "chat", "--url", "http://127.0.0.1:8080")
"""Options of `tandem bench serve` that measure what Jan's mlx-server publishes, on the port of `mlx-server`."""

_mola = group("Serve one model and many adapters: MOLA's commands, which mlx-tandem runs.")


@_mola.callback()
def _root(
    ctx: typer.Context, verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more details.")] = False
) -> None:
    """Accept the option that comes before the command."""
    ctx.obj = Root(verbose, "mola")


def _start(ctx: typer.Context, folder: Folder = None, *, config: File = None, **given: Any) -> None:
    """Serve in the background. The command ends when the server is ready; `stop` and `restart` find it by its port."""
    run(ctx, ("serve",), folder, config, True, given)


_mola.command("serve", cls=ServeCommand)(serve)
_mola.command("start", cls=ServeCommand)(with_every_setting(_start))
_mola.command("stop", cls=Command)(stop)
_mola.command("restart", cls=Command)(restart)


def mola() -> None:
    """Run `mola [-v] serve|start|stop|restart …`; `start` serves in the background."""
    _mola(prog_name="mola")


def mlx_lm_server() -> None:
    """Run `python -m mlx_lm_server --model …`."""
    main(["--called-as", "mlx_lm_server", "serve", *sys.argv[1:]])


def mlx_server() -> None:
    """Run `mlx-server -m …`, on port 8080 unless told otherwise."""
    main(["--called-as", "mlx-server", "serve", *sys.argv[1:]])


def mlx_parallm_serve() -> None:
    """Run `mlx_parallm_serve --model-path …`."""
    main(["--called-as", "mlx_parallm_serve", "serve", *sys.argv[1:]])


def mlx_parallm_train() -> None:
    """Run `mlx_parallm_train --mode rl …`; the value of --mode is the command, or an algorithm of rl."""
    words = sys.argv[1:]
    named = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--mode"), None)
    if named is not None and words[0] not in TRAINING:
        _, equals, mode = words[named].partition("=")
        after = named + 1 if equals else named + 2
        mode = mode if equals else "".join(words[named + 1 : after])
        words = [*_training(mode), *words[:named], *words[after:]]
    main(["--called-as", "mlx_parallm_serve", "train", *words])


def _training(mode: str) -> list[str]:
    """Return the words of `tandem train` for a mode. End the process with one line if there is no such mode."""
    if mode in ALGORITHMS:
        return ["rl", "--algorithm", mode]
    if mode not in TRAINING:
        fail(f"--mode {mode} is none of {', '.join(TRAINING)}, or of rl's algorithms {', '.join(ALGORITHMS)}")
    return [mode]


def mola_benchmark() -> None:
    """Run MOLA's `scripts/bench_server.py --routed-validation …` as `tandem bench serve` with its modes."""
    main(["bench", "serve", *BENCHMARK, *sys.argv[1:]])


def jan_benchmark(*words: str) -> None:
    """Run a benchmark of Jan's mlx-server; `words` are further options of `tandem bench serve`."""
    main(["bench", "serve", *JAN, *words, *sys.argv[1:]])
