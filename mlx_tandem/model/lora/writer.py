"""Adapters written into their slots where a kernel can write what a step in flight reads other parts of.

MLX writes an array in place when nobody else holds it. On a GPU the steps in flight do until they are done, so that a
version of 250 pairs has to wait for them, with nothing behind them on the device, and each of its 500 arrays takes
several operations. With the kernel that writes the KV pool they are one compiled function, which the host waits for
only the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from mlx_tandem.model.cache.inplace import Order, after
from mlx_tandem.model.kernels.store import Store

log = logging.getLogger(__name__)


class SlotWriter:
    """Nothing may read a slot in the graph that writes it; later graphs that are made of `order` find what was
    written."""

    def __init__(self, store: Store, order: Order):
        self._order = order
        self._write = mx.compile(
            lambda rows, arrays, contents: [
                store(_lines(x), rows, each.reshape(1, -1)) for x, each in zip(arrays, contents, strict=True)
            ]
        )
        self._is_right: bool | None = None  # not known before the first slot is written

    def write(self, arrays: Sequence[mx.array], slot: int, contents: Sequence[mx.array]) -> bool:
        """Write `contents[i]` into `arrays[i][slot]`. False where the kernel has been found to be wrong: then nothing
        can be said of the slot."""
        if self._is_right is False or not arrays:
            return False
        rows = mx.array([slot] * 4, mx.int32)  # one is used; of eight bytes and less MLX keeps the host's copy
        written = self._write(after(self._order.zeros, rows), arrays, contents)
        self._order.follow(written)
        mx.async_eval(written)
        if self._is_right is None:
            mx.eval(written)
            self._is_right = all(
                bool(mx.array_equal(x[slot], each).item()) for x, each in zip(arrays, contents, strict=True)
            )
            if not self._is_right:
                log.warning("adapters are not written by the kernel: it is wrong on this device")
        return self._is_right


def _lines(x: mx.array) -> mx.array:
    """[slots + 1, …] as [slots + 1, width], the same memory."""
    return x.reshape(x.shape[0], -1)
