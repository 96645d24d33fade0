"""The Jinja environment that chat templates are written for."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refused(TemplateError):
    """The error that a template raises through `raise_exception` to refuse a conversation."""


def environment() -> ImmutableSandboxedEnvironment:
    """Return a sandboxed environment with everything that templates of the Hugging Face hub rely on.

    These are the hub's whitespace rules, `tojson`, `raise_exception`, `strftime_now`, loop controls and `generation`.
    """
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _raise_exception(message: str) -> None:
    raise Refused(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return `value` as JSON. Jinja's own filter also escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for trainers. Serving only prints its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the opening and the closing tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
