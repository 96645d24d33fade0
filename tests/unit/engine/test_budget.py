"""How memory is divided: whatever is asked for, the parts fit the device and each other."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.budget import STATE_ROWS, Needs, StepCost, StepLimits, _pools, divide, sequences
from mlx_tandem.engine.cost import LENGTHS, longest_within, padded_length
from mlx_tandem.engine.plan import RowKind, StepResult, scored_positions
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.errors import ModelError
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.groups.state import HELD
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.pool import BlockPool, Window
from mlx_tandem.model.footprint import SlotRoom, slot_bytes
from mlx_tandem.model.ops.lora.slots import bucket
from mlx_tandem.model.shapes import cut, row_count, table_width
from mlx_tandem.types import MemoryBudget, PoolBudget, Request, SamplingParams

SIZES = st.integers(0, 1 << 34)
COSTS = st.builds(
    StepCost,
    token=st.integers(1, 1 << 16),
    pair=st.integers(1, 1 << 10),
    position=st.integers(1, 1 << 16),
    sampling=st.integers(0, 1 << 26),
    tokens=st.integers(8, 1 << 11),
    rows=st.integers(1, 256),
    longest=st.integers(1, 1 << 16),
    state=st.one_of(st.just(0), st.integers(1, 1 << 20)),
)
WINDOWS = st.builds(Window, tokens=st.integers(1, 1 << 14), row=st.integers(1, 1 << 11))
NEEDS = st.builds(
    Needs,
    weights=SIZES,
    step=COSTS,
    learning=st.one_of(st.just(0), SIZES),
    adapter_slots=SIZES,
    block=st.integers(1, 1 << 22),
    max_model_len=st.integers(1, 1 << 16),
    window=st.one_of(st.none(), WINDOWS),
    window_block=st.one_of(st.just(0), st.integers(1, 1 << 22)),
    state=st.one_of(st.just(0), st.integers(1, 1 << 20)),
)


def config(blocks: int = 0, fraction: float = 0.6, block_size: int = 16) -> EngineConfig:
    cache = CacheConfig(num_blocks=blocks, memory_fraction=fraction, block_size=block_size)
    return EngineConfig(ModelConfig(path=""), cache, scheduler=SchedulerConfig(max_num_seqs=16))


@given(NEEDS, st.integers(0, 1 << 37), st.sampled_from((0, 2, 100)), st.floats(0.01, 0.95))
def test_the_parts_fit_the_device(needs: Needs, limit: int, blocks: int, fraction: float) -> None:
    try:
        memory = divide(config(blocks, fraction), limit, needs)
    except ModelError:
        if needs.window is not None or needs.state:
            return  # below
        least = (blocks or 2) * needs.block
        room = limit - needs.weights - needs.learning - needs.step.least()
        short = room - max(0, (limit - needs.weights - needs.learning) // 16)  # activations may take as much more
        refused = short < least if blocks else fraction * max(short, 0) < needs.block
        assert refused
        return
    assert memory.total <= limit
    assert memory.pool == sum(pool.num_blocks * pool.block_bytes for pool in memory.pools)
    assert len(memory.pools) == 1 + bool(needs.window and needs.window_block) + bool(needs.state)
    assert not needs.state or (memory.pools[-1].state and memory.pools[-1].num_blocks > HELD)
    assert all(pool.num_blocks >= 2 for pool in memory.pools)
    assert not blocks or memory.pools[0].num_blocks == blocks
    assert memory.adapter_slots <= memory.adapter_slots_wanted == needs.adapter_slots
    assert memory.activations >= needs.step.least()
    limits = needs.step.within(memory.activations)
    assert limits.rows >= min(needs.step.rows, STATE_ROWS)
    # A full chunk at the start, a chunk of the least length at the end, and the longest sequence: all can run.
    assert limits.pairs >= needs.step.tokens * min(needs.step.longest, 1024)
    assert limits.pairs >= LENGTHS[0] * needs.step.longest
    assert limits.positions >= needs.step.longest


@given(NEEDS, st.integers(1, 1 << 37), st.integers(1, 1 << 30))
def test_more_memory_never_gives_less(needs: Needs, limit: int, more: int) -> None:
    try:
        before = divide(config(), limit, needs)
    except ModelError:
        return
    after = divide(config(), limit + more, needs)
    rounding = needs.block if needs.state else 0  # one state more may take the place of a block
    assert after.pool >= before.pool - rounding and after.activations >= before.activations


@given(st.integers(2, 10_000), st.integers(1, 64), st.integers(1, 40_000))
def test_as_many_sequences_fit_as_have_their_blocks(blocks: int, block_size: int, length: int) -> None:
    step = StepCost(1, 1, 1, 0, 8, 16, 1)
    memory = divide(config(blocks, block_size=block_size), 1 << 40, Needs(0, step, 0, 0, 10, 1))
    n, each = sequences(memory, block_size, length), -(-length // block_size)
    assert n * each <= blocks - 1 < (n + 1) * each


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 20),
    WINDOWS,
    st.integers(10, 17).map(lambda bits: 1 << bits),
    st.integers(20, 38).map(lambda bits: 1 << bits),
)
def test_both_pools_are_of_use(block: int, window_block: int, window: Window, length: int, room: int) -> None:
    """Of what fits of sequences of any length, no less than a third of the best that a split for this length holds, if
    the memory is for more than a few; and never more than sequences can use."""
    needs = Needs(0, StepCost(1, 1, 1, 0, 8, 16, 1), 0, 0, block, length, window=window, window_block=window_block)
    pools = _pools(config(), needs, room)
    spent = sum((pool.num_blocks - 1) * pool.block_bytes for pool in pools)
    whole, held = -(-length // 16), window.held(16)
    least = min(window.most(16), whole) * window_block
    assert spent <= max(room, least)
    assert pools[0].num_blocks - 1 <= 16 * whole
    assert pools[1].num_blocks - 1 <= 16 * min(held, whole) + min(window.most(16), whole)
    budget = MemoryBudget(pools=pools)
    for tokens in {min(512, length), min(4096, length), length}:
        blocks = -(-tokens // 16)
        best = (room - least) // (blocks * block + min(held, blocks) * window_block)
        assert sequences(budget, 16, tokens) >= min(best, 16) // 3 - 1, (tokens, best)


@given(st.integers(2, 3000), st.integers(1, 3000), WINDOWS, st.integers(1, 40_000))
def test_as_many_sequences_fit_as_have_their_windows(blocks: int, windows: int, window: Window, length: int) -> None:
    """Tried with books of blocks: all are seated one after the other and read their prompts."""
    first = BlockPool(blocks, 16)
    second = WindowGroup(BlockPool(windows + 1, 16, first=blocks), window)
    budget = MemoryBudget(
        pools=(PoolBudget(blocks, 1), PoolBudget(windows + 1, 1, window=window.tokens, row=window.row))
    )
    n = sequences(budget, 16, length)
    for _ in range(n):
        assert first.allocate(first.blocks_for(length)) is not None
        held = second.pool.allocate(second.end_at_begin(0, length))
        assert held is not None
        second.pool.release(held[window.held(16) :])


def test_too_little_memory_is_refused_with_the_figures() -> None:
    needs = Needs(16 << 30, StepCost(1, 1, 1, 1, 8, 1, 1), 0, 0, 1 << 20, 4096)
    with pytest.raises(ModelError, match=r"has 8\.59 GB .* weights 17\.18 GB") as e:
        divide(config(), 8 << 30, needs)
    assert e.value.param == "num_blocks"


@given(st.integers(64, 1 << 22), st.integers(0, 1 << 17))
def test_a_chunk_is_as_long_as_its_pairs_allow(pairs: int, context: int) -> None:
    n = longest_within(pairs, context)
    assert n in LENGTHS
    assert n == LENGTHS[0] or n * (context + n) <= pairs
    longer = [m for m in LENGTHS if m > n]
    assert not longer or longer[0] * (context + longer[0]) > pairs


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=80), st.integers(1, 20_000))
def test_rows_are_cut_to_what_may_be_read(blocks: list[int], most: int) -> None:
    pieces = cut(list(range(len(blocks))), blocks, most)
    assert sorted(i for piece in pieces for i in piece) == list(range(len(blocks)))
    for piece in pieces:
        read = row_count(len(piece)) * table_width(max(blocks[i] for i in piece))
        assert len(piece) == 1 or read <= most


LINEARS = {f"layers.{i}.{name}": LinearShape(8, 16) for i in range(3) for name in ("a", "b")}


@given(
    st.lists(st.tuples(st.integers(1, 64), st.sets(st.sampled_from(sorted(LINEARS)))), max_size=8),
    st.integers(0, 10**6),
)
def test_slots_never_grow_over_their_room(adapters: list[tuple[int, set[str]]], most: int) -> None:
    """Promises count together: the widest rank over every linear of any adapter."""
    room = SlotRoom(LINEARS, 4, 4, most)
    rank, paths = 0, set[str]()
    for own, targets in adapters:
        together = max(rank, bucket(own)), paths | targets
        fits = slot_bytes(LINEARS, together[1], 4, together[0], 4) <= most
        if fits:
            room.promise(own, targets)
            rank, paths = together
        else:
            with pytest.raises(ModelError, match=f"rank {own}"):
                room.promise(own, targets)


def test_adapters_that_are_read_at_the_same_time_share_the_room() -> None:
    one = slot_bytes(LINEARS, ["layers.0.a"], 4, 8, 4)
    room = SlotRoom(LINEARS, 4, 4, 3 * one)
    kept: list[str] = []

    def read(path: str) -> None:
        try:
            room.promise(8, [path])
            kept.append(path)
        except ModelError:
            pass

    threads = [threading.Thread(target=read, args=(path,)) for path in LINEARS]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(kept) == 3


@given(
    st.lists(st.integers(1, 6000), min_size=1, max_size=12), st.sampled_from((64, 100, 512)), st.integers(1, 1 << 22)
)
def test_a_step_s_prompts_stay_within_its_tokens_and_pairs(lengths: list[int], most: int, pairs: int) -> None:
    """On a device so fast that time bounds nothing; and every prompt is read to its end."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=16, max_chunk_tokens=most, idle_prefill_ms=1e9, prefill_share=1e9),
        BlockManager([AttentionGroup(BlockPool(6000, 16))]),
        SlotTable(1),
        max_model_len=8192,
        vocab_size=10,
        eos_token_ids=(),
        limits=StepLimits(pairs, 1 << 40),
    )
    for i, n in enumerate(lengths):
        scheduler.add(Request(i, (1,) * n, SamplingParams(max_tokens=1, temperature=0.0)))
    read = 0
    while plan := scheduler.plan():
        chunks = [(len(row.tokens), row.start) for row in plan.rows if row.kind is RowKind.PROMPT]
        assert len(chunks) < 2 or sum(padded_length(n) for n, _ in chunks) <= most
        for n, start in chunks:
            assert n <= most
            assert n <= LENGTHS[0] or n * (start + n) <= pairs
        read += sum(len(row.tokens) for row in plan.rows)
        scheduler.update_from_output(plan, StepResult([(2,) if row.sample else () for row in plan.rows], [], {}, False))
    assert read == sum(lengths)


@given(st.lists(st.integers(2, 60), min_size=1, max_size=8), st.sampled_from((1 << 20, 1 << 19)))
def test_a_step_scores_no_more_positions_than_it_has_logits_for(lengths: list[int], vocab_size: int) -> None:
    """All prompts of it together, whose scored positions are padded."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=16, max_chunk_tokens=512, idle_prefill_ms=1e9, prefill_share=1e9),
        BlockManager([AttentionGroup(BlockPool(600, 16))]),
        SlotTable(1),
        max_model_len=8192,
        vocab_size=vocab_size,
        eos_token_ids=(),
        limits=StepLimits(1 << 22, 1 << 40),
    )
    for i, n in enumerate(lengths):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        scheduler.add(Request(i, (1,) * n, params))
    plan = scheduler.plan()
    assert plan is not None
    scored = [len(row.targets) for row in plan.rows]
    assert 0 < sum(scored) <= scored_positions(vocab_size)
    padded = sum(padded_length(len(row.tokens)) for row in plan.rows)
    assert len(scored) == len(lengths) or padded >= scored_positions(vocab_size)
