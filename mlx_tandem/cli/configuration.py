"""`tandem config`: writes a file of settings, and shows the settings in effect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_tandem.cli import outputs
from mlx_tandem.cli.command import File, Folder, ServeCommand, settings_of, with_every_setting
from mlx_tandem.cli.help import group

if TYPE_CHECKING:
    from mlx_tandem.config import Config

configuration = group("The file of settings: write one, and show what is in effect.")


@configuration.command("init", cls=ServeCommand)
@with_every_setting
def init(
    ctx: typer.Context,
    folder: Folder = None,
    *,
    out: Annotated[
        Path, typer.Option("--out", callback=outputs.checked, help="The file to write, which does not exist.")
    ] = Path("tandem.yaml"),
    **given: Any,
) -> None:
    """Write a YAML file that explains every setting; those that are given as options are set in it."""
    if given["api_key"]:
        raise typer.BadParameter("a key does not belong into this file; use --api-key-file", param_hint="--api-key")
    from mlx_tandem import files
    from mlx_tandem.cli.console import fail
    from mlx_tandem.cli.settings import build
    from mlx_tandem.cli.settings_file import HEADER, lines
    from mlx_tandem.errors import TandemError

    found, usual = (_with_key(each, "") for each in (settings_of(ctx, None, folder, given), build(None, {})))
    text = HEADER + "".join(f"{line}\n" for line in lines(found, usual))
    try:
        with files.storage(out), out.open("x", encoding="utf-8") as file:
            file.write(text)
    except TandemError as e:
        fail(f"{e.message} (--out)")
    print(f"wrote {out}; try: tandem serve --config {out}")


@configuration.command("show", cls=ServeCommand)
@with_every_setting
def show(ctx: typer.Context, folder: Folder = None, *, config: File = None, **given: Any) -> None:
    """Print every setting of the server that `tandem serve` would start with the same arguments, as YAML."""
    from mlx_tandem.cli.settings_file import lines
    from mlx_tandem.printable import printable

    found = settings_of(ctx, config, folder, given)
    for line in lines(_with_key(found, "…" if found.server.api_key else ""), None):
        print(printable(line))


def _with_key(found: Config, key: str) -> Config:
    """Return settings with this in place of their key, which may come from the environment."""
    from msgspec.structs import replace

    return replace(found, server=replace(found.server, api_key=key))
