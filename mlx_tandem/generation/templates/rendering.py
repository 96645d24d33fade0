"""Rendering a chat template in the process that calls it, which has to be one that may be lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_tandem.generation.templates.environment import Refused, environment
from mlx_tandem.generation.templates.messages import Failed, Rendered, Setup
from mlx_tandem.generation.templates.shields import Shields, Unprinted
from mlx_tandem.limits import MAX_TEMPLATE_OUTPUT

MAX_DETAIL = 500
"""Characters of a template's own words in an error."""


class Renderer:
    """A compiled template. The constructor raises whatever the template makes the compiler raise."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._template = environment().from_string(setup.source)

    def render(self, values: Mapping[str, Any]) -> Rendered | Failed:
        """Return the prompt for these values of the template's variables, or why there is none.

        `continue_final_message` is none of them: when it is true, the prompt ends with the last message's content.
        """
        given = dict(values)
        continues = given.pop("continue_final_message", False)
        shields = Shields(self._setup.specials, given, continues=continues)
        try:
            text = self._template.render({**self._setup.variables, **shields.values})
            if len(text.encode()) > MAX_TEMPLATE_OUTPUT:
                return Failed("too_large")
            return Rendered(shields.split(text))
        except Unprinted:
            return Failed("unprinted")
        except MemoryError:
            raise
        except Refused as e:
            return Failed("refused", said(e))
        except Exception:  # a template may fail in any way
            return Failed("failed")


def said(error: Exception) -> str:
    """Return the message of an error, as text that can be encoded and is not long."""
    return str(error)[:MAX_DETAIL].encode("utf-8", "replace").decode()
