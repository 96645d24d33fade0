"""The part of a step that turns logits into tokens.

It belongs to the compiled function of the forward. Where a row draws by a mask, it is a compiled function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.cache.turns import HeldStates
from mlx_tandem.model.ops.sampling.drafts import Accept
from mlx_tandem.model.ops.sampling.masks import masks_at
from mlx_tandem.model.ops.sampling.sampler import Pickers, SamplingArrays, SamplingFlags, TokenCounts, sample
from mlx_tandem.model.step.rows import Drafts

Drawing = Callable[..., tuple[list[mx.array], mx.array, list[mx.array], list[mx.array], list[mx.array]]]
"""A function that draws. It takes logits [rows, vocabulary], the positions [rows] of the tokens to be drawn, the rows'
seats, the newest token of each seat, the sampling arrays, the token counts of all seats, and optionally drafts with
the position of each seat's newest token, and a table of masks with the numbers that `masks_at` takes. It returns the
drawn arrays, the newest tokens, the token counts afterwards, with drafts a list of the newest tokens' positions, and
with new masks a list of the table.
"""


class Undrawn(NamedTuple):
    """The rows of a forward whose logits wait for masks. `rows` has their indices in the plan, in the order of the
    logits; `held` has the states after each turn.
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
    held: HeldStates | None


def drawing(
    flags: SamplingFlags, pickers: Pickers, nobody: int, num_new: int = 0, accept: Accept | None = None
) -> Drawing:
    """Return the function that draws with these flags.

    nobody: the last seat, to which rows write whose tokens do not count; num_new: how many masks the table does not
    have yet; accept: the kernel that accepts drafts, if there is one. It is not used where tokens are counted.
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
        table: Sequence[mx.array] = (),
        sent: Sequence[mx.array] = (),
    ) -> tuple[list[mx.array], mx.array, list[mx.array], list[mx.array], list[mx.array]]:
        how = SamplingArrays.unflatten(sampling, flags)
        masks, written = masks_at(table[0], sent, len(logits), num_new) if table else (None, [])
        counts = TokenCounts.of(seen, seats)
        behind = Drafts(*drafts) if drafts else None
        if counts is not None and behind is not None:
            counts = counts.behind(behind.before)
        drawn = sample(logits, position, how, flags, counts, pickers, masks)
        if accept is not None and behind is not None and counts is None:
            last_tokens, place = accept(drawn.tokens, position, seats, behind, last_tokens, *places)
            return drawn.flatten(), last_tokens, [], [place], written
        token = mx.maximum(drawn.tokens, 0)
        counted, newest = (seats, seats) if behind is None else behind.accept(token, seats, nobody)
        last_tokens[newest] = token
        known = [] if counts is None else counts.after(seen, counted, token, newest)
        if behind is None:
            return drawn.flatten(), last_tokens, known, [], written
        (place,) = places
        place[newest] = position
        return drawn.flatten(), last_tokens, known, [place], written

    return draw
