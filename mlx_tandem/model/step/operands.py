"""The arguments of a forward: the key that a compiled step is specialised for, and the arrays that describe its rows.

The arrays are packed and unpacked here, so that both sides agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from mlx_tandem.model.cache.turns import TurnShape
from mlx_tandem.model.ops.lora.routes import Layout
from mlx_tandem.model.ops.sampling.sampler import SamplingFlags


class StepKey(NamedTuple):
    """The properties of a forward and its draws that a compiled step is specialised for."""

    rows: int
    length: int
    widths: tuple[int, ...]  # of the tables, for each pool; 0: read in place
    carry: bool  # whether rows begin with the token that their seat drew in the step before
    samples: bool
    flags: SamplingFlags
    layout: Layout
    common_offset: int | None = None  # as in `StepView`
    scores: int = -1  # number of likeliest tokens returned with each target's logprob; -1: nothing is scored
    picks: int = 0  # number of rows that are sampled, padded, in a mixed step
    drafts: int = 0  # of a row that verifies, padded; 0: no row verifies or follows one that the host has not read
    pooled: bool = False  # whether the hidden states of the rows' tokens are wanted
    goes_on: bool | None = None  # whether rows go on from a state or begin; None: the model keeps no states
    proposes: bool | None = None  # whether the model's head drafts; None: the model has no head that is used
    turns: TurnShape | None = None  # of recurrent layers, where the step verifies drafts
    masked: bool = False  # whether rows wait for masks, so that the step ends with the logits
    images: bool = False  # whether embeddings of images take the places of those of tokens
    shifted: bool = False  # whether positions differ from indices in a step whose rows have no images
    each: int = 1  # as in `StepView`
    chained: int = 0  # tokens that each row draws, one after the other; 0: a row draws one at most


A = TypeVar("A")
"""The type of the arrays: NumPy's on the host, MLX's in the forward."""

DRAFT_ARRAYS = 3
"""Number of arrays of `rows.Drafts`."""

TURN_ARRAYS = 5
"""Number of arrays of `TurnNumbers.for_forward`."""


@dataclass(slots=True)
class Operands(Generic[A]):
    """The description of the rows of one forward, all int32 but for `adapters`, which are uint32."""

    tokens: A
    """[rows, length]; CARRY stands for the token that the row's seat drew in the step before."""

    offset: A
    """[rows], the position of each row's first token."""

    last: A
    """[rows], the index of each row's last token."""

    seats: A
    """[rows], the seat that each row draws for; the padding seat for rows that do not draw."""

    places: Sequence[A]
    """For each pool the slot mapping [rows, length] and the tables [rows, width]. With drafts the first block [rows]
    of each table comes in place of the slot mapping.
    """

    states: Sequence[A] = field(default=())
    """Only of models with states: the line [rows] that each row's state is read from, unless the rows begin, and the
    line [rows] that it is written to. With drafts, the numbers of `TurnNumbers.for_forward`.
    """

    bounds: A | None = None
    """[rows], only with drafts: where a row with slack begins if all drafts before it are accepted, else -1."""

    targets: A | None = None
    """[rows, length], only of rows whose prompts are scored: the token after each position."""

    picked: A | None = None
    """[picks], only in a mixed step: the indices of the rows that draw."""

    picked_seats: A | None = None
    """[picks], only in a mixed step: the seats of the rows that draw."""

    drafts: Sequence[A] = field(default=())
    """The arrays of `rows.Drafts`, only where rows verify drafts or follow rows that do."""

    following: A | None = None
    """[rows, length], only with a head for multi-token prediction: the token after each position as far as the host
    knows it, else UNKNOWN.
    """

    adapters: A | None = None
    """The ids of the rows' adapters as `lora.routes` packs them; None if no row has an adapter."""

    def flatten(self) -> list[A]:
        """Return the arrays in the order in which `unflatten` takes them."""
        optional = (self.bounds, self.targets, self.picked, self.picked_seats)
        arrays = [self.tokens, self.offset, self.last, self.seats, *self.places, *self.states]
        arrays += [array for array in optional if array is not None]
        arrays += self.drafts
        if self.following is not None:
            arrays.append(self.following)
        if self.adapters is not None:
            arrays.append(self.adapters)
        return arrays

    @staticmethod
    def unflatten(arrays: Sequence[A], key: StepKey) -> Operands[A]:
        """Return the operands of a step with this key from the arrays that `flatten` returned."""
        tokens, offset, last, seats, *rest = arrays
        pools = 2 * len(key.widths)
        places, rest = rest[:pools], rest[pools:]
        of_states = 0 if key.goes_on is None else TURN_ARRAYS if key.turns is not None else 1 + key.goes_on
        states, rest = rest[:of_states], rest[of_states:]
        bounds = rest.pop(0) if key.drafts else None
        targets = rest.pop(0) if key.scores >= 0 else None
        picked, picked_seats = (rest.pop(0), rest.pop(0)) if key.picks else (None, None)
        drafts, rest = (rest[:DRAFT_ARRAYS], rest[DRAFT_ARRAYS:]) if key.drafts else ([], rest)
        following = rest.pop(0) if key.proposes is not None else None
        adapters = rest.pop(0) if rest else None
        return Operands(
            tokens,
            offset,
            last,
            seats,
            places,
            states,
            bounds,
            targets,
            picked,
            picked_seats,
            drafts,
            following,
            adapters,
        )
