"""The places of images in a prompt's text and among its token ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.parts import IMAGE_MARK
from mlx_tandem.generation.vision.messages import Made
from mlx_tandem.generation.vision.placing import with_runs, with_texts

TOKEN = 9
IMAGES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=4)
TEXT = st.lists(st.integers(0, 8), max_size=5)


def made(runs: list[int], text: str = "") -> Made:
    return Made(bytes(runs), b"a", text, runs)


@given(IMAGES, st.data())
def test_runs_of_placeholders(images: list[list[int]], data: st.DataObject) -> None:
    """The prompt without placeholders stays, and each image has its own tokens from its start on."""
    ids: list[int] = data.draw(TEXT)
    for runs in images:
        for _ in runs:
            ids += [TOKEN, *data.draw(TEXT)]
    long, placed = with_runs(ids, (TOKEN,), [made(runs) for runs in images])
    assert [t for t in long if t != TOKEN] == [t for t in ids if t != TOKEN]
    assert long.count(TOKEN) == sum(map(sum, images))
    places = [i for i, t in enumerate(long) if t == TOKEN]
    assert [image.tokens for image in placed] == list(map(sum, images))
    for image in placed:
        assert places[0] == image.start
        del places[: image.tokens]
    assert not places


@given(IMAGES, TEXT)
def test_a_placeholder_that_belongs_to_no_image_is_refused(images: list[list[int]], text: list[int]) -> None:
    ids = [*text, TOKEN, *(TOKEN for runs in images for _ in runs)]
    with pytest.raises(InvalidRequest, match="placeholder"):
        with_runs(ids, (TOKEN,), [made(runs) for runs in images])


def test_the_texts_of_images_replace_what_the_template_prints() -> None:
    parts = [("a<i>b", False), ("<i>", True), ("<i>", False)]
    assert with_texts(parts, ["<i>"], ["1", "2"]) == [("a1b", False), ("<i>", True), ("2", False)]


def test_the_longest_place_that_is_named_first_is_replaced_whole() -> None:
    assert with_texts([("a<b><v><e><v>", False)], ["<b><v><e>", "<v>"], ["1", "2"]) == [("a12", False)]


def test_images_and_videos_keep_their_own_placeholders_and_places_in_time() -> None:
    video = [Made(b"v", b"a", "", [2], time=time, follows=follows) for time, follows in ((0, False), (3, True))]
    long, placed = with_runs([1, 9, 8, 8, 2], (9, 8), [made([1]), *video])
    assert long == [1, 9, 8, 8, 8, 8, 2]
    assert [(i.start, i.tokens, i.time, i.follows) for i in placed] == [
        (1, 1, 0, False),
        (2, 2, 0, False),
        (4, 2, 3, True),
    ]


def test_a_mark_is_a_place_for_an_image() -> None:
    assert with_texts([(f"a{IMAGE_MARK}b<i>", False)], ["<i>"], ["1", "2"]) == [("a1b2", False)]


@pytest.mark.parametrize("text", ["", "<i><i>"])
def test_a_template_without_a_place_for_each_image_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{text.count('<i>')} places for the 1 images"):
        with_texts([(text, False)], ["<i>"], ["1"])
