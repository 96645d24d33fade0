"""Imported by every Python that is started with this folder on its path, before anything else."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_RECORD = os.environ["TANDEM_TEST_OUTBOUND"]


def _write(line: str) -> None:
    file = os.open(_RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        if args[0] is None:
            return
        target = args[0]
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg") and isinstance(args[1], tuple):
        target = args[1]
    else:
        return
    _write(f"{event} {target!a}")
    raise OSError(f"a process of a test server tried to reach {target!a}")


_write("armed")
sys.addaudithook(_refuse)
# A test that changes something in every process of its server brings a module of this name in `packages`.
if importlib.util.find_spec("servercustomize") is not None:
    importlib.import_module("servercustomize")
