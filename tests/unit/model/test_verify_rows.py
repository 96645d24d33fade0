"""What a forward that verifies drafts accepts, and what masks let through, against plain Python."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_tandem.engine.plan import NOT_A_NUMBER, Row, RowKind
from mlx_tandem.model.step.rows import Drafts, accepted, drafts_of, goes_with_decodes, take_verified

NOBODY = 9


def row(seat: int, tokens: tuple[int, ...]) -> Row:
    return Row(RowKind.VERIFY if len(tokens) > 1 else RowKind.DECODE, seat, seat, 0, 5, tokens, ((1,),), True)


@given(st.data())
@settings(max_examples=80)
def test_drafts_count_as_far_as_they_are_what_was_drawn(data: st.DataObject) -> None:
    """Each seat's newest token is that of one position, and what counts before it are the accepted drafts."""
    each = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5))
    rows = [row(seat, tuple(tokens)) for seat, tokens in enumerate([[7, 0], *each])]
    places = [(r.seat, n) for r in rows for n in range(len(r.tokens))]
    count = len(places) + data.draw(st.integers(0, 3))
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    seats = [seat for seat, _ in places] + [NOBODY] * (count - len(places))
    drafts = Drafts(*(mx.array(a) for a in drafts_of(rows, count)))
    counted, newest = (a.tolist() for a in drafts.accept(mx.array(drawn), mx.array(seats), NOBODY))  # type: ignore[union-attr]
    at = 0
    for r in rows:
        own = drawn[at : at + len(r.tokens)]
        said = accepted(r, own)
        marks = range(len(own))
        assert counted[at : at + len(own)] == [r.seat if n < len(said) else NOBODY for n in marks]
        assert newest[at : at + len(own)] == [r.seat if n == len(said) - 1 else NOBODY for n in marks]
        assert said[:-1] == r.tokens[1 : len(said)], "what is said before the last token are drafts"
        at += len(own)


def test_a_chunk_of_one_token_goes_with_decodes_unless_its_logits_are_wanted() -> None:
    chunk = replace(row(0, (1,)), kind=RowKind.PROMPT, sample=False)
    assert goes_with_decodes(chunk)
    assert not goes_with_decodes(replace(chunk, targets=(2,)))
    assert not goes_with_decodes(replace(chunk, pooling="mean"))


def test_a_position_that_is_not_finite_spoils_its_row_alone() -> None:
    plan_rows = [row(0, (1, 2, 3)), row(1, (4, 5))]

    class Plan:
        rows = plan_rows

    tokens: list[tuple[int, ...]] = [(), ()]
    take_verified(Plan, [0, 0, 0, 1, 1], [7, 8, NOT_A_NUMBER, 5, 6], tokens)  # type: ignore[arg-type]
    assert tokens == [(NOT_A_NUMBER,), (5, 6)]
