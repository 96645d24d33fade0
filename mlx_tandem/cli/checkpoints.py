"""`tandem checkpoints`: list checkpoints, export one for other programs, and roll a running server back to one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from mlx_tandem.cli.adapters import URL, CaCert, Key, KeyFile, Server, Url, ask
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.help import Command, group

if TYPE_CHECKING:
    from mlx_tandem.training.store.checkpoints import CheckpointInfo, Checkpoints

checkpoints = group("Checkpoints of training.")

Folder = Annotated[Path, typer.Option("--checkpoint-dir", help="The folder that the server was given.")]
FOLDER = Path("./checkpoints")


@checkpoints.command("ls", cls=Command)
def ls(checkpoint_dir: Folder = FOLDER) -> None:
    """List checkpoints, the newest first, with their mean reward."""
    from rich.table import Table

    table = Table(*("checkpoint", "step", "version", "mean reward", "made", "digest"))
    with _clear():
        for info in _opened(checkpoint_dir).list():
            if info.guards:
                continue  # the server's own
            table.add_row(*_row(info))
    show(table)


@checkpoints.command("export", cls=Command)
def export(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist.")],
    checkpoint_dir: Folder = FOLDER,
) -> None:
    """Copy the adapter of a checkpoint, in PEFT's format, for this server and others."""
    with _clear():
        _opened(checkpoint_dir).export(name, out)
    print(f"wrote {out}")


@checkpoints.command("rollback", cls=Command)
def rollback(
    to: Annotated[
        str | None,
        typer.Argument(metavar="TO", help="A version's number or a checkpoint; if absent the last good one."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where there is no terminal.")] = False,
    adapter: Annotated[str | None, typer.Option(help="The adapter; if absent, the server's default one.")] = None,
    url: Url = URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Make a running server go back to a version, which it serves and trains from then on. Without --yes, ask first."""
    server = Server(url, api_key, api_key_file, cacert)
    query = "" if adapter is None else f"?adapter={quote(adapter, safe='')}"
    if not yes:
        _confirm(server, to, query)
    done = ask(server, "POST", f"/v1/training/rollback{query}", {} if to is None else {"to": to})
    print(f"back at {done['current_lora']}")


def _confirm(server: Server, to: str | None, query: str) -> None:
    """Ask the user whether a server shall go back. If not, end the process with one line and status 1."""
    if not sys.stdin.isatty():
        fail("a rollback changes what is served and trained: without a terminal to ask on, confirm it with --yes")
    status = ask(server, "GET", f"/v1/training/status{query}")
    now, where = status.get("current_lora") or "the base", "the last good version" if to is None else to
    if not typer.confirm(f"{server.url} serves and trains {now}. Go back to {where}?", err=True):
        fail("nothing was changed")


def _opened(folder: Path) -> Checkpoints:
    from mlx_tandem.config import CheckpointingConfig
    from mlx_tandem.training.store.checkpoints import Checkpoints

    if not folder.is_dir():
        fail(f"there is no folder {folder}; name another one with --checkpoint-dir")
    return Checkpoints(folder, CheckpointingConfig().keep_n_checkpoints)


@contextlib.contextmanager
def _clear() -> Iterator[None]:
    """End the process with one line and status 1 after a TandemError inside the block."""
    from mlx_tandem.errors import TandemError

    try:
        yield
    except TandemError as e:
        fail(e.message)


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    notes = [word for word, holds in (("best", info.best), ("kept", info.pinned)) if holds]
    name = info.name + (f" ({', '.join(notes)})" if notes else "")
    reward = "" if info.reward is None else f"{info.reward:.3f}"
    made = datetime.fromtimestamp(info.created).isoformat(" ", "seconds")
    return name, str(info.step), str(info.version), reward, made, info.digest[:12]
