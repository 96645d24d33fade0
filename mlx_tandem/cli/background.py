"""`tandem ps` and `tandem logs`: the servers of this user that run in the background, and what they write."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mlx_tandem.cli import daemon
from mlx_tandem.cli.console import fail, output
from mlx_tandem.http_client import HttpError, once
from mlx_tandem.printable import printable

ANSWER_SECONDS = 2.0
"""Seconds that a server has to say how it is."""

LONGEST_LINE = 1 << 20
"""Most bytes of a line of a log that are read at once."""


def show_servers(as_json: bool) -> None:
    """Print a line for each server that was started with --daemon and not stopped since, or JSON."""
    found = [_described(state) for state in daemon.states()]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        print("no server runs in the background (tandem serve --daemon starts one)")
        return
    from rich.table import Table

    table = Table()
    for title in ("port", "process", "state", "command"):
        table.add_column(title, overflow="fold")
    for server in found:
        table.add_row(*(printable(str(server[name])) for name in ("port", "pid", "state", "command")))
    output().print(table)


def _described(state: daemon.State) -> dict[str, object]:
    """Return what is known of a server. Its state is that of /health, `running` if it does not answer there, or
    `ended` if its process is gone.
    """
    said = "ended"
    if daemon.alive(state):
        said = "running"
        try:
            health = asyncio.run(asyncio.wait_for(once(f"127.0.0.1:{state.port}", "GET", "/health"), ANSWER_SECONDS))
            said = str(health[1]["status"])
        except (HttpError, TimeoutError, TypeError, KeyError):
            pass  # it listens on another address or with TLS, or hangs
    command = " ".join(("tandem", *state.argv))
    return {"port": state.port, "pid": state.pid, "state": said, "command": command, "log": state.log}


def show_log(port: int, lines: int, follow: bool) -> None:
    """Print the last lines of the log of the server on `port`; with `follow` go on until it ends, or Ctrl-C."""
    state = daemon.read(port)
    path = Path(state.log)
    safe = sys.stdout.isatty()
    try:
        with path.open("rb") as log:
            for line in deque(_lines(log), maxlen=lines):
                _print(line, safe)
            while follow:
                ended = not daemon.alive(state)  # before the look at the log: what it wrote last is not missed
                for line in _lines(log):
                    _print(line, safe)
                if ended:
                    break
                time.sleep(daemon.POLL_SECONDS)
    except OSError as e:
        fail(f"the log {path} cannot be read: {e.strerror}")
    except KeyboardInterrupt:
        pass


def _lines(log: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that are there and whole; the beginning of one that is still being written is left for later."""
    while line := log.readline(LONGEST_LINE):
        if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            log.seek(-len(line), os.SEEK_CUR)
            return
        yield line


def _print(line: bytes, safe: bool) -> None:
    text = line.decode(errors="replace").rstrip("\n")
    print(printable(text) if safe else text, flush=True)
