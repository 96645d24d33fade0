"""`tandem adapters`: list and change the adapters of a running server, inspect and convert adapter folders."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast
from urllib.parse import quote

import typer

from mlx_tandem.cli import keys
from mlx_tandem.cli.console import fail, output
from mlx_tandem.cli.help import Command, group
from mlx_tandem.printable import printable

if TYPE_CHECKING:
    from mlx_tandem.adapters.convert import Inspection

adapters = group("Adapters of a running server, and adapter folders.")

Url = Annotated[str, typer.Option(help="The server to ask.")]
Key = Annotated[
    str | None, typer.Option(help="The server's key; --api-key-file or TANDEM_API_KEY do not show in `ps`.")
]
KeyFile = Annotated[str | None, typer.Option(help="File whose first line is the key.")]
CaCert = Annotated[
    str | None,
    typer.Option("--cacert", metavar="FILE", help="Certificates (PEM) to trust at https://; else SSL_CERT_FILE's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

COMPLETION_SECONDS = 1.0
"""Seconds that a server has to answer while a shell waits for names to complete."""

WIDE = 110
"""Columns of a terminal from which a table has room for the names of layers."""

URL = "http://127.0.0.1:8000"
"""The server that is asked if none is named."""


def served(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names that a server has for its models and adapters and that begin so, for a shell's completion.

    There are none if it does not answer at once.
    """
    import asyncio

    from mlx_tandem.errors import InvalidRequest
    from mlx_tandem.http_client import Connection, HttpError, bearer

    async def names() -> list[str]:
        key = keys.given(ctx.params.get("api_key"), ctx.params.get("api_key_file"))
        connection = Connection.to(ctx.params.get("url") or URL, bearer(key), ctx.params.get("cacert"))
        try:
            _, answer = await asyncio.wait_for(connection.json("GET", "/v1/models"), COMPLETION_SECONDS)
            return [str(entry["id"]) for entry in answer["data"]]
        finally:
            connection.close()

    try:
        found = asyncio.run(names())
    except (HttpError, InvalidRequest, TimeoutError, KeyError, TypeError):
        return []
    return [printable(name) for name in found if name.startswith(incomplete)]


@adapters.command("ls", cls=Command)
def ls(
    url: Url = URL,
    as_json: AsJson = False,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """List adapters with their size, where they are and what they did; in a wide terminal with their layers."""
    from rich.table import Table

    found = ask(Server(url, api_key, api_key_file, cacert), "GET", "/v1/adapters")
    if as_json:
        print(json.dumps(found["adapters"], indent=2))
        return
    console = output()
    table = Table()
    for title in ("adapter", "rank", "MB", "on the device", "requests", "tokens", "folder"):
        table.add_column(title, overflow="fold")
    if console.width >= WIDE:
        table.add_column("targets")
    for entry in found["adapters"]:
        if entry["version"] is None:
            table.add_row(entry["name"], *[""] * 5, entry["path"])
            continue
        place = ("yes" if entry["resident"] else "no") + (", pinned" if entry.get("pinned") else "")
        size = f"{entry['size_bytes'] / 1e6:.1f}"
        work = [str(entry["requests"]), str(entry["generated_tokens"])]
        targets = [_joined(entry["targets"])] * (console.width >= WIDE)
        table.add_row(entry["id"], str(entry["rank"]), size, place, *work, entry["path"], *targets)
    console.print(table)


@adapters.command("load", cls=Command)
def load(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="Folder under the server's --adapter-root.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it in memory; it is the last to lose its slot.")] = False,
    url: Url = URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Load an adapter under NAME; a name that exists gets a new version."""
    body: dict[str, object] = {"name": name}
    if path is not None:
        body["path"] = str(Path(path).absolute()) if Path(path).is_dir() else path
    if pin:
        body["pin"] = True
    _load(Server(url, api_key, api_key_file, cacert), body)


def load_adapter(server: Server, folder: Path) -> None:
    """Have a server load a folder under the folder's name. End the process with one line if it does not."""
    _load(server, {"name": folder.name, "path": str(folder)})


def _load(server: Server, body: dict[str, object]) -> None:
    done = ask(server, "POST", "/v1/adapters", body)
    print(f"loaded {done['id']} (rank {done['rank']}, {done['size_bytes'] / 1e6:.1f} MB)")


