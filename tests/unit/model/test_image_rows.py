"""How rows that show images are put into forwards, and where their tokens are."""

from __future__ import annotations

import numpy as np

from mlx_tandem.engine.budget import UNLIMITED
from mlx_tandem.engine.plan import Row, RowKind, Shown
from mlx_tandem.model.step.rectangles import Rectangles
from mlx_tandem.model.vision.positions import alternating, consecutive, positions_of


def row(kind: RowKind, tokens: int, *shown: Shown, start: int = 0, shift: int = 0) -> Row:
    return Row(kind, 0, 0, 0, start, (5,) * tokens, ((1, 2, 3),), False, images=shown, shift=shift)


def test_a_row_of_one_placeholder_does_not_go_with_decodes() -> None:
    """Whose forward would be traced once more for it."""
    rows = [
        row(RowKind.DECODE, 1, start=7),
        row(RowKind.PROMPT, 1, Shown(b"a", 0, 3, 1)),
        row(RowKind.PROMPT, 1, start=3),
    ]
    assert Rectangles(8, None, 0, UNLIMITED, ()).of(rows) == [[0, 2], [1]]


def test_tokens_of_an_image_have_a_line_and_a_column() -> None:
    """The row begins within an image of 2 lines and 3 columns, which begins at index 4 and takes 3 positions."""
    image = Shown(b"a", 0, 2, 4, shift=1, after=-2, columns=3)
    found = positions_of([row(RowKind.PROMPT, 6, image, start=6, shift=1)], 2, 7)
    assert found[:, 0, :6].tolist() == [[5, 5, 5, 5, 8, 9], [5, 6, 6, 6, 8, 9], [7, 5, 6, 7, 8, 9]]
    assert not np.any(found[:, 1])


def test_frequencies_belong_to_axes() -> None:
    assert consecutive([2, 3, 3]) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert alternating([4, 2, 2]) == [0, 1, 2, 0, 1, 2, 0, 0]
