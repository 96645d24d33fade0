"""The page for people who open the server in a browser: static files from a fixed table, and nothing else.

The files ask the same routes for everything as any other client, with the key that the person types in. So they
contain nothing secret, and are sent without a key.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

_FOLDER = Path(__file__).parent / "static"

PREFIX = "/page/"
"""The beginning of the paths of all files but the two documents."""

DOCUMENTS = {"/": "index.html", "/docs": "docs.html"}
"""The paths that a person opens, and their files. Only clients that ask for HTML get them; for others these paths do
not exist."""

_MEDIA = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}

FILES = (
    *("style.css", "icon.svg", "main.js", "docs.js", "uplot.js", "uplot.css", "uplot.LICENSE.txt"),
    *("api.js", "dom.js", "format.js", "key.js", "series.js", "plots.js"),
    *("overview.js", "adapters.js", "learning.js", "feedback.js", "playground.js", "question.js", "answer.js"),
)
"""Names of the files below PREFIX."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""The content security policy: everything comes from this server, and no text becomes markup or code."""

_HEADERS = (
    (b"cache-control", b"no-cache"),  # a browser asks each time whether its copy is still right
    (b"content-security-policy", POLICY.encode()),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class PageFile(NamedTuple):
    """A file of the page."""

    content: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    tag: bytes  # the quoted hash of its content


@cache
def read(name: str) -> PageFile:
    """Return the file `name` of the table, which is read once."""
    content = (_FOLDER / name).read_bytes()
    tag = b'"%b"' % hashlib.sha256(content).hexdigest()[:32].encode()
    headers = (
        (b"content-type", _MEDIA[Path(name).suffix]),
        (b"content-length", b"%d" % len(content)),
        (b"etag", tag),
        *_HEADERS,
    )
    return PageFile(content, headers, tag)


def asked_for(scope: Scope) -> str | None:
    """Return the name of the file that a request is for; None if it is for something else than the page."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return None
    path: str = scope["path"]
    if path in DOCUMENTS:
        return DOCUMENTS[path] if any(b"text/html" in v for n, v in scope["headers"] if n == b"accept") else None
    name = path.removeprefix(PREFIX)
    return name if path.startswith(PREFIX) and name in FILES else None


class Page:
    """ASGI middleware that replies with the page's files, and passes all other requests on."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply with a file, with 304 to a browser that has it, or pass the request on."""
        if (name := asked_for(scope)) is None:
            await self._app(scope, receive, send)
            return
        file = read(name)
        known = [v for n, v in scope["headers"] if n == b"if-none-match"]
        if any(file.tag in value for value in known):
            kept = [(n, v) for n, v in file.headers if n != b"content-length"]
            await send({"type": "http.response.start", "status": 304, "headers": kept})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": list(file.headers)})
        body = b"" if scope["method"] == "HEAD" else file.content
        await send({"type": "http.response.body", "body": body})
