"""How rows that show images are put into forwards, and where their tokens are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.engine.budget import UNLIMITED
from mlx_tandem.engine.images import Images, shift_at, shown
from mlx_tandem.engine.plan import Row, RowKind, Shown
from mlx_tandem.model.step.rows import Rectangles
from mlx_tandem.model.vision.embeddings import ShownImages, positions_of
from mlx_tandem.model.vision.encoder import alternating, consecutive
from mlx_tandem.types import Image, Request, SamplingParams


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


@given(
    parts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    cuts=st.sets(st.integers(1, 120), max_size=6),
)
def test_however_a_prompt_is_cut_its_tokens_are_where_its_images_put_them(
    parts: list[tuple[int, int, int]], cuts: set[int]
) -> None:
    """Text, then an image of some lines and columns, and so on. An image takes as many positions as its longer side."""
    prompt, made, expected = list[int](), list[Image](), list[tuple[int, int, int]]()
    sizes, now = dict[bytes, int](), 0
    for number, (text, lines, columns) in enumerate(parts):
        prompt += [1] * text
        expected += [(now + n,) * 3 for n in range(text)]
        now += text
        image = Image(bytes([number]) * 16, len(prompt), lines * columns, b"")
        sizes[image.digest] = columns
        made.append(image)
        prompt += [9] * image.tokens
        expected += [(now, now + n // columns, now + n % columns) for n in range(image.tokens)]
        now += max(lines, columns)
    prompt.append(1)
    expected.append((now,) * 3)
    images = Images((9,), 1000, lambda image: sizes[image.digest])
    runs = images.runs(Request(0, tuple(prompt), SamplingParams(4), images=tuple(made)))
    s: Any = SimpleNamespace(runs=runs)
    borders = {at for run in runs for at in (run.start, run.end)}
    for chosen in (cuts, borders):
        ends = [*sorted(cut for cut in chosen if cut < len(prompt)), len(prompt)]
        found = []
        for start, end in zip([0, *ends], ends, strict=False):
            own = row(RowKind.PROMPT, end - start, *shown(s, start, end), start=start, shift=shift_at(s, start))
            found += positions_of([own], 1, end - start)[:, 0].T.tolist()
        assert [tuple(place) for place in found] == expected
    assert shift_at(s, len(prompt) + 7) == now - len(prompt) + 1, "tokens of the answer follow"


def test_frequencies_belong_to_axes() -> None:
    assert consecutive([2, 3, 3]) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert alternating([4, 2, 2]) == [0, 1, 2, 0, 1, 2, 0, 0]


def test_layers_add_images_to_rows_and_to_tokens() -> None:
    shown = ShownImages(nn.Module(), SimpleNamespace(axes=(), depth=0))  # type: ignore[arg-type]
    images, where = mx.random.normal((2, 3, 8)), mx.array([[True, False, True], [False, False, True]])
    shown.bind([images, where])
    hidden = mx.random.normal((2, 3, 4))
    rows = shown.add(0, hidden)
    assert mx.array_equal(rows, mx.where(where[..., None], hidden + images[..., 4:], hidden)).item()
    assert mx.array_equal(shown.add(0, hidden.reshape(-1, 4)), rows.reshape(-1, 4)).item()
