"""What the device really needs, against what was divided at start."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Literal

import mlx.core as mx
import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.adapters import formats
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.config import (
    CacheConfig,
    DutyConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from mlx_tandem.engine.budget import UNLIMITED
from mlx_tandem.engine.learning import AdamParams, Batch, LossConfig, TrainerSpec
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.errors import ModelError
from mlx_tandem.model import device, footprint
from mlx_tandem.model.backend.cpu import CPU, Cpu
from mlx_tandem.model.build import Built, build, build_draft, plan
from mlx_tandem.model.step import compiled, seats
from mlx_tandem.training.device.cutting import Cutting
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.types import MemoryBudget, SamplingParams
from tests import tiny_models
from tests.engine.learning import finish, some_data

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
EVERYTHING = SamplingParams(
    max_tokens=1, top_p=0.9, top_k=40, min_p=0.1, logprobs=5, repetition_penalty=1.1, logit_bias=((1, 1.0),)
)


@pytest.fixture(scope="module")
def before() -> int:
    """Bytes that other tests of this process have left in use."""
    gc.collect()
    return int(mx.get_active_memory())


@pytest.fixture(scope="module")
def built(before: int) -> Built:
    config = EngineConfig(
        model=ModelConfig(str(demo.MODEL_PATH)),
        cache=CacheConfig(num_blocks=1025),
        scheduler=SchedulerConfig(max_num_seqs=16, max_chunk_tokens=256),
        lora=LoraConfig(max_loras=2, max_lora_rank=8),
    )
    return build(config, {}, lambda stage, fraction: None)


def needed(built: Built, *rows: Row, params: SamplingParams = GREEDY) -> int:
    """The most bytes beside what was there, of the rows' second step: the first traces."""
    seatings = tuple(Seating(row.seat, params, 0, 1, (0,)) for row in rows)
    for _ in range(2):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        built.runner.wait(built.runner.launch(StepPlan(rows, seatings=seatings)))
    return int(mx.get_peak_memory() - before)


