"""Adapters made ready for the device beside the engine's loop, so that writing one into its slot is all that is left.

Reading, widening and rounding the weights of a large adapter takes a tenth of a second, during which no step could be
launched; copies from arrays that are there already take a twentieth of that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.adapters.formats import AdapterWeights

Arrays = dict[str, tuple[mx.array, mx.array]]

WORTH_BYTES = 8 << 20
"""Of an adapter's float32 arrays: smaller ones are written in less time than a thread takes to wake up."""
KEPT = 2
"""Adapters that wait to be written; when there are more, the oldest is made ready again when it is its turn."""


class Uploads:
    """`prepare` and `keep` may be called on any thread, `take` on the one that runs the model."""

    def __init__(self, dtype: mx.Dtype):
        self._dtype = dtype
        self._ready: OrderedDict[str, Arrays] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, weights: AdapterWeights) -> None:
        """Have what `take` needs, if that is worth it."""
        if sum(a.nbytes + b.nbytes for a, b in weights.tensors.values()) < WORTH_BYTES:
            return
        self.keep(weights.info.digest, self._made(weights))

    def keep(self, digest: str, arrays: Arrays) -> None:
        """Have these for `take`."""
        with self._lock:
            self._ready[digest] = arrays
            while len(self._ready) > KEPT:
                self._ready.popitem(last=False)

    def take(self, weights: AdapterWeights) -> Arrays:
        """By path, A [inputs, r] and B [r, outputs] (experts in front), in the dtype of the slots up to a view."""
        with self._lock:
            arrays = self._ready.pop(weights.info.digest, None)
        return arrays or self._made(weights)

    def _made(self, weights: AdapterWeights) -> Arrays:
        return {path: (self._array(a), self._array(b)) for path, (a, b) in weights.tensors.items()}

    def _array(self, x: npt.NDArray[np.float32]) -> mx.array:
        # No operation of MLX here: those belong to a thread's stream, and what is not evaluated cannot cross threads.
        if self._dtype == mx.float32:
            return mx.array(x)
        if self._dtype == mx.float16:
            return mx.array(x.astype(np.float16))
        return mx.array(bfloat16_bits(x))


def bfloat16_bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """`x`, finite, rounded to the nearest bfloat16, to even on a tie."""
    bits = x.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
