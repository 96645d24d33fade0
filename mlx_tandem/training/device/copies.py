"""Arrays of the device, read on other threads.

To read an array MLX moves the whole buffer that it lies in, and on CUDA the device goes on from where it was moved to,
page by page. No other Python runs meanwhile. So what is read is a copy, and that in pieces.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

PIECE = 1 << 20
"""Numbers: half a millisecond's work, in which streams do not miss the interpreter."""


class Copy:
    """Of a float32 array [n], made where the model runs; `read` once, on any thread."""

    def __init__(self, whole: mx.array):
        self._pieces = [whole[k : k + PIECE] * 1.0 for k in range(0, whole.size, PIECE)]
        mx.async_eval(self._pieces)

    def read(self) -> npt.NDArray[np.float32]:
        pieces, self._pieces = self._pieces, []
        return np.concatenate([np.asarray(piece) for piece in pieces])
