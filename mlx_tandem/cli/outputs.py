"""Files to which commands write their results. They are checked before the work begins, and written whole or not at
all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import stat
from pathlib import Path

import typer

from mlx_tandem import files
from mlx_tandem.cli.console import fail


def checked(ctx: typer.Context, param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the value of an option that names an output file. End the process with one line that names the option, and
    status 1, if the file cannot be written.
    """
    if path is not None and not ctx.resilient_parsing:
        try:
            files.check_writable(path)
        except files.StorageError as e:
            fail(f"{param.opts[0]}: {e.message}")
    return path


def picture(ctx: typer.Context, param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the value of an option that names a PNG or SVG file, as `checked` does. Raise BadParameter for another
    kind of file. End the process, too, if the library that draws is missing.
    """
    if path is not None and not ctx.resilient_parsing:
        if path.suffix not in (".png", ".svg"):
            raise typer.BadParameter(f"'{path.name}' ends neither in .png nor in .svg", param_hint=param.opts[0])
        if importlib.util.find_spec("matplotlib") is None:
            fail(f"{param.opts[0]} needs matplotlib: pip install matplotlib")
    return checked(ctx, param, path)


def svg(ctx: typer.Context, param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the value of an option that names an SVG file, as `checked` does. Raise BadParameter for another kind of
    file.
    """
    if path is not None and path.suffix != ".svg":
        raise typer.BadParameter(f"'{path.name}' does not end in .svg", param_hint=param.opts[0])
    return checked(ctx, param, path)


def argument(text: str) -> Path:
    """Return the path of an output file, as a `type` of argparse. Raise ArgumentTypeError if it cannot be written."""
    try:
        files.check_writable(Path(text))
    except files.StorageError as e:
        raise argparse.ArgumentTypeError(e.message) from None
    return Path(text)


def write(path: Path, data: bytes) -> None:
    """Write a result, and make missing folders. Raise StorageError if that fails; `path` then keeps its old content.

    A device or a pipe, a file that has lost its name, and a file in a folder in which no other file can be made are
    written in place. These may be left incomplete.
    """
    with files.storage(path):
        # Linux resolves /dev/stdout and >(…) to names such as pipe:[7], under which nothing can be opened.
        target = Path(os.path.realpath(path))
        if path.exists() and not (path.is_file() and target.exists() and os.access(target.parent, os.W_OK | os.X_OK)):
            path.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        files.replace(target, data)
        target.chmod(mode)


def write_json(path: Path, value: object) -> None:
    """Write a result as JSON. Raise StorageError."""
    write(path, json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
