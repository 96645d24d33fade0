"""Live views of a running server: asking it again and again, drawing on a terminal, and the keys that end a view."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from mlx_tandem.cli.adapters import message_of
from mlx_tandem.http_client import Connection, HttpError, bearer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ANSWER_SECONDS = 15.0
"""Time that a server has for an answer before it is treated as gone."""

Look = TypeVar("Look")
"""The type of one observation of a server."""

Get = Callable[[str], Awaitable[dict[str, Any]]]
"""Returns what a server answers to a GET of a path."""


class ServerGone(Exception):
    """The server cannot be watched, or no longer; the message says why. `status` is that of its answer; 0: none."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


@contextlib.asynccontextmanager
async def asking(url: str, key: str, cacert: str | None, accepted: tuple[int, ...] = ()) -> AsyncIterator[Get]:
    """Yield a function that asks a server on one connection. Raise Gone for any failure inside the block.

    `cacert` is a file of certificates to trust, as in `Connection.to`. An answer of a status over 299 is a failure,
    unless the status is in `accepted`.
    """
    try:
        connection = Connection.to(url, bearer(key), cacert)
    except HttpError as e:
        raise ServerGone(f"{e} (--url)") from e

    async def get(path: str) -> dict[str, Any]:
        async with asyncio.timeout(ANSWER_SECONDS):
            code, answer = await connection.json("GET", path)
        if (code >= 300 and code not in accepted) or not isinstance(answer, dict):
            raise ServerGone(f"{url} answered with {code}: {message_of(answer)}", code)
        return answer

    try:
        yield get
    except HttpError as e:
        raise ServerGone(f"{e} (--url)") from e
    except TimeoutError as e:
        raise ServerGone(f"{url} has not answered for {ANSWER_SECONDS:g} seconds") from e
    finally:
        connection.close()


class Screen(Generic[Look]):
    """A view that draws everything on a terminal, each time in place of what was there. The last picture remains."""

    def __init__(self, console: Console, drawn: Callable[[Look, Console], RenderableType]):
        """Prepare the screen; `drawn` returns the picture of what was seen for this terminal."""
        from rich.live import Live

        self._console = console
        self._drawn = drawn
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, look: Look) -> None:
        """Draw the present state."""
        self._live.update(self._drawn(look, self._console), refresh=True)


def follow(looks: AsyncIterator[Look], show: Callable[[Look], None]) -> None:
    """Show looks at a server until `q`, Ctrl-C or SIGTERM. Raise Gone."""

    async def watch() -> None:
        task = asyncio.current_task()
        assert task is not None
        with _typing(task.cancel):
            async for look in looks:
                show(look)

    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(watch())


@contextlib.contextmanager
def _typing(end: Callable[[], object]) -> Iterator[None]:
    """Call `end` when `q` is pressed on the terminal, or SIGTERM comes; keys are not shown inside the block.

    Without a terminal nothing is done.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)
    changed = termios.tcgetattr(descriptor)
    changed[3] &= ~(termios.ICANON | termios.ECHO)  # each key comes at once, and is not shown

    def read() -> None:
        if b"q" in os.read(descriptor, 1024):
            end()

    termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
    loop.add_reader(descriptor, read)
    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
