"""Offering tools for dialects whose tools have no member `function`, and some of whose tools are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.tools.offer import Tools, tools_of


def flat_tools_of(
    tools: Sequence[Any],
    choice: Any,
    parallel: bool | None,
    places: Sequence[str],
    skipped: Sequence[str],
    schemas: Mapping[str, str],
) -> Tools | None:
    """Return the tools of a request; None if it offers none to the model.

    The first three arguments have the form of OpenAI's chats. `places` has the request's field of each tool, and
    `skipped` the tools that were left out. `schemas` has the field of each tool's schema by the tool's name. Raises
    InvalidRequest that names fields as the request has them.
    """
    try:
        with flat_fields():
            return tools_of(tools, choice, parallel, places=schemas)
    except InvalidRequest as e:
        param = e.param or ""
        if (found := re.match(r"tools\[(\d+)\]", param)) is not None and len(tools) == len(places):
            where = places[int(found[1])]
            e.message = e.message.replace(found[0], where, 1)
            e.param = where + param[found.end() :]
        if param.startswith("tool_choice") and skipped:
            e.message += f"; tools that only run elsewhere were left out: {', '.join(skipped[:8])}"
        raise


@contextmanager
def flat_fields() -> Iterator[None]:
    """Leave the member `function` out of errors about the fields of tools that are raised inside the block."""
    try:
        yield
    except InvalidRequest as e:
        e.message = e.message.replace(".function.", ".")
        e.param = None if e.param is None else e.param.replace(".function.", ".")
        raise
