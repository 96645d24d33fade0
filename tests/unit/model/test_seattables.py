"""Block tables by seat: what a step is given is what its sequences have."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.model.step.index_arrays import SeatTables

SEATS = 4


@given(st.data(), st.integers(0, 50))
@settings(max_examples=150)
def test_a_cut_is_what_the_tables_have(data: st.DataObject, first: int) -> None:
    """Under any order of new owners, growth, roll-back and steps of some of the seats."""
    own = SeatTables(SEATS, first)
    tables: dict[int, tuple[int, ...]] = dict.fromkeys(range(SEATS), ())
    for _ in range(data.draw(st.integers(1, 12))):
        seats = data.draw(st.lists(st.integers(0, SEATS - 1), min_size=1, unique=True))
        before = own.generation
        changed = False
        for seat in seats:
            if data.draw(st.booleans()):
                own.forget(seat)
                tables[seat] = ()
                changed = True
            kept = tables[seat][: data.draw(st.integers(0, len(tables[seat])) | st.just(len(tables[seat])))]
            new = (*kept, *data.draw(st.lists(st.integers(first + 1, first + 99), max_size=9)))
            changed = changed or new != tables[seat]
            tables[seat] = new
        own.learn(seats, [tables[s] for s in seats])
        assert (own.generation != before) == changed
        width = data.draw(st.integers(1, 30))
        begin = np.array([data.draw(st.integers(0, len(tables[s]))) for s in seats] + [0])
        for where in (None, begin):
            cut = own.cut([*seats, SEATS], width, where)
            assert cut.dtype == np.int32 and cut.flags.c_contiguous
            for row, seat, start in zip(cut.tolist(), seats, begin if where is not None else [0] * SEATS, strict=False):
                seen = [b - first for b in tables[seat][start : start + width]]
                assert row == seen + [0] * (width - len(seen))
            assert not cut[-1].any()
