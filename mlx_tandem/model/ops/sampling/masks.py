"""The masks that rows draw by, kept on the device.

Most masks of a grammar come again and again: inside a string, after a key, at the end of a number. A mask of 150,000
tokens has 19 KB, and on CUDA the pages of such numbers move to the device each time that the host has written them. So
a mask travels once, and afterwards rows name its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import Mask, mask_words
from mlx_tandem.model.inputs import ArraySpec, Numbers, receive
from mlx_tandem.model.ops.sampling.draw import Masks

ROOM = 256
"""Fewest masks that a table holds."""

EVERYTHING = 0
"""The place of the mask that allows every token."""


class Placed(NamedTuple):
    """Masks that have a place in a table.

    Attributes:
        places: For each masked row of a plan, the places of its masks.
        new: Places of masks that the device does not have yet, [new] int32, and the masks, [new, words] uint32. Empty
            when there are none.
    """

    places: list[list[int]]
    new: tuple[Numbers, ...]


class MaskTable:
    """The masks last used, by their content.

    Attributes:
        array: The masks on the device, [room + 1, words] uint32; the last row takes padding.
    """

    def __init__(self, vocab_size: int, most_masks: int):
        """Make a table for plans of at most so many masks."""
        self._words = mask_words(vocab_size)
        self._room = max(ROOM, most_masks + 1)
        # Masks are found by a keyed sum of their words and then compared, so that no two are confused.
        self._key: Any = np.random.default_rng().integers(1 << 64, size=self._words // 2, dtype=np.uint64)
        self._known: OrderedDict[int, int] = OrderedDict()  # places by the sum, the last used one at the end
        self._contents: list[bytes] = [b""] * (self._room + 1)  # the masks by their place
        self._array: mx.array | None = None

    @property
    def array(self) -> mx.array:
        """The table on the device."""
        if self._array is None:
            self._array = mx.full((self._room + 1, self._words), 0xFFFFFFFF, dtype=mx.uint32)
        return self._array

    def clear(self) -> None:
        """Forget all masks."""
        self._known.clear()
        self._array = None

    def keep(self, written: Sequence[mx.array]) -> None:
        """Take in the table of a draw that has written new masks."""
        if written:
            (self._array,) = written

    def place(self, masks: Sequence[Sequence[Mask]]) -> Placed:
        """Find places for the masks of each masked row of a plan. It touches no array of the device."""
        every, size = b"".join([mask for own in masks for mask in own]), 4 * self._words
        words = np.frombuffer(every, np.uint32).reshape(-1, self._words)[:, : 2 * len(self._key)]
        sums: list[int] = (np.ascontiguousarray(words).view(np.uint64) @ self._key).tolist()
        places, new = [], []
        for at, digest in enumerate(sums):
            mask = every[at * size : (at + 1) * size]
            while (place := self._known.get(digest)) is not None and self._contents[place] != mask:
                digest += 1  # another mask has the same sum
            if place is None:
                place = self._take(digest)
                self._contents[place] = mask
                new.append(place)
            self._known.move_to_end(digest)
            places.append(place)
        each = iter(places)
        return Placed([[next(each) for _ in own] for own in masks], self._padded(new))

    def _take(self, digest: int) -> int:
        """Return the place for a new mask: a free one, or that of the mask that was not used for longest."""
        is_full = len(self._known) == self._room - 1
        place = self._known.popitem(last=False)[1] if is_full else len(self._known) + 1
        self._known[digest] = place
        return place

    def _padded(self, new: list[int]) -> tuple[Numbers, ...]:
        """Return the places of new masks and their words, padded to a power of four so that few shapes are traced."""
        if not new:
            return ()
        count = 1
        while count < len(new):
            count *= 4
        places = np.full(count, self._room, np.int32)
        places[: len(new)] = new
        words = np.zeros((count, self._words), np.uint32)
        words[: len(new)] = [np.frombuffer(self._contents[place], np.uint32) for place in new]
        return places, words


def masks_at(table: mx.array, sent: Sequence[mx.array], rows: int, num_new: int) -> tuple[Masks, list[mx.array]]:
    """Return the masks of the rows, and the table in a list if it has new masks.

    sent: the places [rows] int32 and `Placed.new`, as `Inputs` sends them. Without new masks
    the sent array is used as it is, and it may have further elements behind the first `rows`.
    """
    if not num_new:
        (places,) = sent
        return Masks(places, table), []
    new = [ArraySpec((num_new,), "int32"), ArraySpec((num_new, table.shape[1]), "uint32")]
    places, at, words = receive(sent, [ArraySpec((rows,), "int32"), *new])
    table[at] = words
    return Masks(places, table), [table]


def bits_of(words: mx.array, vocabulary: int) -> mx.array:
    """Return masks [rows, words] uint32 as [rows, vocabulary] bool."""
    bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.astype(mx.bool_).reshape(len(words), -1)[:, :vocabulary]


def places_of_rows(rows: Sequence[int], count: int, places: dict[int, list[int]]) -> Numbers:
    """Return the places of the masks of `count` rows of a forward, [count] int32.

    rows: the index in the plan of each row of the forward; places: by that index, one for each of its rows. The other
    rows may draw everything.
    """
    found = np.full(count, EVERYTHING, np.int32)
    rest = {i: iter(own) for i, own in places.items()}
    for at, i in enumerate(rows):
        if i in rest:
            found[at] = next(rest[i])
    return found
