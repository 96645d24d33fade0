"""The contents of adapters' slots: prepared on other threads, stacked for each linear, and written by a kernel."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.model.kernels.inplace import Order, Store, after
from mlx_tandem.model.targets import Cut

log = logging.getLogger(__name__)

SMALLEST_RANK = 8
"""Smallest rank of the stacked arrays of adapters."""


def bucket(rank: int) -> int:
    """Return the rank of stacked arrays that can hold `rank`: the next power of two from SMALLEST_RANK on."""
    wide = SMALLEST_RANK
    while wide < rank:
        wide *= 2
    return wide


class Stack:
    """Arrays `a` [slots + 1, inputs, r] and `b` [slots + 1, r, outputs] of one linear; with experts, [slots + 1,
    experts, …].

    Slot 0 is the base and stays zero. The arrays begin as zeros, or with the contents of `old`, a stack of smaller
    rank.
    """

    def __init__(self, shape: LinearShape, slots: int, rank: int, dtype: mx.Dtype, old: Stack | None):
        lead = (slots + 1, shape.experts) if shape.experts else (slots + 1,)
        self.a = mx.zeros((*lead, shape.inputs, rank), dtype)
        self.b = mx.zeros((*lead, rank, shape.outputs), dtype)
        if old is not None:
            known = old.a.shape[-1]
            self.a[..., :known] = old.a
            self.b[..., :known, :] = old.b
        mx.eval(self.a, self.b)  # now, so that only one old stack at a time lives beside its successor

    def contents(self, pair: tuple[mx.array, mx.array] | None) -> tuple[mx.array, mx.array]:
        """Return A and B as a whole slot has to hold them, padded with zeros so that nothing of an evicted adapter
        stays.

        `pair` may hold the bits of the arrays' type as integers; None stands for the base.
        """
        if pair is None:
            return mx.zeros(self.a.shape[1:], self.a.dtype), mx.zeros(self.b.shape[1:], self.b.dtype)
        rank = self.a.shape[-1]
        return _widened(pair[0].view(self.a.dtype), -1, rank), _widened(pair[1].view(self.b.dtype), -2, rank)


def _widened(x: mx.array, axis: int, size: int) -> mx.array:
    """Return `x` with zeros appended along `axis` up to `size`."""
    missing = size - x.shape[axis]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return mx.pad(x, widths) if missing else x


Arrays = dict[str, tuple[mx.array, mx.array]]
"""A and B of an adapter by the path of the linear."""

WORTH_BYTES = 8 << 20
"""Bytes of an adapter's float32 arrays from which it is prepared: smaller ones are written in less time than a
thread takes to wake up."""
KEPT = 2
"""Most adapters that wait to be written. When there are more, the oldest is dropped and made again when it is
written."""


class Uploads:
    """Adapters that are ready to be written. `prepare` and `keep` may be called on any thread, `take` on the model's
    only.

    Reading, widening and rounding the weights of a large adapter takes a tenth of a second, during which no step could
    be launched. Copying arrays that exist already takes a twentieth of that.
    """

    def __init__(self, dtype: mx.Dtype, cuts: Mapping[str, Cut] | None = None):
        """Create an empty store. `cuts` has by path which parts of linears are this rank's; the others are whole."""
        self._dtype = dtype
        self._cuts = cuts or {}
        self._ready: OrderedDict[str, Arrays] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, weights: AdapterWeights) -> None:
        """Make the arrays that `take` returns, if the adapter is large enough to be worth it."""
        if sum(a.nbytes + b.nbytes for a, b in weights.tensors.values()) < WORTH_BYTES:
            return
        self.keep(weights.info.digest, self._made(weights))

    def keep(self, digest: str, arrays: Arrays) -> None:
        """Keep these arrays for `take`."""
        with self._lock:
            self._ready[digest] = arrays
            while len(self._ready) > KEPT:
                self._ready.popitem(last=False)

    def take(self, weights: AdapterWeights) -> Arrays:
        """Return by path A [inputs, r] and B [r, outputs], with experts as the first axis, as arrays or bits of the
        slots' type.
        """
        with self._lock:
            arrays = self._ready.pop(weights.info.digest, None)
        return arrays or self._made(weights)

    def _made(self, weights: AdapterWeights) -> Arrays:
        made = {}
        for path, (a, b) in weights.tensors.items():
            cut = self._cuts.get(path)
            own_a, own_b = (a, b) if cut is None else cut.of(a, b)
            made[path] = self._array(own_a), self._array(own_b)
        return made

    def _array(self, x: npt.NDArray[np.float32]) -> mx.array:
        # No operation of MLX is used here: operations belong to a thread's stream, and unevaluated arrays cannot
        # cross threads.
        if self._dtype == mx.float32:
            return mx.array(x)
        if self._dtype == mx.float16:
            return mx.array(x.astype(np.float16))
        return mx.array(bfloat16_bits(x))


def bfloat16_bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return `x` (finite) rounded to the nearest bfloat16, to even on a tie, as its bits."""
    bits = x.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


class SlotWriter:
    """Writes slots of stacked arrays by a kernel.

    MLX writes an array in place when nobody else holds it. On a GPU the steps in flight hold it until they are done, so
    that a version of 250 pairs would have to wait for them, with nothing behind them on the device, and each of its 500
    arrays takes several operations. By the kernel that writes the KV pool, all of them are one compiled function, which
    the host waits for only the first time.

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
