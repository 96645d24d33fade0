"""Slices of device work: each is launched and waited for apart, so that others may run between two of them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx

from mlx_tandem.engine.pipeline import Wait

Slices = Generator[Wait, None, None]


def launched(*made: Any) -> Wait:
    """Start computing arrays, or containers of them; returns what waits for them."""
    mx.async_eval(*made)
    return lambda: mx.eval(*made)


def joined(slices: Iterator[Wait], count: int) -> Slices:
    """`count` of them as one slice: each is still launched by itself, and what it needed is free when it is done."""
    while group := list(islice(slices, count)):
        yield partial(finish, group)


def finish(slices: Iterable[Wait]) -> None:
    for wait in slices:
        wait()
