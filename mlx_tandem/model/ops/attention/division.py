"""Divides attention's work between blocks of threads; a division that suits one device is slow on another.

The numbers for CUDA were measured on an H200. Those for Metal are derived from Apple's tables and have never run:
the check at start (`model/ops/attention/choice.py`) times alternatives on the user's device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_tandem.model.cache.kvformat import RowFormat

ALIGN = 64
"""Keys to whose multiples all splits but the last are rounded."""

LONG = 1024
"""Number of positions from which a context is long."""

LIVE_FLOATS = 128
"""32-bit values that a thread of Apple's GPUs holds in registers before it spills to memory."""

MOST_TOGETHER = 8
"""Queries for which the kernels are written: a block of threads answers at most this many together."""

FEW = 4
"""Most queries that a block answers together on a device with few registers, which limit the number of sums."""


@dataclass(frozen=True, slots=True)
class Division:
    """A way of dividing the work of one step.

    Attributes:
        blocks: Blocks of threads that fill the device; with fewer, the keys of each row are split.
        queries: Queries of one KV head that a block answers together, at most.
        depth: Keys that a team of lanes reads ahead; 0 means as many as the format and the context suggest.
        dense: Whether a processor may hold four blocks at once, of threads with fewer registers, instead of three.
        grouped: Whether adjacent rows of one sequence are answered together, by tensor cores.
        narrow: Whether a lane has 8 instead of 16 of a key's numbers where a block answers more than FEW queries. It
            then holds no more sums than with FEW, so that a device with few registers reads keys and values once for
            all queries.
    """

    blocks: int
    queries: int = MOST_TOGETHER
    depth: int = 0
    dense: bool = False
    grouped: bool = False
    narrow: bool = False

    def together(self, queries: int, dim: int) -> int:
        """Return how many of a KV head's `queries`, with heads of `dim` numbers, a block answers together."""
        most = min(self.queries, MOST_TOGETHER if dim <= 128 or self.narrow else FEW)
        return next(n for n in (1, 2, 4, 8) if n >= min(queries, most))

    def numbers(self, together: int) -> int:
        """Return how many of a key's numbers a lane holds if a block answers `together` queries together."""
        return 8 if self.narrow and together > FEW else 16

    def ahead(self, form: RowFormat, together: int, positions: int) -> int:
        """Return how many keys a team reads ahead: as many as registers hold.

        With small heads they are so few that a tile lies in one block of the pool. Short contexts are read with
        fewer, which makes the kernel shorter.
        """
        if self.depth:
            return self.depth
        wide = form.dtype == mx.float32 and not form.bits
        if together > FEW:
            return 1 if wide else 2
        return 4 if form.dim in (128, 256) and not wide and positions >= LONG else 2

    def held(self, blocks: int) -> int:
        """Return how many blocks a processor of the device should hold at once, 3 or 4, if the step has `blocks`.

        Threads with fewer registers are slower, so four are worth it only if the blocks then run in fewer turns. With
        three, `Division.blocks` blocks run at once. Microseconds on an H200 with four and with three (one layer of 192
        positions with 8 heads, with its launch): 22 and 28 for 64 rows, 39 and 42 for 128, but 32 and 30 for 80.
        """
        dense = 4 * self.blocks // 3
        return 4 if self.dense and -(-blocks // dense) < -(-blocks // self.blocks) else 3

    def splits(self, blocks: int, positions: int) -> int:
        """Return into how many splits each row's keys are cut if the step has `blocks` blocks without splits."""
        return max(1, min(self.blocks // blocks, positions // (2 * ALIGN)))


def live_floats(form: RowFormat, division: Division) -> int:
    """Return how many 32-bit values a thread of the attention kernel holds at once, counted in the kernel's text, with
    the number of queries for which it holds most. The division has a depth.
    """
    found, depth = [], division.depth
    for queries in {min(division.queries, FEW), division.queries}:
        numbers = division.numbers(queries)
        words = (numbers * form.bits // 32 + 1) if form.bits else numbers * form.dtype.size // 4  # of a key in a lane
        sums, scores, states, tables = numbers * queries, depth * queries, 3 * queries, 2 * depth
        found.append(sums + scores + states + tables + 2 * depth * words)
    return max(found)


def start(target: str, form: RowFormat) -> Division:
    """Return the division that is tried first on this target for rows of this format.

    On CUDA there are three blocks for each of an H200's 132 processors; on Metal six for each of 16 cores, with no more
    sums and keys than registers hold.
    """
    if target != "metal":
        return Division(132 * 3, dense=True, grouped=True)
    first = Division(96, depth=2, narrow=True)
    return first if live_floats(form, first) <= LIVE_FLOATS else replace(first, depth=1)


def shorter(first: Division, target: str, form: RowFormat) -> Iterator[Division]:
    """Yield divisions with other numbers of queries and keys that are worth timing beside `first` on this target."""
    if target == "metal":
        for queries in (MOST_TOGETHER, FEW, 2, 1):
            for depth in (4, 2, 1):
                found = replace(first, queries=queries, depth=depth, narrow=queries > FEW)
                if found != first and live_floats(form, found) <= LIVE_FLOATS:
                    yield found


def wider(first: Division, target: str, form: RowFormat) -> Iterator[Division]:
    """Yield divisions for devices that hold fewer or more blocks at once than `first` expects."""
    for factor in (1 / 4, 1 / 2, 2, 4):
        yield replace(first, blocks=int(first.blocks * factor))
