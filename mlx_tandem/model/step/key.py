"""The key of a compiled step: everything that the step is specialised for."""

from __future__ import annotations

from typing import NamedTuple

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
