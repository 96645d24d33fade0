"""`tandem key`: make, list and revoke the keys of a file that servers follow."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_tandem.cli.console import fail, say, show
from mlx_tandem.cli.help import Command, group
from mlx_tandem.generation.caller import SCOPES

if TYPE_CHECKING:
    from mlx_tandem.server.keyring import KeyEntry, KeyFile

key = group("Named keys with scopes and limits, in the file that `tandem serve --keys FILE` follows.")

BEGINNING = "tk-"
"""Beginning of every key that is made here, by which searches for leaked secrets can find it."""

File = Annotated[Path, typer.Option("--keys", envvar="TANDEM_KEYS_FILE", help="The file of keys.")]


@key.command("new", cls=Command)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in logs, metrics and errors.")],
    keys: File,
    scopes: Annotated[
        str, typer.Option(metavar="SCOPE,SCOPE", help=f"What it may do: {', '.join(SCOPES)}.")
    ] = "inference",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whom it belongs to; if absent, its own name.")] = "",
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="A limit, such as requests_per_minute=600 (repeatable)."),
    ] = None,
    expires: Annotated[
        str, typer.Option(metavar="DATE", help="When it ends, such as 2027-01-31; if absent, never.")
    ] = "",
) -> None:
    """Make a key, print it once, and add its digest to the file, which is made if it does not exist."""
    import hashlib
    import secrets

    import msgspec

    from mlx_tandem.errors import InvalidRequest
    from mlx_tandem.server.keyring import KeyEntry
    from mlx_tandem.strict_json import convert

    made = BEGINNING + secrets.token_urlsafe(32)
    fields: dict[str, Any] = {
        "name": name,
        "sha256": hashlib.sha256(made.encode()).hexdigest(),
        "scopes": [scope.strip() for scope in scopes.split(",")],
        "tenant": tenant,
        "limits": dict(_limit(each) for each in limit or ()),
        "expires": expires,
    }
    try:
        entry = convert(fields, KeyEntry)
        entry.check()
    except InvalidRequest as e:
        fail(e.message)
    written: dict[str, Any] = {"name": entry.name, "sha256": entry.sha256, "scopes": list(entry.scopes)}
    written |= {field: value for field, value in msgspec.to_builtins(entry).items() if value}
    with _edited(keys) as (text, said):
        if any(placed.entry.name == name for placed in said.entries):
            fail(f"{keys} has a key '{name}' already: revoke it first, or choose another name")
        _write(keys, _with(text, said, written), [*(placed.entry for placed in said.entries), entry])
    print(made)
    say(f"added '{name}' to {keys}; the key is shown this once")


@key.command("list", cls=Command)
def list_(
    keys: File, as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False
) -> None:
    """List the keys of the file: their names, tenants, scopes, limits, and when they end."""
    import msgspec

    entries = [placed.entry for placed in _said(keys, _read(keys)).entries]
    found = [
        {
            "name": entry.name,
            "tenant": entry.tenant or entry.name,
            "scopes": list(entry.scopes),
            "limits": msgspec.to_builtins(entry.limits),
            "expires": entry.expires or None,
        }
        for entry in entries
    ]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        print(f"{keys} has no key (tandem key new makes one)")
        return
    from rich.table import Table

    table = Table()
    for title in ("name", "tenant", "scopes", "limits", "expires"):
        table.add_column(title, overflow="fold")
    now = datetime.now(UTC).timestamp()
    for one, entry in zip(found, entries, strict=True):
        limits = ", ".join(f"{name}={value}" for name, value in msgspec.to_builtins(entry.limits).items())
        ends = f"{entry.expires} (expired)" if entry.check() <= now else entry.expires
        table.add_row(entry.name, str(one["tenant"]), ", ".join(entry.scopes), limits, ends)
    show(table)


@key.command("revoke", cls=Command)
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name.")],
    keys: File,
) -> None:
    """Remove a key from the file. Servers that follow the file refuse it within two seconds."""
    with _edited(keys) as (text, said):
        rest = [placed.entry for placed in said.entries if placed.entry.name != name]
        if len(rest) == len(said.entries):
            names = ", ".join(entry.name for entry in rest) or "none"
            fail(f"{keys} has no key '{name}'; it has {names}")
        _write(keys, _without(text, said, name), rest)
    print(f"revoked '{name}'")


def _limit(text: str) -> tuple[str, Any]:
    """Return a limit from its text NAME=NUMBER, or NAME=false."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        fail(f"--limit {text}: a limit is NAME=NUMBER, such as requests=8, or learning=false")


def _read(path: Path) -> str:
    from mlx_tandem.cli.keys import warn_exposed
    from mlx_tandem.errors import InvalidRequest
    from mlx_tandem.server.keyring import read

    try:
        return read(path, warn_exposed)
    except InvalidRequest as e:
        fail(e.message)


def _said(path: Path, text: str) -> KeyFile:
    from mlx_tandem.errors import InvalidRequest
    from mlx_tandem.server.keyring import parse

    try:
        return parse(text)
    except InvalidRequest as e:
        fail(f"{path}: {e.message}")


@contextlib.contextmanager
def _edited(path: Path) -> Iterator[tuple[str, KeyFile]]:
    """Yield the text of the file and what it says, and keep other commands from changing it during the block."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            fail(f"the file of keys {path} cannot be written: {e.strerror}")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not os.path.samestat(os.stat(path), os.fstat(fd)):
                continue  # another command has put a new file in its place
            text = _read(path)
            yield text, _said(path, text)
            return
        finally:
            os.close(fd)


def _write(path: Path, text: str, entries: Sequence[KeyEntry]) -> None:
    """Replace the file by `text`, which must say `entries`."""
    from mlx_tandem import files
    from mlx_tandem.errors import InvalidRequest
    from mlx_tandem.server.keyring import parse

    try:
        is_right = [placed.entry for placed in parse(text).entries] == list(entries)
    except InvalidRequest:
        is_right = False
    if not is_right:
        fail(f"{path} is written in a form that this command cannot change: change it with an editor")
    with files.storage(path):
        files.replace(path.resolve(), text.encode())


def _with(text: str, said: KeyFile, written: dict[str, Any]) -> str:
    """Return the text of the file with one more entry; its comments stay."""
    if said.is_flow:
        return _flow([*(placed.entry for placed in said.entries), written])
    lines = [
        f"{'- ' if not i else '  '}{name}: {json.dumps(value)}\n" for i, (name, value) in enumerate(written.items())
    ]
    return text + ("\n" if text and not text.endswith("\n") else "") + "".join(lines)


def _without(text: str, said: KeyFile, name: str) -> str:
    """Return the text of the file without an entry; the comments of others stay."""
    if said.is_flow:
        return _flow([placed.entry for placed in said.entries if placed.entry.name != name])
    lines = text.splitlines(keepends=True)
    placed = next(placed for placed in said.entries if placed.entry.name == name)
    end = min(placed.end, len(lines))
    while not lines[end - 1].strip() or lines[end - 1].startswith("#"):
        end -= 1
    return "".join([*lines[: placed.first], *lines[end:]])


def _flow(entries: Sequence[object]) -> str:
    """Return the text of a file that is written as JSON."""
    import msgspec

    return json.dumps(msgspec.to_builtins(entries), indent=2) + "\n"
