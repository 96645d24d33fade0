"""The shapes that steps are padded to. They are few, so that each is traced once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from mlx_tandem.engine.plan import Row
from mlx_tandem.kv.pool import first_block

SPLIT_GAIN = 1024
"""Fewest padded block reads that a second forward has to save to be worth its launch."""

EXACT_ROWS = 4
"""Most rows of a step for which no row is added as padding."""


LEAST_WIDTH = 32
"""Fewest blocks of a table in mixed steps, unless they are gathered. When a table outgrows its width, the step that was
built ahead of time is wasted, and a step with the new width has to be traced."""

SHORTEST, NARROWEST = 4, 8
"""Least length of rows that draw several tokens, and the least width of their tables."""


def row_count(rows: int, good: Sequence[int] = ()) -> int:
    """Return the padded number of rows: exact up to EXACT_ROWS, then the next of the `good` counts (ascending).

    Beyond the last of them, and without any, it is at most a quarter larger, mostly at most an eighth.
    """
    if good and EXACT_ROWS < rows <= good[-1]:
        return good[bisect_left(good, rows)]
    return _padded(rows, ((EXACT_ROWS, 1), (16, 2), (64, 4), (128, 8), (256, 16)), 32)


def coarse_count(rows: int, *, gathers: bool = False) -> int:
    """Return a coarser `row_count` for mixed steps, which have piggybacked rows or drafts.

    Their number of rows changes with every step, and each count is combined with many numbers of sampled rows. With
    `gathers` the keys of each row are copied, so that a row of padding costs as much as any, and fewer are added.
    """
    if gathers:
        return _padded(rows, ((EXACT_ROWS, 1), (16, 4), (64, 8), (128, 32)), 64)
    return _padded(rows, ((EXACT_ROWS, 1), (16, 8), (64, 16), (128, 32)), 64)


def _padded(rows: int, steps: Sequence[tuple[int, int]], beyond: int) -> int:
    """Return `rows` padded to a multiple: of the step of the first limit that is at least `rows`, else of `beyond`.

    steps: pairs (limit, step), ascending.
    """
    step = next((step for limit, step in steps if rows <= limit), beyond)
    return -(-rows // step) * step


def group_size(tokens: int) -> int:
    """Return the padded number of rows of a sequence with so many tokens, if each token is a row.

    The result is 1, 2, 3, 5, or from 8 on a power of two or one more than that, which leaves room for the newest token.
    Few sizes are used, because a step is traced for each.
    """
    if tokens <= 2:
        return tokens
    return min(1 + (1 << (tokens - 2).bit_length()), max(1 << (tokens - 1).bit_length(), 8))


def drafting_length(tokens: int) -> int:
    """Return the padded length of rows that have so many tokens and draw several: a power of two, at least SHORTEST."""
    return max(1 << (tokens - 1).bit_length(), SHORTEST)


def drafting_width(blocks: int) -> int:
    """Return the padded number of blocks of the tables of such rows: a power of two, at least NARROWEST.

    The widths are few, since each is traced for each length. Padding costs little, since a small model gathers keys and
    values once for several tokens.
    """
    return max(1 << (blocks - 1).bit_length(), NARROWEST)


def coarse_width(blocks: int, *, gathers: bool) -> int:
    """Return a coarser `table_width` for mixed steps: the next power of two, at least LEAST_WIDTH.

    With `gathers` every block of a table is copied, so narrower tables and the numbers halfway between are used, too.
    """
    whole = 1 << max(blocks - 1, 0).bit_length()
    if not gathers:
        return max(whole, LEAST_WIDTH)
    return 3 * whole // 4 if whole >= 4 and blocks <= 3 * whole // 4 else whole


def table_width(blocks: int) -> int:
    """Return the padded number of blocks of a table: exact up to 8, then at most a quarter more."""
    if blocks <= 8:
        return blocks
    step = 1 << (blocks.bit_length() - 3)
    return -(-blocks // step) * step


def blocks_read(row: Row, block_size: int, window: int | None) -> int:
    """Return the number of blocks from the first one that the row's first token sees to that of its last token.

    A row with slack may begin earlier, and has blocks for both ends.
    """
    return -(-(row.start + len(row.tokens)) // block_size) - first_block(row.start - row.slack, window, block_size)


def most_blocks_read(rows: Sequence[Row], block_size: int, window: int | None) -> int:
    """Return the largest `blocks_read` of the rows."""
    if window is None:
        return -(-max([r.start + len(r.tokens) for r in rows]) // block_size)
    return max([blocks_read(r, block_size, window) for r in rows])


def split_by_context(rows: Sequence[int], blocks: Mapping[int, int]) -> list[list[int]]:
    """Cut rows (indices into `blocks`) into one or two groups.

    In one group, a single long context would pad many short ones to its own length.
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
