"""Kernel that sets tokens, positions and slots of rows whose beginning depends on drafts that the host has not read.

MLX needs about 20 operations for this. Launching them takes the host longer than they take the device.
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
    """The kernel that sets the tokens, positions and slots of rows, for CUDA."""

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
        """Return the tokens [rows, 1], their positions [rows], and the slots [rows, 1] of their keys and values.

        Args:
            tokens: int32 [rows, 1], as in `Operands`.
            offset: int32 [rows], as in `Operands`.
            bounds: int32 [rows], as in `Operands`.
            seats: int32 [rows], as in `Operands`.
            tables: int32 [rows, width], the blocks of each row from the first block of its sequence on.
            last_tokens: int32 [seats], the newest token of each seat.
            last_places: int32 [seats], the positions of these tokens.
            block_size: Positions of a block.
        """
        rows = len(tokens)
        given = [tokens, offset, bounds, seats, tables, last_tokens, last_places]
        outputs = [((rows, 1), mx.int32), ((rows,), mx.int32), ((rows, 1), mx.int32)]
        begun, settled, slots = self._kernel(
            given, {"BLOCK": block_size}, (-(-rows // _THREADS), 1, 1), _THREADS, outputs
        )
        return begun, settled, slots
