"""Kernel that tells rows behind drafts that the host has not read where they are and with which token they begin.

By MLX's operations it is some 20 operations on a few hundred numbers, which take the host longer than the device.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.engine.plan import CARRY
from mlx_tandem.model.kernels.dialect import Make, Source

_THREADS = 128

_BODY = f"""
  const int i = GROUP_X * THREADS + THREAD, width = tables_shape[1];
  if (i < tokens_shape[0]) {{
    const int at = offset[i] + (bounds[i] < 0 ? 0 : last_places[seats[i]] - bounds[i]);
    begun[i] = tokens[i] == {CARRY} ? last_tokens[seats[i]] : tokens[i];
    settled[i] = at;
    slots[i] = tables[(size_t)i * width + at / BLOCK] * BLOCK + at % BLOCK;
  }}
"""


class Settle:
    """The kernel for CUDA."""

    def __init__(self, make: Make):
        inputs = ["tokens", "offset", "bounds", "seats", "tables", "last_tokens", "last_places"]
        self._kernel = make(Source("settle", inputs, ["begun", "settled", "slots"], _BODY))

    def __call__(
        self,
        tokens: mx.array,
        offset: mx.array,
        bounds: mx.array,
        seats: mx.array,
        tables: mx.array,
        last_tokens: mx.array,
        last_places: mx.array,
        block_size: int,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return the tokens [rows, 1], their positions [rows], and the slots [rows, 1] that they are written to.

        The arguments are those of `Operands` for rows of one token, with `tables` that begin with the sequence; the
        newest token of each seat, and its position.
        """
        rows = len(tokens)
        given = [tokens, offset, bounds, seats, tables, last_tokens, last_places]
        outputs = [((rows, 1), mx.int32), ((rows,), mx.int32), ((rows, 1), mx.int32)]
        begun, settled, slots = self._kernel(
            given, {"BLOCK": block_size}, (-(-rows // _THREADS), 1, 1), _THREADS, outputs
        )
        return begun, settled, slots
