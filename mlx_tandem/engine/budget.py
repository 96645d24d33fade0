"""The division of the device's memory at start: arithmetic on bytes, before anything is allocated.

The size of the weights is given. Activations get a chosen part, and steps are cut so that they fit into it
(`StepLimits`). Of what is left, `memory_fraction` goes to the KV pool, and adapter slots may grow into the rest. Where
the memory is shared with other programs, adapter slots get a part of their own before that, and the rest stays free.
Nothing else on the device grows with traffic.

Recurrent layers have a pool of states, which gets enough for all sequences and as many snapshots, but at most half of
the pools' memory. Layers that see a window have a pool of their own. It is large enough for the windows of all
sequences, but has no more than half of the pools' memory, unless the longest sequences need a larger share there or
memory is left over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.kv.groups.state import HELD
from mlx_tandem.kv.pool import Window
from mlx_tandem.types import MemoryBudget, PoolBudget

ACTIVATION_SHARE = 16
"""Divisor: activations get 1/16 of what the weights leave, where they can use as much."""

SLOT_SHARE = 4
"""Divisor: where memory is shared with other programs, adapter slots get at most 1/4 of what is left for them and the
KV pool."""

STATES = 4
"""Rows of state for each sequence that may run: those that it needs, and as many snapshots."""

STATE_ROWS = 4
"""Rows whose states one forward can hold at least, so that batches are not cut into single rows."""

NARROWER = (8, 6, 5, 4, 3)
"""Bits per weight that mlx-lm's quantisation offers, the widest first."""

_SCALE_BITS = 0.5
"""Bits per weight that a scale and a bias of 16 bits each add for a group of 64 weights."""

_ANY = 1 << 62


class StepLimits(NamedTuple):
    """Limits of one forward, with padding. A single row that exceeds them by itself runs alone."""

    pairs: int = _ANY  # rows · queries · positions: the number of attention scores
    positions: int = _ANY  # rows · positions: how many keys and values are gathered
    tokens: int = 1024  # of prompts, all chunks together
    rows: int = _ANY  # whose states are gathered and written
    piggybacked: int = 0  # prompt tokens in the forward of rows that decode, each as a row of its own


UNLIMITED = StepLimits()
"""The limits of a runner whose steps are never cut."""


@dataclass(frozen=True)
class StepCost:
    """The bytes that a forward needs for each of its parts, and how large a forward can be."""

    token: int  # for a prompt token on its way through the layers
    pair: int  # for a query and a position
    position: int  # for a position that one row reads
    sampling: int  # to draw a token for every sequence
    tokens: int  # in one forward, padded
    rows: int
    longest: int  # positions of one row, padded
    state: int = 0  # for the states of one row

    def least(self) -> int:
        """Return the bytes for full chunks up to a context of 1,024, and for the longest sequence when it is read
        alone.
        """
        chunk = self.tokens * self.token + max(min(self.longest, 1024) * self.tokens, self.longest * 8) * self.pair
        return max(chunk, self.longest * self.position, self.sampling, min(self.rows, STATE_ROWS) * self.state)

    def most(self) -> int:
        """Return the bytes with which no step is ever cut."""
        chunk = self.tokens * (self.token + self.longest * self.pair)
        return max(chunk, self.rows * self.longest * self.position, self.sampling, self.rows * self.state)

    def within(self, activations: int) -> StepLimits:
        """Return the limits of a forward that has so many bytes for activations."""
        return StepLimits(
            (activations - self.tokens * self.token) // self.pair,
            activations // self.position,
            rows=activations // self.state if self.state else _ANY,
        )


@dataclass(frozen=True)
class Needs:
    """The memory that a model and the settings ask for, in bytes."""

    weights: int
    step: StepCost
    learning: int
    adapter_slots: int  # every slot at the highest rank over every linear
    block: int  # of the first pool
    max_model_len: int
    parameters: int = 0  # weights of the model, as its authors count them; 0: unknown
    chunk_tokens: int = 1024  # that `step` is for
    window: Window | None = None  # of the last pool
    state: int = 0  # the states of all recurrent layers for one sequence
    window_block: int = 0  # of the second pool, where there is one: the first is for layers without a window then


