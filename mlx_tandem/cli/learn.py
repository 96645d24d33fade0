"""`tandem learn`: watch a running server learn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_tandem.cli import keys
from mlx_tandem.cli.adapters import URL, Key, KeyFile, Url, message_of
from mlx_tandem.cli.console import fail
from mlx_tandem.cli.help import Command, group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

learn = group("Learning of a running server.")

STATUS, HISTORY = "/v1/training/status", "/v1/training/history"
ANSWER_SECONDS = 15.0
"""Time that a server has for an answer before it is treated as gone."""


class Gone(Exception):
    """The server cannot be watched, or no longer; the message says why."""


@learn.command("watch", cls=Command)
def watch(
    url: Url = URL,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    api_key: Key = None,
    api_key_file: KeyFile = None,
) -> None:
    """Show how a server learns: curves, versions, the guard and answers; Ctrl-C ends it. Without a terminal, a line for
    each update.
    """
    from mlx_tandem.cli.console import output
    from mlx_tandem.cli.watching import Lines, Screen
    from mlx_tandem.errors import InvalidRequest

    try:
        key = keys.given(api_key, api_key_file)
    except InvalidRequest as e:
        fail(str(e))
    console = output()
    shown = Screen(console) if console.is_terminal else Lines()

    async def follow() -> None:
        async for status, history in looks(url, key, interval):
            shown.show(status, history)

    try:
        with shown:
            asyncio.run(follow())
    except Gone as e:
        fail(str(e))
    except KeyboardInterrupt:
        raise SystemExit(0) from None


async def looks(url: str, key: str, interval: float) -> AsyncIterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield a server's status and history again and again. Raises Gone.

    The history is asked for when the status says that something was learned since.
    """
    from mlx_tandem.cli.http import Connection, HttpError

    try:
        connection = Connection.to(url, {"Authorization": f"Bearer {key}"} if key else None)
    except HttpError as e:
        raise Gone(str(e)) from e

    async def get(path: str) -> dict[str, Any]:
        async with asyncio.timeout(ANSWER_SECONDS):
            code, answer = await connection.json("GET", path)
        if code >= 300 or not isinstance(answer, dict):
            raise Gone(f"{url} answered with {code}: {message_of(answer)}")
        return answer

    history: dict[str, Any] = {}
    seen: tuple[Any, ...] = ()
    try:
        while True:
            status = await get(STATUS)
            if not status.get("training_enabled"):
                raise Gone(f"{url} does not learn: start it with --enable-rl-training")
            now = (status["step"], status["updates"], status["rollbacks"], status["last_update"])
            if now != seen:
                history, seen = await get(HISTORY), now
            yield status, history
            await asyncio.sleep(interval)
    except HttpError as e:
        raise Gone(str(e)) from e
    except TimeoutError as e:
        raise Gone(f"{url} has not answered for {ANSWER_SECONDS:g} seconds") from e
    finally:
        connection.close()
