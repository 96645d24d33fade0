"""Routes of dialects as data: the server reads the body, calls the handler and sends what the handler returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, structs

from mlx_tandem.errors import TandemError
from mlx_tandem.generation.caller import SCOPES, Scope

PLAIN = frozenset({"", "application/x-www-form-urlencoded"})
"""Content types that curl sends by default, without a body and with one."""

FORM = "multipart/form-data"
"""The content type of a form with files. Web pages of other sites may send it without asking."""

BROWSER = "sec-fetch-site"
"""A header that every browser sends, and no program."""

Reads = Literal["json", "steering", "prompts", "texts", "bytes"]
"""The way in which the body of a route is read.

json: only when the engine is ready. steering: the same, but the body may be absent. prompts: only when the request
would be admitted. texts: within the limits for texts to tokenise. bytes: as a Received, whatever it is, from a program
that needs larger bodies than requests for answers have (`MAX_PROGRAM_BODY`).
"""

RouteScope = Scope | Literal["any", "public"]
"""The scope that a key needs for a route. any: every key may ask. public: no key is needed."""


@dataclass(frozen=True)
class Received:
    """A body as it was sent, with its content type in lower case without parameters, and its content encoding."""

    content: bytes
    media: str
    encoding: str


@dataclass(frozen=True)
class Reply:
    """A reply with a content type and a status of its own. `path` is a file that it has as its content instead."""

    content: bytes = b""
    media: str | None = None
    status: int = 200
    path: Path | None = None


@dataclass(frozen=True)
class ErrorForm:
    """The form of a dialect's errors: the function that writes the JSON body, and the body's JSON schema.

    All paths at and below `prefix` have this form, those without a route too.
    """

    write: Callable[[TandemError], bytes]
    schema: Mapping[str, Any]
    prefix: str = ""


@dataclass(frozen=True)
class Route:
    """One method of one path.

    The handler gets the server's front, the path's parameters in order, the query if the route has one, and the body
    if there is one. It may be a coroutine function. It returns one of these: a Plan, which the server then generates;
    bytes, which are JSON already, or for `texts` a sequence of them; an iterator of bytes, which are server-sent events
    and are made on another thread; a text, which is sent as plain text; an HTTP status with a value; or a value, which
    is sent as JSON; or a Reply.

    Raises TypeError for a route whose `scope` is not declared.
    """

    method: str
    path: str  # in Starlette's notation
    handler: Callable[..., Any]
    body: type[Struct] | None = None  # None: no body is read
    query: type[Struct] | None = None  # None: the query means nothing
    reads: Reads = "json"
    images: bool = False  # bodies may hold images, and be larger where the model reads them
    media: Collection[str] = ()  # content types of JSON besides application/json; of `bytes`, those of the document
    prepare: Callable[[Any], Any] = lambda value: value  # applied to the decoded JSON before its types are checked
    status: int = 200  # HTTP status of a success, for the OpenAPI document
    errors: ErrorForm | None = None  # the form of errors; None: OpenAI's error object
    wakes: bool = True  # a request with a body that has to be read wakes an idle engine; False: it needs none
    header: str | None = None  # the route is for requests with this header; others go to a later route of this path
    scope: RouteScope | None = field(default=None, kw_only=True)  # what a key needs; None is refused

    def __post_init__(self) -> None:
        """Raise TypeError unless the scope is one of those that there are."""
        if self.scope not in (*SCOPES, "any", "public"):
            known = ", ".join(f'"{scope}"' for scope in SCOPES)
            raise TypeError(
                f'Route("{self.method}", "{self.path}", …) declares no scope: write scope= with one of {known}, '
                'or "any" if every key may ask, or "public" if no key is needed'
            )

    @property
    def parameters(self) -> list[str]:
        """The names of the path's parameters, in order."""
        return re.findall(r"{(\w+)", self.path)

    @property
    def needs_body(self) -> bool:
        """Whether a request without a body is refused."""
        if self.body is None:
            return self.reads == "bytes"
        return self.reads != "steering" or any(field.required for field in structs.fields(self.body))
