"""Rendering a chat template in the calling process, which the template may bring down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_tandem.generation.templates.environment import Refused, environment
from mlx_tandem.generation.templates.messages import Failed, Rendered, Setup
from mlx_tandem.generation.templates.shields import Shields, Unprinted
from mlx_tandem.limits import MAX_TEMPLATE_OUTPUT

MAX_DETAIL = 500
"""Most characters of a template's own words in an error."""


class Renderer:
    """A compiled template. The constructor raises the errors of the template's compilation, of any type."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._template = environment().from_string(setup.source)

    def render(self, values: Mapping[str, Any]) -> Rendered | Failed:
        """Return the prompt for these values of the template's variables, or the reason why there is none.

        The value `continue_final_message` does not reach the template. When it is true, the prompt ends with the
        content of the last message.
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
        except Exception:  # A template may raise anything.
            return Failed("failed")


def said(error: Exception) -> str:
    """Return the message of an error, at most MAX_DETAIL characters long and valid UTF-8."""
    return str(error)[:MAX_DETAIL].encode("utf-8", "replace").decode()
