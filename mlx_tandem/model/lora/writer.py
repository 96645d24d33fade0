"""Writes adapters into their slots by a kernel, while steps in flight read other slots.

MLX writes an array in place when nobody else holds it. On a GPU the steps in flight hold it until they are done, so
that a version of 250 pairs would have to wait for them, with nothing behind them on the device, and each of its 500
arrays takes several operations. By the kernel that writes the KV pool, all of them are one compiled function, which
the host waits for only the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from mlx_tandem.model.ops.inplace import Order, Store, after

log = logging.getLogger(__name__)


class SlotWriter:
    """Writes slots of stacked arrays by a kernel.

    Nothing may read a slot in the graph that writes it. Later graphs that depend on `order` read what was written.
    """

    def __init__(self, store: Store, order: Order):
        self._order = order
        self._write = mx.compile(
            lambda rows, arrays, contents: [
                store(_lines(x), rows, each.reshape(1, -1)) for x, each in zip(arrays, contents, strict=True)
            ]
        )
        self._is_right: bool | None = None  # unknown until the first slot is written

    @property
    def keeps_arrays(self) -> bool:
        """Whether writes leave the array objects unchanged, and the device runs later steps after the writes.

        Compiled steps may then capture the arrays. It is False until the first slot was written and checked.
        """
        return bool(self._is_right) and not self._order.zeros

    def write(self, arrays: Sequence[mx.array], slot: int, contents: Sequence[mx.array]) -> bool:
        """Write `contents[i]` into `arrays[i][slot]`; return False if the kernel is wrong, and then the slot's
        contents are undefined.
        """
        if self._is_right is False or not arrays:
            return False
        rows = mx.array([slot] * 4, mx.int32)  # the kernel uses one; MLX leaves arrays of up to eight bytes on the host
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
    """Return [slots + 1, …] as [slots + 1, width] over the same memory."""
    return x.reshape(x.shape[0], -1)
