"""Checks of the server's settings before it binds a socket, without importing the web framework."""

from __future__ import annotations

import re
import ssl

from mlx_tandem.config import ServerConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.keys import check_exposure

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]{1,255}")
"""An `Origin` as browsers send it: scheme, host, and a port unless it is the scheme's default, all in lower case."""

IMAGE_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?(:[0-9]{1,5})?")
"""A host from which images may be fetched: a name or an IPv4 address, and a port unless it is the scheme's default."""

ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
"""A path prefix such as /a/b, or an empty text."""


def check(server: ServerConfig) -> None:
    """Raise InvalidRequest naming the first setting with which the server cannot run."""
    check_exposure(server)
    _check_certificate(server)
    _check_origins(server.allowed_origins)
    _check_image_hosts(server.allow_image_hosts)
    _check_root_path(server.root_path)


def _check_origins(origins: tuple[str, ...]) -> None:
    """Raise InvalidRequest for a text that no browser can send as its `Origin`."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            message = f"allowed_origins has {origin!a}: an origin is scheme://host or scheme://host:port, or * for all"
            raise InvalidRequest(message, param="allowed_origins")


def _check_image_hosts(hosts: tuple[str, ...]) -> None:
    """Raise InvalidRequest for a text that is no host."""
    for host in hosts:
        if not IMAGE_HOST.fullmatch(host) or int(host.partition(":")[2] or 1) not in range(1, 1 << 16):
            message = f"allow_image_hosts has {host!a}: a host is a name such as images.example.org, or name:port"
            raise InvalidRequest(message, param="allow_image_hosts")


def _check_root_path(path: str) -> None:
    """Raise InvalidRequest unless `path` is empty or of the form /tandem or /a/b."""
    if not ROOT_PATH.fullmatch(path):
        message = f"root_path is {path!a}: it begins with / and does not end with it, such as /tandem"
        raise InvalidRequest(message, param="root_path")


def _check_certificate(server: ServerConfig) -> None:
    """Raise InvalidRequest for a certificate or key that cannot be used, such as a key that needs a passphrase."""
    certificate, key = server.ssl_certfile, server.ssl_keyfile
    if key and not certificate:
        raise InvalidRequest("ssl_keyfile is given without ssl_certfile", param="ssl_certfile")
    if not certificate:
        return
    files = f"{certificate} and {key}" if key else certificate
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key or None, _no_passphrase)
    except ssl.SSLError as e:
        why = (e.reason or "not PEM").lower().replace("_", " ")
        raise InvalidRequest(f"{files} cannot be used for TLS: {why}", param="ssl_certfile") from None
    except OSError as e:
        raise InvalidRequest(f"{files} cannot be read: {e.strerror}", param="ssl_certfile") from None


def _no_passphrase() -> str:
    """Raise InvalidRequest instead of asking for a passphrase."""
    raise InvalidRequest("ssl_keyfile is encrypted: give a key without a passphrase", param="ssl_keyfile")
