"""Finds or starts the server of a chat, and runs the chat."""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from mlx_tandem.cli import keys
from mlx_tandem.cli.adapters import URL, Server
from mlx_tandem.cli.chat.conversation import Conversation, Refused
from mlx_tandem.cli.chat.terminal import Chat, ask
from mlx_tandem.cli.console import fail, say
from mlx_tandem.cli.daemon import INTERRUPTED
from mlx_tandem.cli.own_server import started_server
from mlx_tandem.cli.start_up import StartUp
from mlx_tandem.engine.client.start_times import StartProgress
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.http_client import Connection, HttpError, Unreachable, bearer
from mlx_tandem.limits import BASE

MOST_PIPED = 16 << 20
"""Most bytes of a question that are read from a pipe."""

PIPE_SECONDS = 1.0
"""Seconds after which a pipe that says nothing is mentioned."""

POLL_SECONDS = 0.2
"""Seconds between two looks at a server that is starting."""


def chat(
    model: str | None,
    adapter: str | None,
    prompt: str | None,
    system: str,
    server: Server,
    options: Mapping[str, object],
) -> int:
    """Answer one question, or those that are typed on a terminal; return the exit status.

    `model` is a name that a running server has, or a folder or hub id for which a server is started. `options` are
    fields of the requests. A question comes from `prompt`, from a pipe, or from both, one below the other.
    """
    question = _question(prompt)
    try:
        key = keys.given(server.api_key, server.api_key_file)
    except InvalidRequest as e:
        fail(str(e))
    with asyncio.Runner() as runner, _found(runner, model, server, key) as (connection, name):
        conversation = Conversation(connection, name, system, options)
        try:
            if adapter is not None:
                runner.run(conversation.choose(adapter))
        except Refused as e:
            fail(f"{e} (--adapter)")
        except HttpError as e:
            fail(str(e))
        if question is not None:
            return 0 if ask(runner, conversation, question) else 1
        Chat(runner, conversation, connection.address).run()
    return 0


def _question(prompt: str | None) -> str | None:
    """Return the question that was given; None if questions will be typed."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    if prompt and _is_silent(sys.stdin):
        say("waiting for the end of standard input, which is a part of the question (</dev/null: nothing is)")
    piped = sys.stdin.buffer.read(MOST_PIPED + 1)
    if len(piped) > MOST_PIPED:
        fail(f"the text from the pipe has more than {MOST_PIPED >> 20} MiB")
    parts = [part for part in (prompt, piped.decode(errors="replace").strip()) if part]
    if not parts:
        fail("nothing is asked: give a question with --prompt, in a pipe, or on a terminal")
    return "\n\n".join(parts)


def _is_silent(pipe: TextIO) -> bool:
    """Return whether nothing comes from a pipe, and not its end either, for PIPE_SECONDS."""
    try:
        return not select.select([pipe], [], [], PIPE_SECONDS)[0]
    except (OSError, ValueError):
        return False  # It is an object without a descriptor.


@contextlib.contextmanager
def _found(runner: asyncio.Runner, model: str | None, server: Server, key: str) -> Iterator[tuple[Connection, str]]:
    """Yield a connection to a server that has the model, and the model's name there. A server that is started here has
    ended after the block.
    """
    other = ""
    try:
        connection = Connection.to(server.url, bearer(key), server.cacert)
        if name := runner.run(_name(connection, model)):
            yield connection, name
            connection.close()
            return
        other = f"the server at {server.url} does not serve {model}; another one is started for this chat"
    except Unreachable as e:
        if server.url != URL:
            fail(f"{e} (--url)")
        if model is not None and not _is_path(model):
            fail(f"there is no folder '{model}', and no server at {server.url} that could have a model of this name")
    except (Refused, HttpError) as e:
        fail(str(e))
    if other:
        say(other)
    starting = StartUp(verbose=False)
    try:
        with started_server(*([model] if model else []), seconds=math.inf, on_progress=starting.update) as url:
            starting.close()
            connection = Connection.to(url)
            yield connection, BASE
            connection.close()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        starting.close()


async def _name(connection: Connection, model: str | None) -> str:
    """Return the name that a server has for a model or adapter, once it is ready; empty for a folder or hub id that it
    does not serve. Raise Refused for any other name that it does not have, and HttpError.
    """
    starting = StartUp(verbose=False)
    try:
        while True:
            status, health = await connection.json("GET", "/health")
            if status != 503 or not isinstance(health, dict) or "progress" not in health:
                break
            starting.update(StartProgress(**health["progress"]))
            await asyncio.sleep(POLL_SECONDS)
    finally:
        starting.close()
    conversation = Conversation(connection, "")
    names = [model or BASE]
    if model is not None and _is_path(model):
        names.append(Path(model).resolve().name)  # a server's name for its model, if it was given no other one
    for name in names:
        try:
            await conversation.choose(name)
            return conversation.model
        except Refused as e:
            if e.status != 404 or len(names) == 1:
                raise
    return ""


def _is_path(model: str) -> bool:
    return Path(model).is_dir() or "/" in model
