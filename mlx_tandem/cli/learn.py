"""`tandem learn`: watch a running server learn."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_tandem.cli import keys
from mlx_tandem.cli.adapters import URL, CaCert, Key, KeyFile, Url
from mlx_tandem.cli.console import fail
from mlx_tandem.cli.help import Command, group

learn = group("Learning of a running server.")


@learn.command("watch", cls=Command)
def watch(
    url: Url = URL,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: CaCert = None,
) -> None:
    """Show how a server learns: curves, versions, the guard and answers; Ctrl-C ends it. Without a terminal, a line for
    each update.
    """
    import asyncio

    from mlx_tandem.cli.console import output
    from mlx_tandem.cli.watching import Gone, Lines, Screen, looks
    from mlx_tandem.errors import InvalidRequest

    try:
        key = keys.given(api_key, api_key_file)
    except InvalidRequest as e:
        fail(str(e))
    console = output()
    shown = Screen(console) if console.is_terminal else Lines()

    async def follow() -> None:
        async for status, history in looks(url, key, interval, cacert):
            shown.show(status, history)

    try:
        with shown:
            asyncio.run(follow())
    except Gone as e:
        fail(str(e))
    except KeyboardInterrupt:
        raise SystemExit(0) from None
