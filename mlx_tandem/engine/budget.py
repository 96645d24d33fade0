"""How the device's memory is divided, once, at start: arithmetic on bytes, before anything is allocated.

Weights take what they take. Activations get a part that is chosen, and steps are cut to it (`StepLimits`). Of what is
left `memory_fraction` goes to the KV pool, and adapter slots may grow into the rest. Nothing else on the device grows
with traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.types import MemoryBudget

ACTIVATION_SHARE = 16
"""One part in so many, of what weights leave, is for activations where they can use as much."""

_ANY = 1 << 62


class StepLimits(NamedTuple):
    """What one forward may need, with padding. A single row that needs more by itself runs alone."""

    pairs: int = _ANY  # rows · queries · positions, which scores are made of
    positions: int = _ANY  # rows · positions, whose keys and values are gathered
    tokens: int = 1024  # of prompts


UNLIMITED = StepLimits()


@dataclass(frozen=True)
class StepCost:
    """Bytes that a forward needs, and how large a forward can be."""

    token: int  # a prompt token on its way through the layers
    pair: int  # a query beside a position
    position: int  # a position that one row reads
    sampling: int  # to draw a token for every sequence
    tokens: int  # in one forward, padded
    rows: int
    longest: int  # positions of one row, padded

    def least(self) -> int:
        """For steps to make headway: full chunks up to a context of 1,024, the longest sequence read alone."""
        chunk = self.tokens * self.token + max(min(self.longest, 1024) * self.tokens, self.longest * 8) * self.pair
        return max(chunk, self.longest * self.position, self.sampling)

    def most(self) -> int:
        """For no step ever to be cut."""
        chunk = self.tokens * (self.token + self.longest * self.pair)
        return max(chunk, self.rows * self.longest * self.position, self.sampling)

    def within(self, activations: int) -> StepLimits:
        return StepLimits((activations - self.tokens * self.token) // self.pair, activations // self.position)


@dataclass(frozen=True)
class Needs:
    """What a model and the settings ask for, in bytes."""

    weights: int
    step: StepCost
    learning: int
    adapter_slots: int  # every slot at the highest rank over every linear
    block: int
    max_model_len: int
    chunk_tokens: int = 1024  # that `step` is for


def divide(
    config: EngineConfig, limit: int, needs: Needs, *, most_pool: int = _ANY, most_activations: int = _ANY
) -> MemoryBudget:
    """The budget of a device that has `limit` bytes. Raises ModelError, with the figures, when it is too little."""
    left = limit - needs.weights - needs.learning
    wanted = min(left // ACTIVATION_SHARE, most_activations, needs.step.most())
    activations = max(needs.step.least(), wanted)
    left -= activations
    size = config.cache.block_size
    asked = config.cache.num_blocks
    if asked:
        blocks = asked
    else:
        most = config.scheduler.max_num_seqs * -(-needs.max_model_len // size)
        room = min(int(max(left, 0) * config.cache.memory_fraction), most_pool)
        blocks = min(room // needs.block, most) + 1  # the first is scratch
    pool = blocks * needs.block
    if blocks < 2 or pool > left:
        learning = f", learning {_mb(needs.learning)}" if needs.learning else ""
        wish = f"{asked} blocks of {_mb(needs.block)}" if asked else f"2 blocks of {_mb(needs.block)}"
        hint = "a smaller model, fewer --num-blocks, --max-num-seqs or --max-chunk-tokens"
        raise ModelError(
            f"the device has {_mb(limit)} for this server: weights {_mb(needs.weights)}, activations "
            f"{_mb(activations)}{learning}; that leaves {_mb(max(left, 0))} for a KV pool of at least {wish}. "
            f"What helps: {hint}",
            param="num_blocks",
        )
    return MemoryBudget(
        limit=limit,
        weights=needs.weights,
        activations=activations,
        chunk_tokens=needs.chunk_tokens,
        learning=needs.learning,
        pool=pool,
        adapter_slots=min(needs.adapter_slots, left - pool),
        adapter_slots_wanted=needs.adapter_slots,
        block_bytes=needs.block,
    )


def sequences(budget: MemoryBudget, block_size: int, length: int) -> int:
    """How many sequences of `length` tokens the pool holds at once, sharing nothing."""
    return (budget.pool // budget.block_bytes - 1) // -(-length // block_size)


def _mb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
