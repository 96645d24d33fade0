"""The end of a step: the positions for which the output head computes logits, and what turns logits into tokens.

Drawing belongs to the compiled function of the forward. Where a row draws by a mask, it is a compiled function of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.cache.turns import HeldStates
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model.ops.sampling.drafts import Accept
from mlx_tandem.model.ops.sampling.masks import masks_at
from mlx_tandem.model.ops.sampling.sampler import Pickers, SamplingArrays, SamplingFlags, TokenCounts, sample
from mlx_tandem.model.step.rows import Drafts


class HeadPositions:
    """A wrapper of the model's output head that computes the logits of one position per row.

    For a chunk of which only the last position is sampled, the head (`lm_head`, or the embedding used as one) of a
    vocabulary of 152k costs more than all layers of a small model. Families whose head cannot be found compute all
    logits, and the position is picked afterwards.
    """

    def __init__(self, model: nn.Module):
        self._last: mx.array | None = None
        self._rows: mx.array | None = None  # None once they have been picked
        self._narrowed: mx.array | None = None
        self.picked: mx.array | None = None
        """Rows of the step that `narrow` has picked since `keep`; None: all of them."""
        self._keeps_hidden = False
        self._hidden: mx.array | None = None
        self.width = 0  # of the head's input; 0 until a forward has passed through the head
        self._adapt(model)

    @staticmethod
    def of(model: nn.Module) -> HeadPositions:
        """Return the positions of a model; the model is adapted once."""
        positions = getattr(model, "_head_positions", None)
        if positions is None:
            positions = HeadPositions(model)
            object.__setattr__(model, "_head_positions", positions)
        return positions

    def keep(self, last: mx.array | None, rows: mx.array | None = None, *, hidden: bool = False) -> None:
        """Set what the head computes in the forward that is being traced. `hidden`: whether its input is kept.

        last: [rows] int32, the index of the sampled position in each row; None: all positions. rows: the indices of the
        rows that are sampled, all of which have one position; None: all rows.
        """
        self._last, self._rows, self._keeps_hidden = last, rows, hidden
        self._narrowed = self.picked = None

    def logits(self, output: mx.array, last: mx.array) -> mx.array:
        """Return [sampled rows, vocabulary] of the output that the model returned since `keep`."""
        if self._rows is not None:
            output = output[self._rows]
        if output.shape[1] == 1:
            return output[:, 0]
        return _pick(output, last)[:, 0]

    def take_hidden(self) -> mx.array:
        """Return the input [rows, length, dim] that the head had since `keep`, which asked for it."""
        assert self._hidden is not None, "only a model whose head is used is asked for hidden states"
        hidden, self._hidden = self._hidden, None
        return hidden

    @staticmethod
    def pooled(hidden: mx.array, last: mx.array) -> list[mx.array]:
        """Return the sum of each row's hidden states up to position last [rows], and the state there: [rows, dim] each.

        hidden: [rows, length, dim]. The results are float32.
        """
        h = hidden.astype(mx.float32)
        real = mx.arange(h.shape[1]) <= last[:, None]
        return [mx.where(real[..., None], h, 0.0).sum(1), _pick(h, last)[:, 0]]

    def narrow(self, h: mx.array) -> mx.array:
        """Return the kept rows and positions of the head's input [rows, length, dim]. Of its own result: the same."""
        if h.ndim != 3 or h is self._narrowed:
            return h
        self.width = h.shape[-1]
        if self._keeps_hidden:
            self._hidden = h
        if self._rows is not None:
            h, self.picked, self._rows = h[self._rows], self._rows, None
        self._narrowed = h if self._last is None or h.shape[1] == 1 else _pick(h, self._last)
        return self._narrowed

    def _adapt(self, model: nn.Module) -> None:
        """Wrap the model's `lm_head`, or all of its embeddings if it has none."""
        for _, module in model.named_modules():
            head = module.get("lm_head") if isinstance(module, dict) else None
            if isinstance(head, nn.Module):
                self._override(head, NarrowHead)
                return
        for _, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
                self._override(module, NarrowEmbedding)

    def _override(self, head: Any, mixin: type) -> None:
        head._positions = self
        mix_in(head, mixin)


class NarrowHead:
    """The mix-in for an `lm_head`, which narrows its input."""

    _positions: HeadPositions

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Return the logits of the kept positions of x [rows, length, dim]."""
        out: mx.array = super().__call__(self._positions.narrow(x), *args, **kwargs)  # type: ignore[misc]
        return out


class NarrowEmbedding:
    """The mix-in for an embedding, which narrows its input where it is used as the head."""

    _positions: HeadPositions

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits of the kept positions of x [rows, length, dim]."""
        out: mx.array = super().as_linear(self._positions.narrow(x))  # type: ignore[misc]
        return out


def _pick(x: mx.array, last: mx.array) -> mx.array:
    return mx.take_along_axis(x, last[:, None, None], axis=1)


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
