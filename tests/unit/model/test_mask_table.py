"""The table of masks on the device: each row draws by its own mask, whatever the table held before."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.plan import mask_words
from mlx_tandem.model.inputs import Inputs
from mlx_tandem.model.ops.sampling import masks as mask_table
from mlx_tandem.model.ops.sampling.masks import EVERYTHING, MaskTable, bits_of, masks_at, places_of_rows


def mask(allowed: set[int], vocabulary: int) -> bytes:
    return sum(1 << t for t in allowed).to_bytes(mask_words(vocabulary) * 4, "little")


def draw(
    table: MaskTable, masks: Sequence[bytes | None], vocabulary: int, *, packed: bool
) -> tuple[list[set[int]], int]:
    """Return what each row may draw, and how many masks travelled. Rows with None have no mask."""
    own = {i: mask for i, mask in enumerate(masks) if mask is not None}
    placed = table.place([[mask] for mask in own.values()])
    places = places_of_rows(range(len(masks)), len(masks), dict(zip(own, placed.places, strict=True)))
    sent = Inputs(packed).send([places, *placed.new])
    num_new = len(placed.new[0]) if placed.new else 0
    found, written = masks_at(table.array, sent.arrays, len(masks), num_new)
    bits = bits_of(found.of_rows(len(masks)), vocabulary)
    mx.eval(bits, written)
    table.keep(written)
    return [set(np.flatnonzero(row).tolist()) for row in np.array(bits)], num_new


@pytest.mark.parametrize("packed", [False, True])
@given(data=st.data(), vocabulary=st.integers(1, 100))
@settings(max_examples=40, deadline=None)
def test_each_row_draws_by_its_own_mask(packed: bool, data: st.DataObject, vocabulary: int) -> None:
    """Also where the table has to give up masks, several of a draw at once."""
    allowed = st.sets(st.integers(0, vocabulary - 1))
    kinds = data.draw(st.lists(st.none() | allowed, min_size=1, max_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_table, "ROOM", 1)
        table = MaskTable(vocabulary, 4)
    for _ in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
        got, _ = draw(table, [None if r is None else mask(r, vocabulary) for r in rows], vocabulary, packed=packed)
        assert got == [set(range(vocabulary)) if r is None else r for r in rows]


def test_a_mask_travels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = MaskTable(40, 2)
    one, other = mask({1}, 40), mask({2, 39}, 40)
    assert [draw(table, masks, 40, packed=True)[1] for masks in ([one, one], [other, one], [one, other], [None])] == [
        1,
        1,
        0,
        0,
    ]
    table.clear()
    assert draw(table, [other], 40, packed=True) == ([{2, 39}], 1)


def test_places_that_travel_alone_are_read_where_they_are() -> None:
    """If the device already has all masks, the draw copies nothing; the kernel reads places in the host's buffer."""
    table = MaskTable(40, 4)
    for masks, copied in (([{1}, {2}], True), ([{2}, {1}], False)):
        placed = table.place([[mask(each, 40)] for each in masks])
        own = dict(enumerate(placed.places))
        sent = Inputs(True).send([places_of_rows([0, 1], 3, own), *placed.new])
        found, written = masks_at(table.array, sent.arrays, 3, len(placed.new[0]) if placed.new else 0)
        table.keep(written)
        assert (found.places is not sent.arrays[0]) == copied
        assert np.array(found.places)[:3].tolist() == [*own[0], *own[1], EVERYTHING]
        assert found.of_rows(3).shape == (3, mask_words(40))


def test_masks_of_the_same_sum_are_told_apart() -> None:
    table = MaskTable(64, 4)
    table._key[:] = 0
    masks = [mask({1}, 64), mask({2}, 64)]
    for _ in range(2):
        assert draw(table, masks[:1], 64, packed=False)[0] == [{1}]
        assert draw(table, masks[1:], 64, packed=False)[0] == [{2}]
    assert draw(table, masks, 64, packed=False)[0] == [{1}, {2}]


def test_a_mask_of_this_draw_does_not_give_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it was the first in the table, it is the last that goes when it is used again."""
    monkeypatch.setattr(mask_table, "ROOM", 1)
    table = MaskTable(40, 4)
    masks = [mask({n}, 40) for n in range(5)]
    assert draw(table, masks[:4], 40, packed=False) == ([{0}, {1}, {2}, {3}], 4)
    assert draw(table, [masks[0], masks[4]], 40, packed=False) == ([{0}, {4}], 1)


def test_rows_are_given_their_masks_in_order() -> None:
    """Rows of a forward are named by the plan's row; a row with drafts has a mask for each position."""
    table = MaskTable(40, 4)
    a, b, c = (mask({n}, 40) for n in (1, 2, 3))
    (first, other), (third,) = table.place([[a, b], [c]]).places
    assert len({first, other, third, EVERYTHING}) == 4
    found = places_of_rows([3, 0, 0, 1], 6, {0: [first, other], 3: [third]})
    assert found.tolist() == [third, first, other, EVERYTHING, EVERYTHING, EVERYTHING]
