"""Rows with states are cut into forwards by the states that a forward holds, and by nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mlx_tandem.engine.budget import UNLIMITED
from mlx_tandem.engine.plan import Row, RowKind
from mlx_tandem.model.step.rows import Rectangles

DECODE = Row(RowKind.DECODE, 0, 0, 0, 9, (5,), ((1, 2),), True)


def pieces(rows: list[Row], *, held: int, share: float) -> list[int]:
    """Return how many rows each forward has where one may hold `held` states."""
    made = Rectangles(8, None, 8, UNLIMITED._replace(rows=held), (), unpadded=True)
    made.gathered_share = share
    return [len(piece) for piece in made.of(rows)]


@pytest.mark.parametrize(("share", "expected"), [(1.0, [4, 4, 2]), (0.5, [8, 2]), (0.1, [10]), (0.0, [10])])
def test_rows_that_decode_count_by_what_is_gathered(share: float, expected: list[int]) -> None:
    assert pieces([replace(DECODE, sequence=n, seat=n) for n in range(10)], held=4, share=share) == expected


@pytest.mark.parametrize(
    "row",
    [
        replace(DECODE, kind=RowKind.PROMPT, start=0),
        replace(DECODE, slack=2),
        replace(DECODE, kind=RowKind.VERIFY, tokens=(5, 6)),
    ],
    ids=["begins", "follows", "verifies"],
)
def test_rows_whose_states_lie_beside_the_pool_count_whole(row: Row) -> None:
    each = len(row.tokens)
    assert pieces([replace(row, sequence=n, seat=n) for n in range(6)], held=4 * each, share=0.0) == [4, 2]
