"""Reading the API key, and the rule which addresses need one.

The command line uses this module, so it does not import the web framework.
"""

from __future__ import annotations

import ipaddress
import logging
import stat
from collections.abc import Callable
from pathlib import Path

from mlx_tandem.config import ServerConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.log import log

MAX_KEY = 4096
"""Most characters of a key."""


def log_exposed(path: Path, mode: int) -> None:
    """Log a key file that other users can read."""
    log("the key file can be read by others", logging.WARNING, path=str(path), mode=f"{mode:o}")


def read_key(key: str, file: str, on_exposed: Callable[[Path, int], None] = log_exposed) -> str:
    """Return `key`, or else the first line of `file`; an empty text when both are empty.

    `on_exposed` is called with the path and the mode of a file that other users can read. Raises InvalidRequest, which
    never quotes a key, for a key or file that cannot be used.
    """
    where = "api_key"
    if not key and file:
        where, path = "api_key_file", Path(file)
        try:
            with path.open("rb") as lines:
                mode = stat.S_IMODE(path.stat().st_mode)
                key = lines.readline(MAX_KEY + 2).decode("latin-1").strip()
        except OSError as e:
            raise InvalidRequest(f"the key file {path} cannot be read: {e.strerror}", param=where) from None
        if not key:
            raise InvalidRequest(f"the first line of the key file {path} is empty", param=where)
        if mode & 0o077:
            on_exposed(path, mode)
    if len(key) > MAX_KEY or not all("!" <= c <= "~" for c in key):
        message = f"the API key must be at most {MAX_KEY} printable ASCII characters without spaces"
        raise InvalidRequest(message, param=where)
    return key


def is_loopback(host: str) -> bool:
    """Return whether an address to bind, or a host name without a port, can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(server: ServerConfig) -> None:
    """Raise InvalidRequest for an address that other machines can reach while the server asks for no key."""
    reached = not server.uds and not is_loopback(server.host)
    if reached and not (server.api_key or server.api_key_file or server.keys_file):
        raise InvalidRequest(
            f"{server.host} can be reached from other machines: set an API key, such as by "
            "export TANDEM_API_KEY=$(openssl rand -hex 24), or bind 127.0.0.1",
            param="api_key",
        )
