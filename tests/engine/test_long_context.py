"""Long prompts: chunks that read their blocks in place, beside others that gather, give what mlx-lm gives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.config import CacheConfig, DutyConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.pipeline import Pipeline
from mlx_tandem.engine.plan import RowKind
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.time_share import TimeShare
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.model import build as build_module
from mlx_tandem.model.build import Built, build
from mlx_tandem.model.ops.products.tuning import Tuned
from mlx_tandem.model.shapes import SPLIT_GAIN
from mlx_tandem.model.step.forward_inputs import InputBuilder
from mlx_tandem.model.step.index_arrays import IndexArrays
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.front import no_trainers

OUTPUT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("long") / "qwen3", "qwen3", max_position_embeddings=4096)


def alone(folder: Path, prompt: list[int]) -> list[int]:
    model: Any = load_model(folder)[0]
    cache = make_prompt_cache(model)
    tokens = mx.array([prompt])
    drawn: list[int] = []
    for _ in range(OUTPUT):
        tokens = mx.argmax(model(tokens, cache=cache)[:, -1], -1)[:, None]
        drawn.append(int(tokens.item()))
    return drawn


def serve(folder: Path, prompts: list[list[int]], scatter: bool) -> tuple[list[list[int]], Built]:
    """Greedy output of each prompt, all at once; `scatter` leaves no run of free blocks long enough for any prompt."""
    config = EngineConfig(
        model=ModelConfig(path=str(folder)),
        cache=CacheConfig(num_blocks=1024),
        scheduler=SchedulerConfig(max_num_seqs=16, max_chunk_tokens=192),
    )
    built = build(config, {}, lambda stage, fraction: None)
    pool = BlockPool(built.info.num_blocks, built.info.block_size)
    if scatter:
        held = pool.allocate(pool.free_blocks)
        assert held is not None
        pool.release(held[::2])
    scheduler = Scheduler(
        config.scheduler,
        BlockManager([AttentionGroup(pool)]),
        SlotTable(1),
        max_model_len=built.info.max_model_len,
        vocab_size=built.info.vocab_size,
        eos_token_ids=(),
    )
    for i, prompt in enumerate(prompts):
        scheduler.add(Request(i, tuple(prompt), SamplingParams(max_tokens=OUTPUT, temperature=0.0)))
    pipeline = Pipeline(scheduler, built.runner, TimeShare(DutyConfig()), no_trainers())
    drawn: list[list[int]] = [[] for _ in prompts]
    while scheduler.requests or not pipeline.is_empty:
        settled = pipeline.turn()
        for delta in settled.deltas if settled else []:
            drawn[delta.request].extend(delta.tokens)
    return drawn, built


@pytest.mark.parametrize("scatter", [False, True])
def test_long_and_short_prompts_together_equal_each_alone(
    folder: Path, scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, tiny_models.VOCAB, n).tolist() for n in (1500, 9, 700, 40)]
    in_place: list[tuple[int, int]] = []
    contiguous = InputBuilder._contiguous

    def watch(self: Any, rows: Any, pool: int) -> tuple[int, int] | None:
        found = contiguous(self, rows, pool)
        if found is not None:
            in_place.append(found)
        return found

    monkeypatch.setattr(InputBuilder, "_contiguous", watch)
    drawn, _ = serve(folder, prompts, scatter)
    assert drawn == [alone(folder, p) for p in prompts]
    assert bool(in_place) is not scatter


def test_one_long_context_does_not_pad_the_short_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, tiny_models.VOCAB, n).tolist() for n in (3000, *range(20, 34))]
    widths: set[tuple[int, int]] = set()
    build = InputBuilder.build

    def watch(self: Any, plan: Any, rows: list[int]) -> Any:
        if all(plan.rows[i].kind is RowKind.DECODE for i in rows):
            widths.add((len(rows), max(len(plan.rows[i].tables[0]) for i in rows)))
        return build(self, plan, rows)

    monkeypatch.setattr(InputBuilder, "build", watch)
    drawn, _ = serve(folder, prompts, scatter=False)
    assert drawn == [alone(folder, p) for p in prompts]
    long = [(rows, width) for rows, width in widths if width > 100]
    assert any(rows == 1 for rows, _ in long)
    padded = max((rows - 1) * width for rows, width in long)
    assert padded <= SPLIT_GAIN, "short contexts were padded to the length of the long one"


def test_decoding_rows_are_padded_to_good_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, tiny_models.VOCAB, n).tolist() for n in (20, 9, 33, 17, 40)]
    shapes: set[tuple[int, int]] = set()
    index_arrays = IndexArrays.of

    def watch(self: Any, rows: list[Any], count: int, length: int, *rest: Any) -> Any:
        shapes.add((count, length))
        return index_arrays(self, rows, count, length, *rest)

    monkeypatch.setattr(IndexArrays, "of", watch)
    monkeypatch.setattr(build_module, "Tuned", lambda: Tuned(rows=(7, 16)))
    drawn, _ = serve(folder, prompts, scatter=False)
    assert drawn == [alone(folder, p) for p in prompts]
    assert {count for count, length in shapes if length == 1} == {7}
    assert {count for count, length in shapes if length > 1} <= {1, 2, 3, 4, 6}  # prompts are not
