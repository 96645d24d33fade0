"""Kernels of drafts: which are accepted, and where rows begin that depend on drafts which the host has not read.

MLX needs about 25 and 20 operations for this. Launching them takes the host longer than they take the device.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.engine.plan import CARRY
from mlx_tandem.model.kernels.dialect import Make, Source

_ACCEPT_THREADS = 256

_ACCEPT = r"""
  const int count = tokens_shape[0], most = before_shape[1], num_seats = last_tokens_shape[0];
  for (int i = THREAD; i < num_seats; i += THREADS) newest[i] = last_tokens[i], places[i] = last_places[i];
  BARRIER();
  for (int i = THREAD; i < count; i += THREADS) {
    const int token = max(tokens[i], 0);
    bool is_newest = seats[i] < num_seats - 1 && following[i] != token;
    for (int j = 0; j < most; j++) {
      const int draft = before[i * most + j];  // negative: there is none
      if (draft >= 0 && draft != max(tokens[min(first[i] + j, count - 1)], 0)) is_newest = false;
    }
    if (is_newest) newest[seats[i]] = token, places[seats[i]] = position[i];  // at most one row of each seat
  }
"""


class Accept:
    """The kernel that accepts drafts, for CUDA."""

    def __init__(self, make: Make):
        inputs = ["tokens", "position", "seats", "before", "first", "following", "last_tokens", "last_places"]
        self._kernel = make(Source("accept", inputs, ["newest", "places"], _ACCEPT))

    def __call__(
        self,
        tokens: mx.array,
        position: mx.array,
        seats: mx.array,
        drafts: tuple[mx.array, mx.array, mx.array],
        last_tokens: mx.array,
        last_places: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Return the newest token of each seat and its position, int32 [seats], after a step that verifies drafts.

        Args:
            tokens: int32 [rows], the token that each row drew; NOT_A_NUMBER where its logits were NaN.
            position: int32 [rows], the position of each row's token.
            seats: int32 [rows], the seat of each row. Rows of the last seat change nothing.
            drafts: The arrays of `Drafts`.
            last_tokens: int32 [seats], the newest tokens before the step.
            last_places: int32 [seats], their positions.
        """
        given = [tokens, position, seats, *drafts, last_tokens, last_places]
        outputs = [(last_tokens.shape, mx.int32), (last_places.shape, mx.int32)]
        newest, places = self._kernel(given, {}, (1, 1, 1), _ACCEPT_THREADS, outputs)
        return newest, places


_SETTLE_THREADS = 128

_SETTLE = f"""
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
        self._kernel = make(Source("settle", inputs, ["begun", "settled", "slots"], _SETTLE))

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
            given, {"BLOCK": block_size}, (-(-rows // _SETTLE_THREADS), 1, 1), _SETTLE_THREADS, outputs
        )
        return begun, settled, slots
