"""A small HTTP/1.1 client on asyncio, lean enough to share two cores with a server that the command line measures.

One connection carries one request at a time and is kept alive if the server allows. `on_body` gets the pieces of the
body as they arrive, so that a caller who counts events pays for nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools


class HttpError(Exception):
    """The server could not be reached, or did not answer with HTTP."""


class Unreachable(HttpError):
    """No connection to the server could be made: nothing listens there, or nothing that is known by this name."""


class NotSuited(HttpError):
    """The peer does not speak HTTP, or its certificate is not trusted: the same request will fail again."""


def bearer(key: str) -> dict[str, str]:
    """Return the header that shows an API key; no header for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


class Connection(asyncio.Protocol):
    """One connection to `host:port`. It takes one request at a time; open several for concurrent requests."""

    def __init__(
        self, host: str, port: int, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
    ):
        """Prepare requests to a server, each with these `headers`. With `tls` the connection is encrypted."""
        self._host = host
        self._port = port
        self._tls = tls
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._parser: Any = None
        self._on_body: Callable[[bytes], None] = _ignore
        self._framed = False  # whether the headers say where the body ends
        self._headers_seen = False
        self._answered = False  # whether anything has ever arrived from the server
        self.retry_after: str | None = None  # Retry-After of the last answer

    @classmethod
    def to(cls, url: str, headers: Mapping[str, str] | None = None, cacert: str | None = None) -> Connection:
        """Return a connection to the server at `url`; `headers` go with every request. Raise HttpError for a bad
        URL.

        `cacert` is a PEM file of the authorities that an https:// server's certificate may come from, in place of
        those of SSL_CERT_FILE or the system.
        """
        parts = urlsplit(url if "//" in url else f"//{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("", "http", "https") or not parts.hostname or not port:
            raise HttpError(f"'{url}' is not an http:// or https:// address")
        return cls(
            parts.hostname,
            port,
            headers,
            _trusting(cacert or os.environ.get("SSL_CERT_FILE")) if parts.scheme == "https" else None,
        )

    async def request(
        self, method: str, path: str, body: object = None, on_body: Callable[[bytes], None] | None = None
    ) -> int:
        """Send one request and return its status once the whole body has arrived. Raise HttpError if that fails.

        A body of bytes is sent as it is, any other one as JSON.
        """
        media = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.address}\r\n{self._headers}"
        if body is not None:
            head += f"Content-Type: {media}\r\nContent-Length: {len(payload)}\r\n"
        if self._transport is None or self._transport.is_closing():
            try:
                await asyncio.get_running_loop().create_connection(lambda: self, self._host, self._port, ssl=self._tls)
            except ssl.SSLCertVerificationError as e:
                raise NotSuited(
                    f"the certificate of {self.address} is not trusted: {e.verify_message}; if it is yours, name it "
                    "or its authority with --cacert FILE (or SSL_CERT_FILE)"
                ) from None
            except ssl.SSLError as e:
                raise NotSuited(f"{self.address} does not speak TLS ({e.reason}): try http://") from None
            except OSError as e:
                # The text of asyncio's error repeats the address and leaves out the reason.
                why = os.strerror(e.errno) if e.errno and e.errno > 0 else e.strerror or e
                raise Unreachable(f"no server answers at {self.address}: {why}") from None
        assert self._transport is not None
        self._on_body = on_body or _ignore
        self._framed = self._headers_seen = False
        self.retry_after = None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head.encode() + b"\r\n" + payload)
        try:
            return await self._done
        finally:
            if not self._done.done() or self._done.cancelled() or self._done.exception():
                self.close()

    async def json(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return the status and the decoded JSON body of a request, or the body's text if it is not JSON."""
        pieces: list[bytes] = []
        status = await self.request(method, path, body, pieces.append)
        raw = b"".join(pieces)
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode(errors="replace")

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._transport is not None:
            # An orderly end of TLS takes a round trip, for which the loops of commands do not wait.
            end = self._transport.close if self._tls is None else self._transport.abort
            end()
            self._transport = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass of it

    def data_received(self, data: bytes) -> None:
        """Parse a piece of the answer."""
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(NotSuited(f"the answer is not HTTP: {e}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that was running."""
        self._transport = None
        if self._done is None or self._done.done():
            return
        # A body without a length ends when the connection ends.
        if exc is None and self._headers_seen and not self._framed:
            self._done.set_result(self._parser.get_status_code())
        else:
            secure = "" if self._tls or self._answered else "; one with --ssl-certfile is at https://"
            self._fail(HttpError(f"the server closed the connection in the middle of an answer{secure}"))

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the headers that matter."""
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")
        if name.lower() == b"retry-after":
            self.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Note that all headers have arrived."""
        self._headers_seen = True

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        self._on_body(body)

    def on_message_complete(self) -> None:
        """End the request with the status of the answer."""
        if self._done is not None and not self._done.done():
            keep = self._parser.should_keep_alive()
            self._done.set_result(self._parser.get_status_code())
            if not keep:
                self.close()

    def _fail(self, error: HttpError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class Events:
    """Cuts a body of server-sent events into their data; call it with each piece of the body."""

    def __init__(self, on_data: Callable[[str], None]):
        self._on_data = on_data
        self._rest = b""

    def __call__(self, piece: bytes) -> None:
        """Take a piece of the body, and pass on the data of every event that it completes."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._on_data(event[6:].decode())


def _ignore(body: bytes) -> None:
    pass


@functools.cache
def _trusting(cacert: str | None) -> ssl.SSLContext:
    """Return a context that trusts certificates of the authorities in a file, or of the system's without one. Raise
    HttpError for a file that has none.
    """
    try:
        return ssl.create_default_context(cafile=cacert)
    except ssl.SSLError:
        raise HttpError(f"{cacert} holds no certificate in PEM's format (--cacert, SSL_CERT_FILE)") from None
    except OSError as e:
        raise HttpError(f"{cacert} cannot be read: {e.strerror} (--cacert, SSL_CERT_FILE)") from None


async def once(url: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Return the status and the decoded body of one request, on a new connection to the server at `url`."""
    connection = Connection.to(url)
    try:
        return await connection.json(method, path, body)
    finally:
        connection.close()
