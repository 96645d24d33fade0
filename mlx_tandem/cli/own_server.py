"""A server that a command starts for itself and stops when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import IO

from mlx_tandem.cli.console import fail, say
from mlx_tandem.engine.client.start_times import StartProgress
from mlx_tandem.http_client import Connection, HttpError
from mlx_tandem.server.sockets import unused_port

ROOM = ("--max-model-len", "1024", "--num-blocks", "1025")
"""Options of a context and a pool that suffice for the demos. A server that has no more starts sooner."""

START_SECONDS = 120.0
"""Seconds that the server has to start, unless a caller knows better."""


@contextlib.contextmanager
def started_server(
    *words: str,
    own_session: bool = True,
    seconds: float = START_SECONDS,
    on_progress: Callable[[StartProgress], None] | None = None,
) -> Iterator[str]:
    """Start `tandem serve WORDS` on a free port, yield its URL when it is ready, and stop it at the end of the block.

    Without a model among the words, it has the built-in one. With `own_session`, Ctrl-C does not reach it; without, it
    belongs to the group of this process. `on_progress` gets how far the start is; without it, one line says that the
    server is being started. If the server ends or is not ready within `seconds`, one line says why, and the process
    ends with status 1.
    """
    port = unused_port()
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "mlx_tandem",
                "serve",
                "--port",
                str(port),
                "--api-key",
                "",
                "--keys",
                "",
                *words,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=own_session,
        )
        try:
            if on_progress is None:
                say("starting a server with the built-in model …")
            asyncio.run(_wait_until_ready(port, server, log, seconds, on_progress or (lambda progress: None)))
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(server, own_session)


async def _wait_until_ready(
    port: int,
    server: subprocess.Popen[bytes],
    log: IO[bytes],
    seconds: float,
    on_progress: Callable[[StartProgress], None],
) -> None:
    connection = Connection("127.0.0.1", port)
    deadline = perf_counter() + seconds
    while perf_counter() < deadline:
        if server.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            why = lines[-1].removeprefix("tandem: ") if lines else f"status {server.returncode}"
            fail(f"the server did not start: {why}")
        with contextlib.suppress(HttpError):
            status, body = await connection.json("GET", "/health")
            if status == 200:
                connection.close()
                return
            if isinstance(body, dict) and "progress" in body:
                on_progress(StartProgress(**body["progress"]))
        await asyncio.sleep(0.1)
    fail(f"the server was not ready within {seconds:.0f} s")


def _stop(server: subprocess.Popen[bytes], own_session: bool) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        if own_session:
            os.killpg(server.pid, signal.SIGKILL)
        server.kill()
        server.wait()
