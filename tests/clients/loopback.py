"""Keeps a process to this machine: `python -m tests.clients.loopback MODULE …` runs a module that must not leave it."""

from __future__ import annotations

import ipaddress
import runpy
import sys

tried: list[str] = []
"""Hosts elsewhere that something in this process tried to reach, in order."""


def is_here(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def guard() -> None:
    """From now on names and addresses elsewhere are refused and noted in `tried`. This cannot be undone."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    if not is_here(host):
        tried.append(str(host))
        raise OSError(f"a test tried to reach {host}")


if __name__ == "__main__":
    from tests.clients import loopback  # the module under its own name: there is one list

    loopback.guard()
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        if loopback.tried:
            sys.exit(f"tried to reach {loopback.tried}")
