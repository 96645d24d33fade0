"""Sums over ranks that compute one model together, and the part of a kernel by which GPUs of one machine add up.

MLX's own sum over two H200s takes 25 to 50 µs of a step, longer than most products of few rows: it ends the graph of
operations that is being dispatched, and begins another one. A kernel that exchanges its numbers with the other GPUs by
itself stays within the graph (docs/decisions/ranks.md). So a rank's part of a sum goes unsummed to the kernel
that adds and norms it (`residual.py`), which writes it into the memory of the others, waits for theirs and adds up.

A block of threads has one row. In each rank's memory there are places for each row: two for each sender, which take
turns. A sender writes into a place again when it has seen that the receiver has ended the call before, so two are
enough. Sums are made in the order of the ranks in float32, so all ranks have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_tandem.model import backend

MOST_ROWS = 128
"""Most rows of a sum. Each has a block, and all blocks have to run at once, since each waits for another GPU's."""

MOST_BYTES = 32768
"""Most bytes of a row."""

MOST_RANKS = 16
"""Most ranks of a group that exchanges rows by memory."""

WAIT_SECONDS = 60
"""Seconds after which a row whose numbers have not come is given up; its numbers are NaN then. A rank that dies ends
the group at once, so only a rank that hangs can keep the others waiting."""

FUNCTIONS = f"""
#define MOST_ROWS {MOST_ROWS}
#define MOST_BYTES {MOST_BYTES}
#define WAIT_SECONDS {WAIT_SECONDS}
"""

EXCHANGE = r"""
  // Rows of senders, then a flag for each of them, then the turn of each row.
  constexpr size_t ROWS = (size_t)2 * MOST_ROWS * RANKS;
  char* memory = (char*)where[RANK];
  int* turn = (int*)(memory + ROWS * (MOST_BYTES + sizeof(int))) + GROUP_X;
  const int now = *turn;
  const size_t first = ((size_t)now * MOST_ROWS + GROUP_X) * RANKS;
  SHARED(int, lost, 1);
  if (THREAD == 0) lost[0] = 0;
  UNROLL
  for (int rank = 0; rank < RANKS; rank++) {
    T* to = (T*)((char*)where[rank] + (first + RANK) * MOST_BYTES);
    UNROLL
    for (int i = 0; i < RUNS; i++) {
      const int number = 4 * (i * WIDTH + THREAD);
      if (rank != RANK && number < D) *(Four<T>*)(to + number) = mine[i];
    }
  }
  BARRIER();
  if (THREAD < RANKS && THREAD != RANK) {
    STORE_SHARED((int*)((char*)where[THREAD] + ROWS * MOST_BYTES) + first + RANK, 1);
    int* flag = (int*)(memory + ROWS * MOST_BYTES) + first + THREAD;
    if (!AWAIT_FOR(flag, WAIT_SECONDS)) lost[0] = 1;
    STORE_SHARED(flag, 0);
  }
  if (THREAD == 0) *turn = 1 - now;
  BARRIER();
  UNROLL
  for (int i = 0; i < RUNS; i++) {
    const int number = 4 * (i * WIDTH + THREAD);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL
    for (int rank = 0; rank < RANKS; rank++) {
      Four<T> part = mine[i];
      if (rank != RANK && number < D) part = *(const Four<T>*)((T*)(memory + (first + rank) * MOST_BYTES) + number);
      UNROLL
      for (int j = 0; j < 4; j++) sums[j] += float(part.of[j]);
    }
    UNROLL
    for (int j = 0; j < 4; j++) mine[i].of[j] = T(lost[0] ? FLOAT_BITS(0x7fc00000u) : sums[j]);
  }
"""
"""The exchange of `mine`, the numbers of a block's row that a thread has: Four<T> of each run. It is their sum over the
ranks afterwards. The kernel has the input `where` and the constants RANK, RANKS, D, WIDTH, RUNS and T."""


def shared_bytes(ranks: int) -> int:
    """Return the size of a rank's memory for the exchange."""
    return 2 * MOST_ROWS * ranks * (MOST_BYTES + 4) + 4 * MOST_ROWS


@dataclass(frozen=True, slots=True)
class RowExchange:
    """The memory that ranks on one machine exchange rows by.

    Attributes:
        where: [ranks] uint64, the address of each rank's memory in this process.
        rank: The number of this rank.
    """

    where: mx.array
    rank: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.where.size

    @staticmethod
    def open(group: mx.distributed.Group) -> RowExchange | None:
        """Return the exchange of a group, or None if it is spread over machines or the device has no such memory.

        Every rank has to call it, and all get the same answer.
        """
        if group.size() > MOST_RANKS:
            return None
        addresses = backend.current().shared_memory(group, shared_bytes(group.size()))
        return None if addresses is None else RowExchange(mx.array(np.array(addresses, np.uint64)), group.rank())

    def takes(self, x: mx.array) -> bool:
        """Return whether rows of x [..., dim] fit."""
        dim = x.shape[-1]
        return x.size <= MOST_ROWS * dim and dim * x.dtype.size <= MOST_BYTES


class Sums:
    """Sums over the ranks of a group, made by MLX. A sum that a kernel makes instead is never evaluated."""

    def __init__(self, group: mx.distributed.Group):
        self.group = group
        self._newest: tuple[mx.array, mx.array] | None = None

    def __call__(self, part: mx.array) -> mx.array:
        """Return the sum of all ranks' parts."""
        total = mx.distributed.all_sum(part, group=self.group)
        self._newest = total, part
        return total

    def take_part(self, total: mx.array) -> mx.array | None:
        """Forget the newest sum, and return this rank's part of it if it is `total`."""
        newest, self._newest = self._newest, None
        return newest[1] if newest is not None and newest[0] is total else None
