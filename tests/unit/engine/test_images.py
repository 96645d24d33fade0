"""Which images the device encodes, keeps and drops: by room, to the last embedding, and by when they were used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_tandem.engine.images import Images
from mlx_tandem.engine.plan import StepPlan
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import Image, Request, SamplingParams

TOKEN = 9


def digest(name: str) -> bytes:
    return name.encode() * 16


def sequence(images: Images, *shown: tuple[str, int]) -> Any:
    """A prompt with a text of one token before and after each of these images, of so many tokens each."""
    prompt, made = [1], []
    for name, tokens in shown:
        made.append(Image(digest(name), len(prompt), tokens, b""))
        prompt += [TOKEN] * tokens + [1]
    request = Request(0, tuple(prompt), SamplingParams(4), images=tuple(made))
    return SimpleNamespace(runs=images.runs(request), scheduled=0)


def step(images: Images, *reading: Any, failed: tuple[str, ...] = ()) -> tuple[str, str]:
    """Plan and read one step; return the names of the images that it drops and of those that it encodes."""
    drops, encodes = images.plan(reading)
    images.done(StepPlan((), drops=drops, encodes=encodes), map(digest, failed))
    return "".join(chr(d[0]) for d in drops), "".join(chr(image.digest[0]) for image in encodes)


def test_what_was_used_last_stays_longest() -> None:
    images = Images((TOKEN,), 6)
    for name in "abc":
        assert step(images, sequence(images, (name, 2))) == ("", name)
    assert step(images, sequence(images, ("a", 2))) == ("", ""), "a hit"
    assert step(images, sequence(images, ("d", 2))) == ("b", "d")
    assert step(images, sequence(images, ("e", 3))) == ("ca", "e"), "as many as it needs, and d stays"
    assert step(images, sequence(images, ("d", 2))) == ("", "")


def test_an_image_may_take_all_of_the_room_and_no_more() -> None:
    images = Images((TOKEN,), 4)
    assert step(images, sequence(images, ("a", 4))) == ("", "a")
    with pytest.raises(InvalidRequest, match="image 1 has 5 tokens; 4 fit here"):
        sequence(images, ("a", 4), ("b", 5))


def test_images_that_fill_the_room_together_are_encoded_one_a_step() -> None:
    images = Images((TOKEN,), 4)
    first, second = sequence(images, ("a", 2)), sequence(images, ("b", 2))
    assert [step(images, first, second) for _ in range(3)] == [("", "a"), ("", "b"), ("", "")]


def test_an_image_waits_until_those_before_it_are_read() -> None:
    images = Images((TOKEN,), 3)
    first, second = sequence(images, ("a", 2), ("a", 2)), sequence(images, ("b", 2))
    assert [step(images, first, second) for _ in range(2)] == [("", "a"), ("", "")]
    assert images.readable(second, 9) == 1
    first.scheduled = 5
    assert step(images, first, second) == ("", ""), "its second place is not read yet"
    first.scheduled = 6
    assert step(images, first, second) == ("a", "b")
    assert images.readable(second, 9) == 9


def test_what_is_read_ends_before_an_image_that_is_not_encoded() -> None:
    images = Images((TOKEN,), 9)
    one = sequence(images, ("a", 2), ("b", 2))
    assert [images.readable(one, n) for n in (1, 2, 9)] == [1, 1, 1]
    drops, encodes = images.plan([one])
    assert images.readable(one, 9) == 1, "its encoding has not been read"
    images.done(StepPlan((), drops=drops, encodes=encodes), ())
    assert [images.readable(one, n) for n in (4, 5, 9)] == [4, 4, 4]
    one.scheduled = 5
    assert images.readable(one, 9) == 0
    step(images, one)
    assert images.readable(one, 9) == 9


def test_an_image_that_failed_or_was_lost_is_encoded_again() -> None:
    images = Images((TOKEN,), 4)
    one = sequence(images, ("a", 2))
    assert [step(images, one, failed=("a",)) for _ in range(2)] == [("", "a")] * 2
    assert step(images, one) == ("", "a")
    images.plan([sequence(images, ("b", 2))])
    images.clear()
    assert not images._kept and not images._under_way
    assert step(images, one) == ("", "a")
