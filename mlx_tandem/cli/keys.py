"""Finds the API key: in a flag, a file or the environment, in this order of precedence."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from mlx_tandem.cli.console import fail, warn

VARIABLES = (  # in the order of precedence
    "TANDEM_API_KEY",
    "TANDEM_API_KEY_FILE",
    "MLX_LM_SERVER_API_KEY",
    "MLX_LM_SERVER_API_KEY_FILE",
    "VLLM_API_KEY",
)


def variable() -> str | None:
    """Return the first variable that holds a key or names its file. An empty one counts as absent."""
    return next((name for name in VARIABLES if os.environ.get(name)), None)


def source(key: str | None, file: str | None) -> tuple[str, str] | None:
    """Return (key, file), one of them empty, from the flags' values or else the environment; None if neither is set.

    An empty key is a value, too: it means that no key is wanted.
    """
    if key is not None:
        return key, ""
    if file is not None:
        return "", file
    name = variable()
    if name is None:
        return None
    return ("", os.environ[name]) if name.endswith("_FILE") else (os.environ[name], "")


def read(key: str, file: str) -> str:
    """Return the key, or the contents of `file`; empty if both are empty. Raise InvalidRequest. A pipe can be read
    only once.
    """
    from mlx_tandem.server.keys import read_key

    return read_key(key, file, warn_exposed)


def warn_exposed(path: Path, mode: int) -> None:
    """Warn about a file of keys that other users can read."""
    warn(f"the key file {path} can be read by others (mode {mode:o})")


def given(key: str | None, file: str | None) -> str:
    """Return the key that a client was given, by the flags' values or the environment. Raise InvalidRequest."""
    return read(*(source(key, file) or ("", "")))


def of_client(key: str | None, file: str | None, url: str) -> str:
    """Return the key for the server at `url`, by the flags' values or the environment; warn if others can read it on
    its way. End the process with one line and status 1 if its file cannot be read.
    """
    from mlx_tandem.errors import InvalidRequest

    try:
        found = given(key, file)
    except InvalidRequest as e:
        fail(str(e))
    warn_if_readable(found, url)
    return found


def warn_if_readable(key: str, url: str) -> None:
    """Warn about a key that is sent to another machine without encryption, if `url` is so."""
    from mlx_tandem.server.keys import is_loopback

    parts = urlsplit(url if "//" in url else f"http://{url}")
    if key and parts.scheme == "http" and parts.hostname and not is_loopback(parts.hostname):
        secure = parts._replace(scheme="https").geturl()
        warn(
            f"{url} is not encrypted, so others on the network can read the API key: start the server there with "
            f"--ssl-certfile and --ssl-keyfile, and name {secure} here"
        )


def forget_environment() -> None:
    """Remove the key from the environment, so that processes started from here on do not inherit it."""
    for name in VARIABLES:
        os.environ.pop(name, None)
