"""Fetching images from the hosts that the settings name, and from no other place.

Clients choose the addresses, so each connection goes to an address that has been checked: a name is resolved once, all
of its addresses have to be public, and one of these is connected to. Redirects are refused, proxies from the
environment are not used, and the bytes and the time of a transfer have limits.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import SplitResult, urlsplit

import httpcore2 as httpcore

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.limits import MAX_IMAGE_BYTES

SECONDS = 10.0
"""Most seconds from the first look-up of a name to the last byte of an image."""

CONNECTIONS = 8
"""Most images that are fetched at the same time."""

LONGEST_URL = 4096
"""Most characters of a URL that is fetched."""

AGENT = "mlx-tandem"
"""The User-Agent header."""

PORTS = {"http": 80, "https": 443}


class _Refused(Exception):
    """The reason why an image is not fetched, which follows the name of its field in an error."""


def is_public(address: str) -> bool:
    """Return whether an IP address, and each address that is embedded in it, belongs to the public internet.

    IPv4 addresses that are mapped into or translated to IPv6 lie in reserved networks, so they are not public.
    """
    found = ip_address(address.partition("%")[0])
    inner: Iterable[IPv4Address | IPv6Address | None] = ()
    if isinstance(found, IPv6Address):
        if found.is_site_local:
            return False
        inner = (found.sixtofour, *(found.teredo or ()))
    return all(a.is_global and not a.is_multicast and not a.is_reserved for a in (found, *inner) if a is not None)


class Fetcher:
    """A client for GET requests of images. It belongs to one event loop.

    `hosts` are the hosts that may be asked, each with a port unless that of its scheme is meant. `accepts` says whether
    an IP address may be connected to.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        accepts: Callable[[str], bool] = is_public,
        trust: ssl.SSLContext | None = None,
        seconds: float = SECONDS,
    ):
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._accepts = accepts
        self._trust = trust
        self._seconds = seconds
        self._places = asyncio.Semaphore(CONNECTIONS)

    async def fetch(self, url: str, field: str) -> bytes:
        """Return the bytes of the image at `url`. Raises InvalidRequest naming `field`."""
        try:
            async with asyncio.timeout(self._seconds), self._places:
                return await self._get(self._checked(url))
        except _Refused as e:
            raise InvalidRequest(f"{field} {e}", param=field) from None
        except TimeoutError:
            raise InvalidRequest(f"{field} was not fetched within {self._seconds:g} s", param=field) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise InvalidRequest(f"{field} could not be fetched", param=field) from None

    def _checked(self, url: str) -> SplitResult:
        """Return the parts of a URL whose host may be asked. Raises _Refused."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise _Refused("is no valid URL") from None
        if len(url) > LONGEST_URL or not url.isascii() or not url.isprintable() or set(url) & set(' "<>\\^`{|}'):
            raise _Refused(f"must be a URL of at most {LONGEST_URL} characters of ASCII")
        if parts.username is not None or parts.password is not None:
            raise _Refused("must not hold a user's name or password")
        name = host if port in (None, PORTS[parts.scheme]) else f"{host}:{port}"
        if name not in self._hosts:
            raise _Refused("names a host that is not in --allow-image-hosts; send the image as a data: URL")
        return parts

    async def _get(self, parts: SplitResult) -> bytes:
        """Return the body of the reply. Raises _Refused for a reply without an image of a permitted size."""
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        url = httpcore.URL(
            scheme=parts.scheme.encode(),
            host=(parts.hostname or "").encode(),
            port=parts.port,
            target=path.encode(),
        )
        headers = [
            ("Host", parts.netloc),
            ("User-Agent", AGENT),
            ("Accept", "image/*"),
            ("Accept-Encoding", "identity"),
        ]
        trust = self._trust or ssl.create_default_context()
        network = _CheckedNetwork(self._accepts)
        async with (
            httpcore.AsyncConnectionPool(ssl_context=trust, network_backend=network) as pool,
            pool.stream("GET", url, headers=headers) as reply,
        ):
            if 300 <= reply.status < 400:
                raise _Refused("is answered with a redirect, and redirects are not followed")
            if reply.status != 200:
                raise _Refused(f"is answered with the status {reply.status}")
            data = bytearray()
            async for piece in reply.aiter_stream():
                data += piece
                if len(data) > MAX_IMAGE_BYTES:
                    raise _Refused(f"has over {MAX_IMAGE_BYTES} bytes")
            return bytes(data)


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """A network in which a host's name is resolved once, and its address is checked before it is connected to."""

    def __init__(self, accepts: Callable[[str], bool]):
        self._accepts = accepts
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Return a connection to one of the host's addresses. Raises _Refused unless all of them are accepted."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise _Refused("names a host that cannot be resolved") from None
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        if not addresses or not all(map(self._accepts, addresses)):
            raise _Refused("names a host whose address is not one of the public internet")
        return await self._inner.connect_tcp(addresses[0], port, timeout, local_address, socket_options)
