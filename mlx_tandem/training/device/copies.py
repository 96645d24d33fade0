"""Arrays of the device, read on other threads.

To read an array MLX moves the whole buffer that it lies in, and on CUDA the device goes on from where it was moved to,
page by page. No other Python runs meanwhile. So what is read is a copy, in pieces.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.training.device.slices import dispatch

PIECE = 1 << 20
"""Numbers of one piece: to read it takes half a millisecond, in which streams do not miss the interpreter."""


class Copy:
    """A copy of a float32 array [n], made on the thread where the model runs."""

    def __init__(self, whole: mx.array):
        """Begin to copy `whole` on the device."""
        self._pieces = [whole[k : k + PIECE] * 1.0 for k in range(0, whole.size, PIECE)]
        dispatch(self._pieces)

    def read(self) -> npt.NDArray[np.float32]:
        """Return the numbers and forget the copy. Call it once, on any thread."""
        pieces, self._pieces = self._pieces, []
        return np.concatenate([np.asarray(piece) for piece in pieces])
