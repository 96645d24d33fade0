"""The few shapes that steps are padded to, so that each is traced once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from mlx_tandem.engine.plan import Row
from mlx_tandem.kv.pool import first_block

SPLIT_GAIN = 1024
"""Padded block reads that a second forward must save to be worth its launch."""

EXACT_ROWS = 4
"""Up to so many rows, a step has none that are padding."""


def row_count(rows: int, good: Sequence[int] = ()) -> int:
    """Rows padded up: exact to EXACT_ROWS; to the next of the counts that are known to be good (ascending); beyond the
    last of them at most an eighth to a quarter more.
    """
    if good and EXACT_ROWS < rows <= good[-1]:
        return good[bisect_left(good, rows)]
    return _padded(rows, ((EXACT_ROWS, 1), (16, 2), (64, 4), (128, 8), (256, 16)), 32)


def coarse_count(rows: int) -> int:
    """As `row_count`, of rows among which are tokens of prompts: their number changes with every step, and each count
    goes with many a number of rows that are sampled.
    """
    return _padded(rows, ((EXACT_ROWS, 1), (16, 8), (64, 16), (128, 32)), 64)


def _padded(rows: int, steps: Sequence[tuple[int, int]], beyond: int) -> int:
    """To the next multiple of the step whose limit rows are within, or of `beyond`."""
    step = next((step for limit, step in steps if rows <= limit), beyond)
    return -(-rows // step) * step


def coarse_width(blocks: int) -> int:
    """As `table_width`, for the same."""
    return 1 << max(blocks - 1, 0).bit_length()


def table_width(blocks: int) -> int:
    """Blocks of a table padded up: exact to 8, then at most a quarter more."""
    if blocks <= 8:
        return blocks
    step = 1 << (blocks.bit_length() - 3)
    return -(-blocks // step) * step


def blocks_read(row: Row, block_size: int, window: int | None) -> int:
    """From the first block that its first token sees to that of its last."""
    return -(-(row.start + len(row.tokens)) // block_size) - first_block(row.start, window, block_size)


def most_blocks_read(rows: Sequence[Row], block_size: int, window: int | None) -> int:
    """By any of the rows."""
    if window is None:
        return -(-max([r.start + len(r.tokens) for r in rows]) // block_size)
    return max([blocks_read(r, block_size, window) for r in rows])


def split_by_context(rows: Sequence[int], blocks: Mapping[int, int]) -> list[list[int]]:
    """Cut rows (indices into `blocks`) into one or two groups: one long context beside many short ones would
    otherwise pad them all to its own length.
    """
    order = sorted(rows, key=lambda i: blocks[i])
    n = len(order)
    whole = n * blocks[order[-1]]
    best, cut = whole - SPLIT_GAIN, 0
    for i in range(1, n):
        cost = i * blocks[order[i - 1]] + (n - i) * blocks[order[-1]]
        if cost < best:
            best, cut = cost, i
    return [order[:cut], order[cut:]] if cut else [list(rows)]


def cut(rows: Sequence[int], blocks: Mapping[int, int], most: int, good: Sequence[int] = ()) -> list[list[int]]:
    """Cut rows (indices into `blocks`) into pieces whose padded tables have at most `most` blocks each, or one row.
    `good`: row counts as for `row_count`.
    """
    rest = sorted(rows, key=lambda i: blocks[i])
    pieces = []
    while rest:
        width = table_width(blocks[rest[-1]])
        n = len(rest)
        while n > 1 and row_count(n, good) * width > most:
            n -= 1
        pieces.append(rest[-n:])
        del rest[-n:]
    return pieces
