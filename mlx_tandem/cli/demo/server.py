"""Runs a server with the built-in model for the duration of a demo."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from time import perf_counter
from typing import IO

from mlx_tandem.cli.console import fail, say
from mlx_tandem.http_client import Connection, HttpError
from mlx_tandem.server.sockets import unused_port

ROOM = ("--max-model-len", "1024", "--num-blocks", "1025")
"""Options of a context and a pool that suffice for the demos. A server that has no more starts sooner."""

START_SECONDS = 120.0
"""Seconds that the server has to start."""


@contextlib.contextmanager
def started_server(*options: str, own_session: bool = True) -> Iterator[str]:
    """Start a server with the built-in model on a free port, yield its URL, and stop it at the end of the block.

    With `own_session`, Ctrl-C does not reach it; without, it belongs to the group of this process.
    """
    port = unused_port()
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlx_tandem", "serve", "--port", str(port), "--api-key", "", *ROOM, *options],
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=own_session,
        )
        try:
            say("starting a server with the built-in model …")
            asyncio.run(_wait_until_ready(port, server, log))
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(server, own_session)


async def _wait_until_ready(port: int, server: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    connection = Connection("127.0.0.1", port)
    deadline = perf_counter() + START_SECONDS
    while perf_counter() < deadline:
        if server.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            fail(f"the server did not start: {lines[-1] if lines else f'status {server.returncode}'}")
        with contextlib.suppress(HttpError):
            status, _ = await connection.json("GET", "/health")
            if status == 200:
                connection.close()
                return
        await asyncio.sleep(0.1)
    fail(f"the server was not ready within {START_SECONDS:.0f} s")


def _stop(server: subprocess.Popen[bytes], own_session: bool) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        if own_session:
            os.killpg(server.pid, signal.SIGKILL)
        server.kill()
        server.wait()
