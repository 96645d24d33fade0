"""The images of prompts: where their placeholders are, and which of them the device has encoded.

Each group of a video's frames counts as an image here. While a prompt is being read, its images are encoded in their
order, at most one in each step. Their embeddings stay on the device, within a budget, for the chunks that follow, for
other requests with the same image and for sequences that are computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from mlx_tandem.engine.plan import Shown, StepPlan
from mlx_tandem.engine.sequence import Run, Sequence
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import Image, Request


class Work(NamedTuple):
    """What a step does for images: it drops the embeddings of these digests, then encodes these images."""

    drops: tuple[bytes, ...] = ()
    encodes: tuple[Image, ...] = ()


_NO_WORK = Work()

DIGEST_BYTES = 16
"""Bytes of an image's digest."""


class Images:
    """The images of all requests: which of them the device has encoded, and which come next.

    `tokens` are the ids of placeholders, and `room` is the number of embeddings that the device keeps. `columns`
    returns the columns of an image in models whose positions have several axes, and 0 in others; it may raise
    InvalidRequest.
    """

    def __init__(self, tokens: Collection[int], room: int, columns: Callable[[Image], int] = lambda image: 0):
        self._tokens = tokens
        self._columns = columns
        self._room = room
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # embeddings by digest; the last used image is the last
        self._under_way: set[bytes] = set()  # of these, images whose encoding has not been read

    def runs(self, request: Request) -> tuple[Run, ...]:
        """Return the placeholders of a request's images. Raises InvalidRequest unless they match the images."""
        if not request.images:
            return ()
        places = [i for i, token in enumerate(request.prompt) if token in self._tokens]
        if places and places[-1] == len(request.prompt) - 1:
            raise InvalidRequest("the prompt ends with an image: text must follow it", param="images")
        rest, runs = iter(places), list[Run]()
        for n, image in enumerate(request.images):
            if image.tokens > self._room:
                raise InvalidRequest(f"image {n} has {image.tokens} tokens; {self._room} fit here", param="images")
            own = list(islice(rest, max(image.tokens, 0)))
            if len(image.digest) != DIGEST_BYTES or not own or len(own) < image.tokens or own[0] != image.start:
                raise InvalidRequest(f"image {n} does not have the placeholders that it names", param="images")
            runs += _runs(image, own, self._columns(image), runs[-1] if runs else None)
        if next(rest, None) is not None:
            raise InvalidRequest("a placeholder in the prompt belongs to no image", param="images")
        return tuple(runs)

    def plan(self, reading: Iterable[Sequence]) -> Work:
        """Return what the next step does for the images of the prompts that are being read, most important ones first.

        The images that they still need are kept in this order as far as there is room, and only these are encoded. So
        the first prompt never waits for room.
        """
        needed: dict[bytes, Image] = {}
        room = self._room
        for s in reading:
            for run in s.runs:
                image = run.image
                if run.end <= s.scheduled or image.digest in needed:
                    continue
                if (room := room - image.tokens) < 0:
                    return self._work(needed)
                needed[image.digest] = image
        return self._work(needed) if needed else _NO_WORK

    def _work(self, needed: Mapping[bytes, Image]) -> Work:
        """Return the work of a step for which these images are needed, in this order."""
        for digest in needed:
            if digest in self._kept:
                self._kept.move_to_end(digest)
        image = next((image for digest, image in needed.items() if digest not in self._kept), None)
        if image is None:
            return _NO_WORK
        drops, used = [], sum(self._kept.values()) + image.tokens
        for digest in [digest for digest in self._kept if digest not in needed]:
            if used <= self._room:
                break
            used -= self._kept.pop(digest)
            self._under_way.discard(digest)
            drops.append(digest)
        self._kept[image.digest] = image.tokens
        self._under_way.add(image.digest)
        return Work(tuple(drops), (image,))

    def readable(self, s: Sequence, tokens: int) -> int:
        """Return how many of the next `tokens` of a prompt can be read: those before the first image not encoded."""
        for run in s.runs:
            if run.start >= s.scheduled + tokens:
                break
            if run.end > s.scheduled and not self._has(run.image.digest):
                return max(run.start - s.scheduled, 0)
        return tokens

    def _has(self, digest: bytes) -> bool:
        return digest in self._kept and digest not in self._under_way

    def done(self, plan: StepPlan, failed: Iterable[bytes]) -> None:
        """Note that a step's result was read. The images with the digests `failed` could not be encoded."""
        self._under_way.difference_update(image.digest for image in plan.encodes)
        for digest in failed:
            self._kept.pop(digest, None)

    def clear(self) -> None:
        """Note that the device has lost all embeddings."""
        self._kept.clear()
        self._under_way.clear()


def _runs(image: Image, places: list[int], columns: int, before: Run | None) -> list[Run]:
    """Return the runs of an image whose placeholders are at these positions.

    columns: as in `plan.Shown`; before: the last run of the image before it, None for the first image.
    """
    shift = after = 0
    if columns:
        shift = 0 if before is None else before.after
        if image.follows and before is not None:
            shift = before.image.start + before.shift - image.start
        after = shift + max(columns, image.tokens // columns, image.time + 1) - image.tokens
    begins = [n for n, place in enumerate(places) if not n or place != places[n - 1] + 1]
    ends = [*begins[1:], len(places)]
    return [
        Run(image, places[first], first, end - first, shift, after, columns, image.time)
        for first, end in zip(begins, ends, strict=True)
    ]


def shift_at(s: Sequence, position: int) -> int:
    """Return what to add to the index `position` of a token that is no placeholder to get its rotary position."""
    return next((run.after for run in reversed(s.runs) if run.end <= position), 0)


def shown(s: Sequence, start: int, end: int) -> tuple[Shown, ...]:
    """Return the placeholders in a row of `s` at positions start … end - 1."""
    return tuple(
        [
            Shown(
                run.image.digest,
                at - start,
                run.first + at - run.start,
                min(run.end, end) - at,
                run.shift,
                run.after,
                run.columns,
                run.time,
            )
            for run in s.runs
            if run.start < end and run.end > start
            for at in (max(run.start, start),)
        ]
    )
