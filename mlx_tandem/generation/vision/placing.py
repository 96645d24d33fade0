"""The places of images in a prompt: in the text that a chat template prints, and among its token ids."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.parts import IMAGE_MARK, Part
from mlx_tandem.generation.vision.messages import Made
from mlx_tandem.types import Image


def with_texts(parts: Sequence[Part], places: Sequence[str], texts: Sequence[str]) -> list[Part]:
    """Return a prompt's text in which the text of an image or a video replaces each place for one.

    places: the texts that chat templates print for an image or a video; IMAGE_MARK is a place, too. texts: those of the
    images and videos, in their order. Raises InvalidRequest unless there are as many places as `texts`.
    """
    pattern = re.compile("|".join(map(re.escape, (*places, IMAGE_MARK))))
    found = sum(len(pattern.findall(text)) for text, plain in parts if not plain)
    if found != len(texts):
        raise InvalidRequest(
            f"the model's chat template has {found} places for the {len(texts)} images of these messages",
            param="messages",
        )
    left = iter(texts)
    made: list[Part] = []
    for text, plain in parts:
        if not plain:
            text = pattern.sub(lambda _: next(left), text)
        made.append((text, plain))
    return made


def with_runs(
    ids: Sequence[int], tokens: Collection[int], images: Sequence[Made]
) -> tuple[list[int], tuple[Image, ...]]:
    """Return the ids of a prompt with as many placeholders as its images take, and the images with their places.

    `ids` have one placeholder for each run, and `tokens` are the ids of placeholders. Raises InvalidRequest when the
    text of a message adds others.
    """
    at = [i for i, found in enumerate(ids) if found in tokens]
    if len(at) != sum(len(image.runs) for image in images):
        raise InvalidRequest("the text of the messages contains a placeholder of an image or video", param="messages")
    made: list[int] = []
    placed: list[Image] = []
    done, places = 0, iter(at)
    for image in images:
        start = None
        for run in image.runs:
            place = next(places)
            made += ids[done:place]
            start = len(made) if start is None else start
            made += [ids[place]] * run
            done = place + 1
        assert start is not None
        placed.append(Image(image.digest, start, sum(image.runs), image.arrays, image.time, image.follows))
    return made + list(ids[done:]), tuple(placed)
