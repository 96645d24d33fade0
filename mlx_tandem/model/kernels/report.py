"""Kernel that writes a step's drawn tokens into the host's memory, beside the numbers that the host has sent.

To read an array that lies in the device's memory, MLX copies it into memory that both sides share. The driver may let
this copy wait for everything that was dispatched. If that includes a step that waits at the gate (`gate.py`), host and
device wait for each other.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Make, Source
from mlx_tandem.model.kernels.gate import RESERVED

_THREADS = 128

_BODY = f"""
  const int count = tokens_shape[0], to = numbers_shape[0] - {RESERVED} - count;
  for (int i = THREAD; i < count; i += THREADS) {{
    const int token = tokens[i];
    copy[i] = token;
    STORE_SHARED(numbers + to + i, token);
  }}
"""


class Report:
    """The kernel for CUDA."""

    def __init__(self, make: Make):
        self._kernel = make(Source("report", ["tokens", "numbers"], ["copy"], _BODY, writes=["numbers"]))

    def __call__(self, tokens: mx.array, numbers: mx.array) -> mx.array:
        """Write `tokens`, int32 [count], into `numbers`, in front of the last RESERVED of them; return a copy.

        Once the copy has been computed, the tokens are in `numbers`.
        """
        (copy,) = self._kernel([tokens, numbers], {}, (1, 1, 1), _THREADS, [(tokens.shape, mx.int32)])
        return copy
