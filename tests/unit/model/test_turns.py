"""Which states a step that verifies drafts keeps, against a plain account of the same rows."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.plan import Row, RowKind
from mlx_tandem.kv.groups.state import MOST_DRAFTS
from mlx_tandem.model.cache.turns import kept_lines, line_of, turn_numbers

BEGIN, NOBODY = 50, 20

ROWS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, MOST_DRAFTS), st.integers(0, MOST_DRAFTS), st.floats(0, 1)),
    min_size=1,
    max_size=5,
)
"""Where a row begins, its drafts, the drafts before it that were rejected, and how many of its own are accepted."""


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from((1, 3, 8, 16)), st.integers(0, 3))
def test_each_block_gets_the_state_after_the_last_accepted_token_in_it(
    drawn: list[tuple[int, int, int, float]], size: int, padding: int
) -> None:
    rows, newest, expected = [], [0] * (NOBODY + 1), {}
    line = 1
    for seat, (start, drafts, rejected, share) in enumerate(drawn):
        bound, accepted = start + rejected, round(share * drafts)
        blocks = (bound + drafts) // size + 1
        table = tuple(BEGIN + line + n for n in range(blocks))
        kind = RowKind.VERIFY if drafts else RowKind.DECODE
        rows.append(Row(kind, seat, seat, 0, bound, (0,) * (1 + drafts), ((), table), True, slack=rejected))
        newest[seat] = start + accepted + 1
        for n in range(accepted + 1):
            expected[line + (start + n) // size] = seat, n
        line += blocks
    tokens = sum(len(row.tokens) for row in rows)
    shape, numbers = turn_numbers(rows, len(rows) + padding, tokens + padding, size, BEGIN, NOBODY)
    starts = mx.array([start for start, *_ in drawn] + [1000] * padding)
    to, taken = kept_lines(
        shape, size, [mx.array(n) for n in numbers.for_keeping()], starts, mx.array(newest, mx.int32)
    )
    drafting = numbers.drafting.tolist()
    states = [(row, 0) for row in range(shape.rows)]
    states += [(row, turn) for turn in range(1, 1 + shape.drafts) for row in drafting]
    kept = {line: states[at] for line, at in zip(to.tolist(), taken.tolist(), strict=True) if line}
    assert kept == expected
    # The state before each row is that of its block.
    read = line_of(mx.array(numbers.base), mx.array(numbers.tables), starts - 1, size).tolist()
    for row, (start, *_), found in zip(rows, drawn, read, strict=False):
        assert BEGIN + found == row.tables[-1][(start - 1) // size]
    # Each token finds its output among those of all turns.
    outputs = [(row, n) for row, r in enumerate(rows) for n in range(len(r.tokens))]
    assert [states[at] for at in numbers.output[:tokens].tolist()] == outputs
