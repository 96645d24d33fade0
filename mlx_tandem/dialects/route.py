"""A route of a dialect as data: the server reads the body, calls the handler and sends what the handler returns."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct, structs

from mlx_tandem.errors import TandemError

Reads = Literal["json", "steering", "prompts", "texts"]
"""How the body of a route is read.

json: once the engine is ready. steering: the same, and the body and its content type may be absent. prompts: once the
request would be admitted. texts: under the bounds for texts that are tokenised.
"""


@dataclass(frozen=True)
class Route:
    """One method of one path.

    The handler gets the server's front, the path's parameters in order, and the body if there is one; it may be a
    coroutine function. It returns a Plan, which is then generated; bytes or a list of them, which are JSON already; a
    text, which is sent as plain text; an HTTP status with a value; or a value, which is sent as JSON.
    """

    method: str
    path: str  # as Starlette writes it
    handler: Callable[..., Any]
    body: type[Struct] | None = None  # None: none is read
    reads: Reads = "json"
    select: Callable[[Any], Any] = lambda value: value  # applied to what the JSON says before it is typed
    status: int = 200  # of the answer, for the description of the route
    errors: Callable[[TandemError], bytes] | None = None  # writes an error's body; None: as OpenAI's error object

    @property
    def parameters(self) -> list[str]:
        """Return the names of the path's parameters, in order."""
        return re.findall(r"{(\w+)", self.path)

    @property
    def needs_body(self) -> bool:
        """Return whether a request without a body is refused."""
        if self.body is None:
            return False
        return self.reads != "steering" or any(field.required for field in structs.fields(self.body))
