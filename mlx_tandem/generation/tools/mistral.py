"""Calls of Mistral: [TOOL_CALLS] and a list of JSON objects, or [TOOL_CALLS]NAME[ARGS]{...} in later models."""

from __future__ import annotations

import re
import secrets
import string

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm, CallParser
from mlx_tandem.generation.tools.json_calls import read_call, read_calls

_OPEN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARACTERS = re.compile(r"[A-Za-z0-9]+")
_LETTERS = string.ascii_letters + string.digits


class MistralParser(CallParser):
    """A parser of both forms."""

    openers = Markers(_OPEN)
    others = (_ARGUMENTS, _ID)

    def new_id(self, name: str) -> str:
        """Return an id of nine letters and digits, since Mistral's chat templates refuse others."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def calls(self, opener: str) -> Routine[None]:
        """Read one or more calls."""
        first = yield from self.gap()
        if first == "[":
            yield from read_calls(self, id_key="id")
        elif first == "{":
            yield from read_call(self, id_key="id")
        else:
            name, id = (yield from self.name()), ""
            if (yield from self.choose(_ARGUMENTS, _ID)) == _ID:
                id = yield from self.span(_ID_CHARACTERS, 64)
                yield from self.expect(_ARGUMENTS)
            if (yield from self.gap()) != "{":
                raise Malformed
            yield from self.begin(name, id)
            yield from self.json_arguments()


class MistralHeaderParser(MistralParser):
    """The same parser for models that write NAME[ARGS]{...}."""

    form = CallForm(_OPEN, _ARGUMENTS, "")
