"""How the device's memory is divided, once, at start: arithmetic on bytes, before anything is allocated.

Weights take what they take. Activations get a part that is chosen, and steps are cut to it (`StepLimits`). Of what is
left `memory_fraction` goes to the KV pool, and adapter slots may grow into the rest. Nothing else on the device grows
with traffic.

Where some layers see a window, they have a pool of their own. It is large enough for every sequence to have its window,
but has no more than half of the memory, unless the longest sequences need more of it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.kv.pool import Window
from mlx_tandem.types import MemoryBudget, PoolBudget

ACTIVATION_SHARE = 16
"""One part in so many, of what weights leave, is for activations where they can use as much."""

_ANY = 1 << 62


class StepLimits(NamedTuple):
    """What one forward may need, with padding. A single row that needs more by itself runs alone."""

    pairs: int = _ANY  # rows · queries · positions, which scores are made of
    positions: int = _ANY  # rows · positions, whose keys and values are gathered
    tokens: int = 1024  # of prompts
    beside: int = 0  # tokens of prompts that go with rows that decode, each as a row of its own


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
    block: int  # of the first pool
    max_model_len: int
    chunk_tokens: int = 1024  # that `step` is for
    window: Window | None = None  # of the last pool
    window_block: int = 0  # of the second pool, where there is one: the first is for layers without a window then


def divide(
    config: EngineConfig, limit: int, needs: Needs, *, most_pool: int = _ANY, most_activations: int = _ANY
) -> MemoryBudget:
    """The budget of a device that has `limit` bytes. Raises ModelError, with the figures, when it is too little."""
    left = limit - needs.weights - needs.learning
    wanted = min(left // ACTIVATION_SHARE, most_activations, needs.step.most())
    activations = max(needs.step.least(), wanted)
    left -= activations
    asked = config.cache.num_blocks
    pools = _pools(config, needs, min(int(max(left, 0) * config.cache.memory_fraction), most_pool))
    pool = sum(p.num_blocks * p.block_bytes for p in pools)
    if min(p.num_blocks for p in pools) < 2 or pool > left:
        learning = f", learning {_mb(needs.learning)}" if needs.learning else ""
        wish = " and ".join(f"{p.num_blocks if asked else 2} blocks of {_mb(p.block_bytes)}" for p in pools)
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
        pools=pools,
    )


def _pools(config: EngineConfig, needs: Needs, room: int) -> tuple[PoolBudget, ...]:
    """As many blocks as were asked for, else as `room` holds and sequences can use; the first of a pool is scratch."""
    size, rows, asked = config.cache.block_size, config.scheduler.max_num_seqs, config.cache.num_blocks
    whole = -(-needs.max_model_len // size)  # blocks of the longest sequence
    if needs.window is None:
        return (PoolBudget(asked or min(room // needs.block, rows * whole) + 1, needs.block),)
    window, row = needs.window.tokens, needs.window.row
    held = min(needs.window.held(size), whole)
    least = min(needs.window.most(size), whole)  # for the longest sequence to run alone
    most = rows * held + least - held
    if not needs.window_block:
        return (PoolBudget(asked or min(room // needs.block, most) + 1, needs.block, window, row),)
    if asked:
        return PoolBudget(asked, needs.block), PoolBudget(min(asked, most + 1), needs.window_block, window, row)
    share = held * needs.window_block / (held * needs.window_block + whole * needs.block)
    seen = max(min(int(room * max(share, 0.5)) // needs.window_block, most), least)
    blocks = min(max(room - seen * needs.window_block, 0) // needs.block, rows * whole)
    seen = max(seen, min((room - blocks * needs.block) // needs.window_block, most))
    return PoolBudget(blocks + 1, needs.block), PoolBudget(seen + 1, needs.window_block, window, row)


def sequences(budget: MemoryBudget, block_size: int, length: int) -> int:
    """How many sequences of `length` tokens the pools hold at once, sharing nothing."""
    return min(_sequences(pool, block_size, -(-length // block_size)) for pool in budget.pools)


def _sequences(pool: PoolBudget, block_size: int, blocks: int) -> int:
    window = Window(pool.window, pool.row)
    held, usable = window.held(block_size), pool.num_blocks - 1
    if not pool.window or blocks <= held:
        return usable // blocks
    return max(usable - min(window.most(block_size), blocks) + held, 0) // held  # one of them may read its prompt


def _mb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
