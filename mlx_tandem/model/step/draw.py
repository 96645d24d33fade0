"""The part of a step that turns logits into tokens.

It belongs to the compiled function of the forward. Where a row draws by a mask, it is a compiled function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import Mask, mask_words
from mlx_tandem.model.step.inputs import ArraySpec, Numbers, receive
from mlx_tandem.model.step.sampler import Greedy, SamplingArrays, SamplingFlags, TokenCounts, sample
from mlx_tandem.model.step.verify import Drafts

Drawing = Callable[..., tuple[list[mx.array], mx.array, list[mx.array], list[mx.array]]]
"""A function that draws. It takes logits [rows, vocabulary], the positions [rows] of the tokens to be drawn, the rows'
seats, the newest token of each seat, the sampling arrays, the token counts of all seats, and optionally drafts with
the position of each seat's newest token, and masks [rows, words] uint32 as `Inputs` sends them. It returns the drawn
arrays, the newest tokens, the token counts afterwards, and with drafts a list of the newest tokens' positions.
"""


class Undrawn(NamedTuple):
    """The rows of a forward whose logits wait for masks. `rows` has their indices in the plan, in the order of the
    logits.
    """

    logits: mx.array
    position: mx.array
    seats: mx.array
    flags: SamplingFlags
    sampling: list[mx.array]
    drafts: list[mx.array]
    rows: list[int]
    wanted: list[int]
    verifies: bool


def drawing(flags: SamplingFlags, greedy: Greedy, nobody: int) -> Drawing:
    """Return the function that draws with these flags; `nobody` is the seat that takes the place of rows that do not
    count.
    """

    def draw(
        logits: mx.array,
        position: mx.array,
        seats: mx.array,
        last_tokens: mx.array,
        sampling: list[mx.array],
        seen: list[mx.array],
        drafts: Sequence[mx.array] = (),
        places: Sequence[mx.array] = (),
        sent: Sequence[mx.array] = (),
    ) -> tuple[list[mx.array], mx.array, list[mx.array], list[mx.array]]:
        how, own = SamplingArrays.unflatten(sampling, flags), flags
        if sent:
            rows, vocabulary = logits.shape
            (words,) = receive(sent, [ArraySpec((rows, mask_words(vocabulary)), "uint32")])
            mask = bits_of(words, vocabulary)
            how = replace(how, allowed=mask if how.allowed is None else how.allowed & mask)
            own = flags._replace(allowed=True)
        counts = TokenCounts.of(seen, seats)
        behind = Drafts(*drafts) if drafts else None
        if counts is not None and behind is not None:
            counts = counts.behind(behind.before)
        drawn = sample(logits, position, how, own, counts, greedy)
        token = mx.maximum(drawn.tokens, 0)
        counted, newest = (seats, seats) if behind is None else behind.accept(token, seats, nobody)
        last_tokens[newest] = token
        known = [] if counts is None else counts.after(seen, counted, token, newest)
        if behind is None:
            return drawn.flatten(), last_tokens, known, []
        (place,) = places
        place[newest] = position
        return drawn.flatten(), last_tokens, known, [place]

    return draw


def bits_of(words: mx.array, vocabulary: int) -> mx.array:
    """Return masks [rows, words] uint32 as [rows, vocabulary] bool."""
    bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.astype(mx.bool_).reshape(len(words), -1)[:, :vocabulary]


def words_of(rows: Sequence[int], count: int, masks: dict[int, list[Mask]], vocabulary: int) -> Numbers:
    """Return the masks of `count` rows of a forward, [count, words] uint32.

    rows: the index in the plan of each row of the forward; masks: by that index, one mask for each of its rows. The
    other rows may draw everything.
    """
    words = np.full((count, mask_words(vocabulary)), 0xFFFFFFFF, np.uint32)
    rest = {i: iter(own) for i, own in masks.items()}
    for at, i in enumerate(rows):
        if i in rest:
            words[at] = np.frombuffer(next(rest[i]), np.uint32)
    return words
