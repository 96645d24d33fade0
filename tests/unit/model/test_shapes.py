"""The shapes that steps are padded to: few, and not much larger than what is in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from mlx_tandem.model.shapes import LEAST_WIDTH, NARROWEST, coarse_count, coarse_width, drafting_width, group_size


@pytest.mark.parametrize(
    ("padded", "kinds", "most", "least"),
    [
        (partial(coarse_width, gathers=False), 3, 2.0, LEAST_WIDTH),
        (partial(coarse_width, gathers=True), 14, 1.5, 1),  # every block of padding is copied
        (coarse_count, 11, 1.9, 1),
        (partial(coarse_count, gathers=True), 15, 1.6, 1),
        (drafting_width, 5, 2.0, NARROWEST),
        (group_size, 14, 2.0, 1),
    ],
)
def test_sizes_of_mixed_steps_are_few_and_their_padding_is_bounded(
    padded: Callable[[int], int], kinds: int, most: float, least: int
) -> None:
    sizes = [padded(n) for n in range(1, 129)]
    assert sizes == sorted(sizes) and len(set(sizes)) <= kinds
    assert all(n <= size <= max(most * n, least) for n, size in enumerate(sizes, 1))


def test_groups_have_room_for_a_newest_token_and_a_power_of_two_of_drafts() -> None:
    assert sorted({group_size(n) for n in range(1, 34)}) == [1, 2, 3, 5, 8, 9, 16, 17, 32, 33]
