"""The socket that is served on. No web framework: the command line binds before anything is fetched or loaded."""

from __future__ import annotations

import contextlib
import resource
import socket

OPEN_FILES = 65_536
"""Open files that the front asks for: one for each connection. macOS gives a process 256 unless it asks."""


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as the system lets it, up to OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
        wanted //= 2  # macOS has a limit of its own (kern.maxfilesperproc) below an unlimited hard one


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything expensive starts. Raises OSError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