def divide(
    config: EngineConfig,
    limit: int,
    needs: Needs,
    *,
    reason: str = "",
    shared: bool = False,
    most_pool: int = _ANY,
    most_activations: int = _ANY,
) -> MemoryBudget:
    """Return the budget of a device that has `limit` bytes for this server.

    `reason`: why there are no more, in words. `shared`: other programs use the same memory, so that what is left over
    stays free. Raises ModelError, with the figures, when the limit is too low.
    """
    left = limit - needs.weights - needs.learning
    wanted = min(left // ACTIVATION_SHARE, most_activations, needs.step.most())
    activations = max(needs.step.least(), wanted)
    left -= activations
    asked = config.cache.num_blocks
    slots = min(needs.adapter_slots, max(left, 0) // SLOT_SHARE) if shared else 0
    left -= slots
    pools = _pools(config, needs, min(int(max(left, 0) * config.cache.memory_fraction), most_pool))
    pool = sum(p.num_blocks * p.block_bytes for p in pools)
    if min(p.num_blocks for p in pools) < 2 or pool > left:
        learning = f", learning {size_text(needs.learning)}" if needs.learning else ""
        wish = " and ".join(f"{p.num_blocks if asked else 2} blocks of {size_text(p.block_bytes)}" for p in pools)
        smaller = _smaller(limit, needs, config.cache.block_size)
        hint = f"{smaller}, fewer --num-blocks, --max-num-seqs or --max-chunk-tokens"
        if shared:
            hint += "; or --memory-limit-gb, which sets another limit whatever other programs use"
        why = f" ({reason})" if reason else ""
        raise ModelError(
            f"the device has {size_text(limit)} for this server{why}: weights {size_text(needs.weights)}, activations "
            f"{size_text(activations)}{learning}; that leaves {size_text(max(left, 0))} for a KV pool of at least "
            f"{wish}. What helps: {hint}",
            param="num_blocks",
        )
    return MemoryBudget(
        limit=limit,
        limit_reason=reason,
        weights=needs.weights,
        activations=activations,
        chunk_tokens=needs.chunk_tokens,
        learning=needs.learning,
        pool=pool,
        adapter_slots=slots if shared else min(needs.adapter_slots, left - pool),
        adapter_slots_wanted=needs.adapter_slots,
        block_bytes=needs.block,
        pools=pools,
    )


def _smaller(limit: int, needs: Needs, block_size: int) -> str:
    """Return which size of this model would fit, in words: the widest quantisation that leaves room for a step and for
    one sequence of 1,024 tokens.
    """
    blocks = -(-min(needs.max_model_len, 1024) // block_size) + 1
    room = limit - needs.learning - needs.step.least() - blocks * (needs.block + needs.window_block)
    for bits in NARROWER:
        size = int(needs.parameters * (bits + _SCALE_BITS) / 8)
        if 0 < size <= room and size < needs.weights:
            return f"the same model in {bits} bits (about {size_text(size)})"
    return f"a model whose weights take at most {size_text(room)}" if room > 0 else "a smaller model"


def _pools(config: EngineConfig, needs: Needs, room: int) -> tuple[PoolBudget, ...]:
    """Return the pools of keys and values within `room` bytes, and behind them that of states if there are any."""
    if not needs.state:
        return _positions(config, needs, room)
    most = STATES * config.scheduler.max_num_seqs + 1
    rows = max(min(most, room // 2 // needs.state), HELD + 1)  # one is scratch
    states = PoolBudget(rows, needs.state, state=True)
    return *_positions(config, needs, max(room - rows * needs.state, 0)), states


def _positions(config: EngineConfig, needs: Needs, room: int) -> tuple[PoolBudget, ...]:
    """Return the pools of keys and values.

    They have as many blocks as were asked for, else as `room` bytes hold and sequences can use.

    The first block of a pool is scratch.
    """
    size, rows, asked = config.cache.block_size, config.scheduler.max_num_seqs, config.cache.num_blocks
    whole = -(-needs.max_model_len // size)  # blocks of the longest sequence
    if needs.window is None:
        # Without attention a block takes no memory.
        return (PoolBudget(asked or min(room // max(needs.block, 1), rows * whole) + 1, needs.block),)
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
    """Return how many sequences of `length` tokens the pools hold at once when they share nothing."""
    return min(_sequences(pool, block_size, -(-length // block_size)) for pool in budget.pools)


def _sequences(pool: PoolBudget, block_size: int, blocks: int) -> int:
    """Return how many sequences of so many blocks one pool holds."""
    if pool.state:
        return (pool.num_blocks - 1) // HELD
    window = Window(pool.window, pool.row)
    held, usable = window.held(block_size), pool.num_blocks - 1
    if not pool.window or blocks <= held:
        return usable // blocks
    return max(usable - min(window.most(block_size), blocks) + held, 0) // held  # one of them may read its prompt


def size_text(size: int) -> str:
    """Return a number of bytes as text for people, in MB or GB."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
