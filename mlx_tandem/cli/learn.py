"""`tandem learn`: watch a running server learn, and read what its folder has of all runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_tandem.cli import keys
from mlx_tandem.cli.adapters import URL, AsJson, CaCert, Key, KeyFile, Url
from mlx_tandem.cli.checkpoints import FOLDER, Folder
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.help import Command, group

if TYPE_CHECKING:
    from mlx_tandem.training.store.database import Database

learn = group("Learning of a server, running or not.")

Adapter = Annotated[
    str | None, typer.Argument(metavar="ADAPTER", help="Its name; needed where several have learned in the folder.")
]


@learn.command("list", cls=Command)
def list_runs(checkpoint_dir: Folder = FOLDER, as_json: AsJson = False) -> None:
    """List the adapters that have learned in a folder, with how far they are."""
    from mlx_tandem.cli import learned

    with _reading(checkpoint_dir) as database:
        _print(learned.runs(database), learned.LISTED, as_json)


@learn.command("show", cls=Command)
def show_updates(
    adapter: Adapter = None,
    last: Annotated[int, typer.Option(min=1, max=1000, help="How many updates, counted from the last.")] = 20,
    checkpoint_dir: Folder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Show the last updates of an adapter, the newest at the end; the last 1,000 are kept."""
    from mlx_tandem.cli import learned

    with _reading(checkpoint_dir) as database:
        _print(learned.updates(database, adapter, last), learned.SHOWN, as_json)


@learn.command("export", cls=Command)
def export(
    adapter: Adapter = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A file that does not exist; if absent, standard output.")
    ] = None,
    feedback: Annotated[
        bool, typer.Option("--feedback", help="Write feedback on completions instead, that on any adapter.")
    ] = False,
    checkpoint_dir: Folder = FOLDER,
) -> None:
    """Write trajectories as JSON lines: all that wait, and the last 1,000 that were learned from or dropped. With
    --feedback, write what was said of completions, as token ids.
    """
    from mlx_tandem.cli import learned

    with _reading(checkpoint_dir) as database:
        found = learned.feedback(database) if feedback else learned.trajectories(database, adapter)
        with closing(found):  # before the database
            lines = (json.dumps(line) + "\n" for line in found)
            if out is None:
                sys.stdout.writelines(lines)
                return
            count = _write(out, lines)
    print(f"wrote {count} {'feedback' if feedback else 'trajectories'} to {out}")


@learn.command("watch", cls=Command)
def watch(
    adapter: Annotated[
        str | None, typer.Argument(metavar="ADAPTER", help="Its name; if absent, the server's default one.")
    ] = None,
    url: Url = URL,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Show how a server learns: curves, versions, the guard and answers; q or Ctrl-C ends it. Without a terminal, a
    line for each update.
    """
    from mlx_tandem.cli.console import output
    from mlx_tandem.cli.live import Screen, ServerGone, follow
    from mlx_tandem.cli.watching import Lines, drawn, looks

    key = keys.of_client(api_key, api_key_file, url)
    console = output()
    seen = looks(url, key, interval, cacert, adapter)
    try:
        if console.is_terminal:
            with Screen(console, drawn) as screen:
                follow(seen, screen.show)
        else:
            follow(seen, Lines().show)
    except ServerGone as e:
        fail(str(e))


@contextmanager
def _reading(folder: Path) -> Iterator[Database]:
    """Open the database of a folder. A TandemError inside of the block ends the process with one line and status 1."""
    from mlx_tandem.errors import TandemError
    from mlx_tandem.training.store.database import Database

    if not folder.is_dir():
        fail(f"there is no folder {folder}; name another one with --checkpoint-dir")
    try:
        with closing(Database.read_only(folder)) as database:
            yield database
    except TandemError as e:
        fail(e.message)


def _write(out: Path, lines: Iterable[str]) -> int:
    """Write lines to a new file and return how many there were. Raises StorageError."""
    from mlx_tandem import files

    count = 0
    with files.storage(out), out.open("x", encoding="utf-8") as file:
        for line in lines:
            file.write(line)
            count += 1
    return count


def _print(lines: list[dict[str, Any]], fields: tuple[str, ...], as_json: bool) -> None:
    """Print lines as JSON, or these fields of them as a table."""
    if as_json:
        print(json.dumps(lines, indent=2))
        return
    from rich.table import Table

    table = Table(*(name.replace("_", " ") for name in fields))
    for line in lines:
        table.add_row(*(_cell(line.get(name)) for name in fields))
    show(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
