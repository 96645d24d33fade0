"""Slices of device work: each is launched and waited for apart, so that others may run between two of them."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx

from mlx_tandem.engine.plan import DeviceError, OutOfMemory, Wait
from mlx_tandem.model import backend, compiler

Slices = Generator[Wait, None, None]

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|Insufficient Memory|Unable to allocate|bad_alloc", re.IGNORECASE
)
"""Words in the errors that MLX raises on Metal, CUDA or a CPU when there is too little memory."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise what goes wrong on the device inside the block as DeviceError or OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        again = compiler.has_failed(e)
        ran_out = isinstance(e, MemoryError) or _OUT_OF_MEMORY.search(str(e)) is not None
        raise (OutOfMemory if ran_out else DeviceError)(f"{type(e).__name__}: {e}", again=again) from e


def dispatch(*made: Any) -> None:
    """Start computing arrays, or containers of them. Raises DeviceError.

    All that learning computes is dispatched here, with the same share of the host's cores: on a CPU the bits of a
    product depend on it, and an update's bits must not depend on the requests before it. With half of the cores, passes
    are as fast as with all of them or faster, and take less of the processors (docs/decisions/cpu-arithmetic.md).
    """
    with device_errors():
        backend.current().share_cores(every_core=False)
        mx.async_eval(*made)


def launched(*made: Any) -> Wait:
    """Start computing arrays, or containers of them, and return what waits for them. Both raise DeviceError."""
    dispatch(*made)
    return partial(_wait, *made)


def _wait(*made: Any) -> None:
    with device_errors():
        mx.eval(*made)


def joined(slices: Iterator[Wait], count: int) -> Slices:
    """Yield `count` slices as one: each is still launched by itself, and what it needed is free when it is done."""
    while group := list(islice(slices, count)):
        yield partial(finish, group)


def finish(slices: Iterable[Wait]) -> None:
    """Wait for each slice in turn, after it was launched."""
    for wait in slices:
        wait()
