"""Calls of Mistral: [TOOL_CALLS] and a list of JSON objects, or [TOOL_CALLS]NAME[ARGS]{...} in later models."""

from __future__ import annotations

import re
import secrets
import string

from mlx_tandem.generation.scanner import Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm
from mlx_tandem.generation.tools.json_calls import read_calls
from mlx_tandem.generation.tools.sections import SectionParser

_OPEN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARACTERS = re.compile(r"[A-Za-z0-9]+")
_LETTERS = string.ascii_letters + string.digits


class MistralParser(SectionParser):
    """A parser of both forms."""

    openers = Markers(_OPEN)
    closers = ("[/TOOL_CALLS]",)
    extra_markers = (_ARGUMENTS, _ID)
    keeps_ids = True
    starts = "{["

    def new_id(self, name: str) -> str:
        """Return an id of nine letters and digits, since Mistral's chat templates refuse others."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def calls(self, opener: str) -> Routine[None]:
        """Read one or more calls."""
        if not opener:
            yield from self.bare()
            return
        first = yield from self.gap()
        if first in ("[", "{", "`"):
            yield from read_calls(self)
        else:
            name, id = (yield from self.name()), ""
            if (yield from self.accept(_ID)):
                yield from self.gap()
                id = yield from self.span(_ID_CHARACTERS, 64)
            if (yield from self.accept(_ARGUMENTS)):
                yield from self.object_or_nothing(name, id)
            else:
                yield from self.object(name, id, self.values())
        if (yield from self.accept(*self.closers)):
            self.checkpoint()


class MistralHeaderParser(MistralParser):
    """The same parser for models that write NAME[ARGS]{...}."""

    form = CallForm(_OPEN, _ARGUMENTS, "")
