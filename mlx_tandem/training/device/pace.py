"""The size of a micro-batch on a device whose speed is not known beforehand: one pass is timed at start."""

from __future__ import annotations

from collections.abc import Callable

SIZES = (64, 128, 256, 512)
"""Sizes of a micro-batch that may be chosen, in tokens, ascending."""

FIRST = 256
"""The size that is timed, in tokens."""

LEAST_MS = 10.0
"""Milliseconds of a slice that streams do not notice, whatever the device."""

MOST_MS = 100.0
"""Most milliseconds of a slice on a GPU that also draws a display, so that macOS does not end it."""


def micro_batch_tokens(slowest_slice: Callable[[int], float], step_ms: float, most: int) -> int:
    """Return the largest size up to `most` whose slices take at most the time of a step of one stream and MOST_MS.

    `slowest_slice(tokens)` returns the milliseconds of the slowest slice of a pass of so many tokens. `step_ms`: of a
    step in which one stream decodes. A slice's time grows at most in proportion to its tokens, so one measurement of a
    larger size bounds every smaller one.
    """
    allowed = min(max(step_ms, LEAST_MS), MOST_MS)
    timed = min(FIRST, most)
    each = slowest_slice(timed) / timed
    return max((size for size in SIZES if size <= most and size * each <= allowed), default=min(SIZES[0], most))
