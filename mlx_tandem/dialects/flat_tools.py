"""Naming the fields of tools for dialects whose tools have no member `function`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlx_tandem.errors import InvalidRequest


@contextmanager
def flat_tools() -> Iterator[None]:
    """Leave the member `function` out of errors about the fields of tools that are raised inside the block."""
    try:
        yield
    except InvalidRequest as e:
        e.message = e.message.replace(".function.", ".")
        e.param = None if e.param is None else e.param.replace(".function.", ".")
        raise