@adapters.command("unload", cls=Command)
def unload(
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=served)],
    url: Url = URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Forget NAME and all its versions; running requests are finished."""
    done = ask(Server(url, api_key, api_key_file, cacert), "DELETE", f"/v1/adapters/{quote(name, safe='')}")
    print(f"unloaded {name} ({_joined(str(version) for version in done['versions'])})")


@adapters.command("inspect", cls=Command)
def inspect(folder: Annotated[Path, typer.Argument(metavar="FOLDER")], as_json: AsJson = False) -> None:
    """Say what an adapter folder holds, without its base model. Exit status 1 if it cannot be served."""
    from mlx_tandem.adapters.convert import inspect as run

    found = run(folder)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    for line in () if as_json else _lines(found):
        print(printable(line))
    if found.problems:
        fail(f"{folder} cannot be served: {'; '.join(found.problems)}")


@adapters.command("convert", cls=Command)
def convert(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist or is empty.")],
    to: Annotated[Literal["peft", "mlx-lm"], typer.Option(help="The format to write.")],
) -> None:
    """Write an adapter in the other format; its values are not changed."""
    from mlx_tandem.adapters.convert import convert as run
    from mlx_tandem.errors import ModelError

    try:
        run(folder, out, to)
    except ModelError as e:
        fail(e.message)
    print(f"wrote {out} ({to})")


@adapters.command("merge", cls=Command)
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="An adapter folder.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of its base model, not quantised.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist or is empty.")],
    scale: Annotated[float, typer.Option(min=-100.0, max=100.0, help="Factor of the adapter's own scale.")] = 1.0,
) -> None:
    """Write the base model with an adapter merged into its weights, as a model folder that needs no adapter."""
    from mlx_tandem.adapters.merge import merge as run
    from mlx_tandem.errors import ModelError
    from mlx_tandem.files import StorageError

    try:
        changed = run(adapter, model, out, scale)
    except (ModelError, StorageError) as e:
        fail(e.message)
    print(f"wrote {out} ({len(changed)} modules changed)")


def _lines(found: Inspection) -> list[str]:
    rows = {
        "format": found.format or "",
        "rank": _joined(map(str, found.ranks)),
        "scale": _joined(f"{scale:g}" for scale in found.scales),
        "targets": _joined(found.targets),
        "layers": _spans(found.layers),
        "invoked": f"by the tokens {_joined(map(str, found.invocation))}" if found.invocation else "",
        "scores": "answers: it is a reward model" if found.score_head else "",
        "tensors": f"{found.tensors} ({_joined(found.dtypes)}; {found.nbytes / 1e6:.1f} MB)" if found.tensors else "",
        "digest": found.digest or "",
    }
    return [f"{name:8}  {value}" for name, value in rows.items() if value]


def _joined(words: Any) -> str:
    return ", ".join(words)


def _spans(numbers: tuple[int, ...]) -> str:
    """Return numbers as spans in words: 0, 1, 2, 5 → 0–2, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return _joined("–".join(map(str, span)) for span in spans)


@dataclass(frozen=True)
class Server:
    """A running server that the options of a command name."""

    url: str
    api_key: str | None
    api_key_file: str | None
    cacert: str | None


def ask(server: Server, method: str, path: str, body: object = None, hint: str = "") -> dict[str, Any]:
    """Return the server's answer to a request; its texts are safe to show. End the process with one line and status 1
    after an error of any kind. `hint` ends the line where nothing answers.
    """
    import asyncio

    from mlx_tandem.errors import InvalidRequest
    from mlx_tandem.http_client import Connection, HttpError, Unreachable, bearer

    async def request() -> tuple[int, Any]:
        connection = Connection.to(server.url, bearer(key), server.cacert)
        try:
            return await connection.json(method, path, body)
        finally:
            connection.close()

    try:
        key = keys.given(server.api_key, server.api_key_file)
        keys.warn_if_readable(key, server.url)
        status, answer = asyncio.run(request())
    except Unreachable as e:
        fail(f"{e} (--url)" + (f"; {hint}" if hint else ""))
    except HttpError as e:
        fail(f"{e} (--url)")
    except InvalidRequest as e:
        fail(str(e))
    if status >= 300 or not isinstance(answer, dict):
        fail(f"{server.url} answered with {status}: {message_of(answer)}")
    return cast("dict[str, Any]", _shown(answer))


def _shown(answer: Any) -> Any:
    """Return a JSON value with each text inside, except for the names of fields, as `printable` makes it."""
    if isinstance(answer, dict):
        return {name: _shown(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [_shown(value) for value in answer]
    return printable(answer) if isinstance(answer, str) else answer


def message_of(answer: object) -> str:
    """Return the message of OpenAI's error object without characters that would control the terminal."""
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        answer = answer["error"].get("message")
    return re.sub(r"[^\x20-\x7e\u00a0-\uffff]", " ", str(answer))[:500]