def chunk(length: int, start: int, *, apart: bool) -> Row:
    table = list(range(1, 1 + -(-(start + length) // 16)))
    return Row(RowKind.PROMPT, 0, 0, 0, start, (7,) * length, [table[::-1] if apart else table], True)


def decodes(rows: int, context: int, *, shared: bool) -> list[Row]:
    width = context // 16 + 1
    return [
        Row(
            RowKind.DECODE, i, i, 0, context, (7,), [[1 + (j if shared else i * width + j) for j in range(width)]], True
        )
        for i in range(rows)
    ]


def test_weights_and_blocks_are_what_was_said(before: int, built: Built) -> None:
    memory = built.info.memory
    assert built.runner.pool_bytes == memory.pool == built.info.num_blocks * memory.block_bytes
    rest = int(mx.get_active_memory()) - before - memory.pool
    assert memory.weights <= rest <= 1.1 * memory.weights + (4 << 20)


@pytest.mark.promise("FLT-03")
def test_no_step_needs_more_than_activations_have(built: Built) -> None:
    """A full chunk at the start; the longest the scheduler would give deep in a context; all rows, each of which reads
    the same long prompt; everything that sampling can do."""
    activations, pairs = built.info.memory.activations, built.step_limits.pairs
    deep = 4096
    assert 256 * (deep + 256) * 5 // 4 <= pairs, "no chunk of this size would be cut"
    found = {
        "first": needed(built, chunk(256, 0, apart=False)),
        "deep": needed(built, chunk(256, deep, apart=False)),
        "deep, apart": needed(built, chunk(256, deep, apart=True)),
        "decode": needed(built, *decodes(16, 1000, shared=False)),
        "decode, shared": needed(built, *decodes(16, 8000, shared=True)),
        "sampling": needed(built, *decodes(16, 8, shared=False), params=EVERYTHING),
    }
    assert max(found.values()) <= activations, found
    assert max(found.values()) >= activations / 4, found  # nor is it a wild guess


@pytest.mark.parametrize(("family", "bits"), [("gemma2", 16), ("mixtral", 16), ("starcoder2", 8), ("qwen3", 4)])
def test_what_a_position_takes_holds_for_other_families_and_few_bits(
    family: str, bits: Literal[4, 8, 16], tmp_path: Path
) -> None:
    """By that the rows of a step are counted out: hand-made softmax, experts, no grouped heads, codes of few bits."""
    rows, context = 16, 2000
    config = EngineConfig(
        ModelConfig(str(tiny_models.make(tmp_path / "model", family, max_position_embeddings=4096))),
        CacheConfig(num_blocks=200, kv_bits=bits, kv_group_size=32),
        scheduler=SchedulerConfig(max_num_seqs=rows),
    )
    built = build(config, {}, lambda stage, fraction: None)
    position = built.info.memory.activations / built.step_limits.positions
    built.runner.rectangles.limits = UNLIMITED
    most = needed(built, *decodes(rows, context, shared=True))
    assert 0.4 <= most / (position * rows * (context + 16)) <= 0.95


def test_the_largest_steps_are_cut(built: Built) -> None:
    """With less memory the same rows run in more pieces, and need less."""
    runner, limits = built.runner, built.step_limits
    rows = decodes(16, 4000, shared=True)
    whole = needed(built, *rows)
    runner.rectangles.limits = limits._replace(positions=4 * 5120)
    try:
        assert needed(built, *rows) < whole / 2
    finally:
        runner.rectangles.limits = limits


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "spark2_5"])
def test_a_plan_reads_no_weights_and_comes_to_what_a_build_does(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", family, seed=1)
    config = EngineConfig(
        ModelConfig(str(folder)), CacheConfig(num_blocks=32), lora=LoraConfig(max_loras=2), scheduler=SchedulerConfig(4)
    )
    before = mx.get_active_memory()
    memory, longest = plan(config)
    assert mx.get_active_memory() - before < memory.weights / 4
    built = build(config, {}, lambda stage, fraction: None)
    info = built.info
    assert longest == info.max_model_len
    parts = ("weights", "pool", "pools", "adapter_slots_wanted", "block_bytes")
    assert [getattr(memory, part) for part in parts] == [getattr(info.memory, part) for part in parts]
    assert built.runner.pool_bytes == memory.pool
    assert info.kv_bytes_per_token * 16 == sum(pool.block_bytes for pool in memory.pools)


def test_a_device_that_is_too_small_is_said_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.make(tmp_path / "model", "qwen3", seed=1)
    monkeypatch.setattr(Cpu, "free_memory", lambda self: device.Limit(100_000, "", shared=False))
    with pytest.raises(ModelError, match=r"the device has 0\.1 MB .* weights 0\.\d MB"):
        build(EngineConfig(ModelConfig(str(folder))), {}, lambda stage, fraction: None)


def test_an_adapter_beyond_the_room_of_the_slots_is_refused(tmp_path: Path) -> None:
    """What fits is taken; the slots are as large as was said."""
    config = EngineConfig(
        ModelConfig(str(demo.MODEL_PATH)),
        CacheConfig(num_blocks=16),
        scheduler=SchedulerConfig(2, 64),
        lora=LoraConfig(1, 32),
    )
    weights: dict[str, formats.AdapterWeights] = {}
    built = build(config, weights, lambda stage, fraction: None)
    read = formats.read(demo.ADAPTER_PATHS["shout"], built.linears, max_rank=32, base_layers=built.layers)
    weights[read.info.digest] = read
    built.slot_room.promise(read.info.rank, read.tensors)
    built.runner.launch(StepPlan((), uploads=((1, read.info.digest),)))
    assert 0 < built.adapter_bytes() <= built.info.memory.adapter_slots
    with pytest.raises(ModelError, match="slots would take"):
        built.slot_room.promise(64, read.tensors)


@pytest.mark.parametrize("several", [False, True])
def test_learning_has_memory_for_every_trainer_and_one_pass(several: bool) -> None:
    """Only one of them learns at a time; a rank of twice as many numbers takes twice the memory."""

    def learning(trainers: int, rank: int) -> int:
        duty = DutyConfig(trainer_rank=rank, several_steps=several, trainers=trainers)
        config = EngineConfig(ModelConfig(str(demo.MODEL_PATH)), CacheConfig(num_blocks=16), duty=duty)
        return plan(config)[0].learning

    one, two, four, twice = learning(1, 8), learning(2, 8), learning(4, 8), learning(1, 16)
    trainer = two - one
    assert trainer > 0 and four - one == 3 * trainer
    assert twice - one == trainer + (several and trainer * footprint._STEP_BACK // footprint._TRAINER)
    assert learning(1, 0) == learning(4, 0) == 0


def test_trainers_that_adapt_the_head_have_memory_for_it() -> None:
    def learning(trainers: int, *, head: bool) -> MemoryBudget:
        duty = DutyConfig(trainer_rank=8, trainers=trainers, trains_head=head)
        config = EngineConfig(ModelConfig(str(demo.MODEL_PATH)), CacheConfig(num_blocks=16), duty=duty)
        return plan(config)[0]

    without, with_head = learning(1, head=False), learning(1, head=True)
    more = 8 * (256 + 1024) * 4 * footprint._TRAINER  # of the demo model's head
    assert with_head.learning - without.learning == more
    assert learning(3, head=True).learning - learning(3, head=False).learning == 3 * more
    assert with_head.adapter_slots > without.adapter_slots


@pytest.mark.promise("FLT-54")
@pytest.mark.parametrize("several", [False, True])
def test_an_update_stays_within_what_learning_has(several: bool) -> None:
    """A trainer of every linear, two passes of full micro-batches, and two steps, the second of which can be undone, or
    both together. All activations are kept, as the demo model's are.
    """
    config = EngineConfig(
        ModelConfig(str(demo.MODEL_PATH)),
        CacheConfig(num_blocks=16),
        duty=DutyConfig(trainer_rank=8, several_steps=several),
    )
    learning = plan(config)[0].learning
    built = build(config, {}, lambda stage, fraction: None)
    gc.collect()  # what earlier tests have left would be freed in between
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cutting = Cutting(kept_bytes=CPU.learning.kept_bytes, mask_axes=built.mask_axes)
    sizes = {"vocab_size": 1024, "micro_batch_tokens": 128, "most_tokens": 8192}
    trainers = MLXTrainers(built.twin, built.adapter_dtype, cutting=cutting, **sizes)
    trainers.open(TrainerSpec("policy", 8, 16.0), "", None)
    data = some_data(lengths=((125, 20), (125, 20), (60, 20), (60, 20)))
    for _ in range(2):
        finish(trainers.run([Batch("policy", tuple(data), LossConfig("importance_sampling"))], False, 0))
        finish(trainers.step("policy", AdamParams(1e-4), several))
    needed = int(mx.get_peak_memory() - before)
    assert learning / 5 <= needed <= learning, (needed, learning)


def test_what_is_kept_of_steps_is_bounded(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever shapes and sampling come: compiled steps, and arrays as wide as the vocabulary."""
    runner = built.runner
    assert runner.compiled.most == compiled.kept_steps(built.layers, device.machine_bytes())
    monkeypatch.setattr(runner.compiled, "most", 3)
    runner.reset()
    for rows in (1, 2, 3, 4, 6, 1):
        needed(built, *decodes(rows, 8, shared=False), params=EVERYTHING)
    assert built.memory().compiled_steps == len(runner.compiled.kept()) <= 3
    assert runner.compiled.kept()[-1].rows == 1, "the last used is the last to go"
    assert len(runner._seats._recent_sampling) <= seats.KEPT_SAMPLING
    flags = runner.compiled.kept()[-1].flags
    for new in range(2 * compiled.KEPT_DRAWINGS):
        runner.compiled.drawing(flags, new)
    assert [new for _, new in runner.compiled._drawings] == list(
        range(compiled.KEPT_DRAWINGS, 2 * compiled.KEPT_DRAWINGS)
    )


@pytest.mark.parametrize(
    ("layers", "gigabytes", "steps"),
    [
        (1, 16, 256),
        (6, 16, 152),
        (12, 16, 76),
        (36, 16, 64),
        (80, 16, 64),
        (6, 128, 256),
        (36, 128, 173),
        (80, 128, 78),
    ],
)
def test_compiled_steps_of_deep_models_are_fewer(layers: int, gigabytes: int, steps: int) -> None:
    """They take no more memory than is meant for them, unless too few of them would be left."""
    memory = gigabytes << 30
    assert compiled.kept_steps(layers, memory) == steps
    most = max(compiled.COMPILED_BYTES, compiled.COMPILED_SHARE * memory)
    if compiled.FEWEST_COMPILED < steps < compiled.MOST_COMPILED:
        assert 0.98 * most <= steps * layers * compiled.LAYER_BYTES <= most


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What files take of it is given back when it is needed."""
    files = {
        "/proc/meminfo": {"MemAvailable:": 8 << 20},
        "/sys/fs/cgroup/memory.max": {"": 3 << 30},
        "/sys/fs/cgroup/memory.current": {"": 2 << 30},
        "/sys/fs/cgroup/memory.stat": {"inactive_file": 1 << 30},
    }
    monkeypatch.setattr(device, "_fields", lambda path, named=True: files.get(path, {}))
    assert device.available_on_linux() == 2 << 30
    files["/proc/meminfo"] = {"MemAvailable:": 1 << 20}
    assert device.available_on_linux() == 1 << 30, "the container may have more than the machine has left"
    del files["/proc/meminfo"]
    del files["/sys/fs/cgroup/memory.max"]  # "max": none
    assert device.available_on_linux() > 2 << 30


def test_a_draft_model_is_in_the_budget() -> None:
    config = EngineConfig(model=ModelConfig(str(demo.MODEL_PATH)), cache=CacheConfig(num_blocks=1025))
    both = structs.replace(config, speculation=SpeculationConfig("draft", str(demo.DRAFT_PATH)))
    (alone, _), (memory, _) = plan(config), plan(both)
    served = build(both, {}, lambda stage, fraction: None)
    assert not served.runner.prebuilt.may_dispatch, "the draft model would wait for a step that waits for its drafts"
    draft = build_draft(both, served.info, lambda stage, fraction: None)
    assert memory.pools == alone.pools, "the model's own blocks are those without a draft model"
    assert memory.weights - alone.weights == draft.info.memory.weights
    assert memory.pool - alone.pool == draft.info.memory.pool == draft.runner.pool_bytes
    assert draft.info.num_blocks == 1025


@pytest.mark.parametrize(("gigabytes", "unpacked"), [(5.5, False), (40.0, True)])
def test_weights_are_unpacked_only_where_everything_else_fits_beside_them(
    gigabytes: float, unpacked: bool, tmp_path: Path
) -> None:
    """Unpacked, the weights of this model take 2.4 GB instead of 0.3, and drawing tokens for 256 rows some more."""
    shape = dataclasses.replace(SHAPES["4m"], hidden=1024, layers=28, intermediate=3072, vocab=151_936)
    folder = write_model(tmp_path / "model", shape, weights=False, bits=4)
    model = ModelConfig(str(folder), random_weights=True)
    memory, _ = plan(EngineConfig(model, scheduler=SchedulerConfig(256), memory_limit_gb=gigabytes))
    assert (memory.weights > 1e9) is unpacked
