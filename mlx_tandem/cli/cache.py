"""`tandem cache`: list, check and clear the keys and values that a server keeps on the drive, without a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.help import Command, group

if TYPE_CHECKING:
    from mlx_tandem.kv.disk.offline import SegmentInfo

cache = group("Cached keys and values on the drive.")

Folder = Annotated[
    Path | None,
    typer.Option("--ssd-cache-dir", help="The folder that the server was given; its own default if absent."),
]


@cache.command("ls", cls=Command)
def ls(ssd_cache_dir: Folder = None) -> None:
    """List the segments of a cache, the oldest first."""
    from rich.table import Table

    found = _inspected(ssd_cache_dir, verify=False)
    table = Table(*("segment", "blocks", "MB", "begun", "model"))
    for info in found:
        begun = datetime.fromtimestamp(info.created).isoformat(" ", "seconds") if info.base else ""
        of = info.base or "unknown: its head is damaged"
        table.add_row(str(info.number), str(info.records), f"{info.bytes / 1e6:.1f}", begun, of)
    show(table)
    print(_sum(found))


@cache.command("check", cls=Command)
def check(ssd_cache_dir: Folder = None) -> None:
    """Read every byte of a cache. Exit status 1 if something is damaged; a server does not use damaged blocks."""
    found = _inspected(ssd_cache_dir, verify=True)
    print(_sum(found))
    if damaged := [info for info in found if info.damaged]:
        fail("damaged: " + ", ".join(f"{info.damaged} in segment {info.number}" for info in damaged))
    print("all as they were written")


@cache.command("clear", cls=Command)
def clear(ssd_cache_dir: Folder = None) -> None:
    """Remove everything that a cache has put into its folder."""
    from mlx_tandem.kv.disk.offline import clear as run

    with _plainly():
        size = run(_folder(ssd_cache_dir))
    print(f"removed {size / 1e6:.1f} MB")


def _inspected(folder: Path | None, verify: bool) -> list[SegmentInfo]:
    from mlx_tandem.kv.disk.offline import inspect

    with _plainly():
        return inspect(_folder(folder), verify)


def _folder(given: Path | None) -> Path:
    from mlx_tandem.kv.disk.folder import default_folder

    folder = given if given is not None else default_folder()
    if not folder.is_dir():
        fail(f"there is no folder {folder}; name another one with --ssd-cache-dir")
    return folder


def _sum(found: list[SegmentInfo]) -> str:
    blocks, size = sum(info.records for info in found), sum(info.bytes for info in found)
    return f"{blocks} blocks, {size / 1e6:.1f} MB, {len(found)} segments"


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """End the process with one line and status 1 after a TandemError inside the block."""
    from mlx_tandem.errors import TandemError

    try:
        yield
    except TandemError as e:
        fail(e.message)
