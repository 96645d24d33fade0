"""Prepares adapters for the device on other threads, so that the engine's loop only has to write them into a slot.

Reading, widening and rounding the weights of a large adapter takes a tenth of a second, during which no step could
be launched. Copying arrays that exist already takes a twentieth of that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.adapters.formats import AdapterWeights

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
    """

    def __init__(self, dtype: mx.Dtype):
        self._dtype = dtype
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
        return {path: (self._array(a), self._array(b)) for path, (a, b) in weights.tensors.items()}

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
