"""The socket of the server. The command line binds it before loading anything, so no web framework is imported."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path

BACKLOG = 2048
"""Most connections that wait to be accepted."""

OPEN_FILES = 65_536
"""Number of open files that the front asks for; each connection is one. The default on macOS is 256."""


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as the system lets it, up to OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
        wanted //= 2  # On macOS kern.maxfilesperproc limits a process even if the hard limit is unlimited.


def bind(host: str, port: int, uds: str = "") -> socket.socket:
    """Return a listening socket at `host` and `port`, or at the path `uds` if it is not empty.

    Raises OSError when the address or the path is taken.
    """
    if uds:
        return UnixListener(uds)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def unused_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses now, for a server that will bind it in a moment.

    It lies below the ports that systems give to outgoing connections (from 32768 on Linux, from 49152 on macOS), so
    that no client's connection takes it meanwhile. Raises OSError if 100 ports in a row are in use.
    """
    for _ in range(100):
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, "no port between 20000 and 32000 is free")


class UnixListener(socket.socket):
    """A listening unix socket to which only its owner can connect. Closing it removes its file."""

    def __init__(self, path: str):
        """Listen on `path`, and replace the socket of a server that has ended. Raises OSError for any other file."""
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = Path(path)
        self._made: os.stat_result | None = None
        try:
            _remove_stale(self._path)
            self.bind(path)
            self._made = self._path.lstat()
            self._path.chmod(0o600)  # No client can connect before `listen`.
            self.listen(BACKLOG)
        except BaseException:
            self.close()
            raise
        self.setblocking(False)

    def close(self) -> None:
        """Remove the file and close the socket."""
        made, self._made = self._made, None
        if made is not None:
            with suppress(OSError):
                if os.path.samestat(made, self._path.lstat()):  # Another server may have replaced the file.
                    self._path.unlink()
        super().close()


def _remove_stale(path: Path) -> None:
    """Remove the socket that an ended server has left at `path`. Raises OSError when it is in use or no socket."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(errno.EEXIST, "the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # A blocking connect would wait while the backlog is full.
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, "a server listens on it")
    path.unlink()
