"""From settings to a runner that has been checked and warmed up on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem import files
from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine.budget import Needs, StepLimits, divide
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.engine.tier import READ_BYTES
from mlx_tandem.kv.disk.cache import MAX_QUEUE_BYTES
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.model import compiler, cpu, device, footprint, probe
from mlx_tandem.model.attention import choice, fused, hook
from mlx_tandem.model.cache.kvcache import LayerShape
from mlx_tandem.model.clone import clone
from mlx_tandem.model.footprint import SlotRoom
from mlx_tandem.model.linears import skinny
from mlx_tandem.model.linears.groups import find_groups
from mlx_tandem.model.linears.merged import Merged, merge
from mlx_tandem.model.linears.tuning import Tuned, tune
from mlx_tandem.model.loader import LoadedModel, Report, load_unread, read_weights
from mlx_tandem.model.lora.state import LoraState
from mlx_tandem.model.lora.uploads import Uploads
from mlx_tandem.model.memory import Limit
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.settling import settle, tables_of
from mlx_tandem.model.trials import argmax, blocks
from mlx_tandem.model.trials.lora import choose
from mlx_tandem.model.trials.skinny import choose as choose_products
from mlx_tandem.types import EngineInfo, MemoryBudget, MemoryInUse, SamplingParams

log = logging.getLogger(__name__)

_CPU_POOL_BYTES = 512 << 20
_CPU_ACTIVATION_BYTES = 256 << 20
"""A CPU shares its memory with everything else on the machine: the pool takes at most this unless told, and steps are
cut from here on, unless they could not be done at all then."""


BESIDE = 256
"""Tokens of prompts that go beside rows that decode, where kernels read the pool. On an H200 they cost a third of a
step of 128 rows; in a forward of their own they would cost a step."""


@dataclass(frozen=True, slots=True)
class Built:
    runner: MLXRunner
    info: EngineInfo
    linears: dict[str, LinearShape]
    layers: int
    warm_up: Callable[[CostModel], None]
    memory: Callable[[], MemoryInUse]
    adapter_bytes: Callable[[], int]  # of all slots
    twin: nn.Module  # the model's modules once more, untouched, over the same weights
    adapter_dtype: mx.Dtype
    uploads: Uploads
    step_limits: StepLimits
    slot_room: SlotRoom


def build(
    config: EngineConfig,
    weights: Mapping[str, AdapterWeights],
    report: Report,
    backends: Sequence[fused.Fused] | None = None,
) -> Built:
    """Load the model, check it, size the pool. Raises ModelError. Call it on the thread that will run the steps.

    backends: of attention, beside the portable one; None: those of the device.
    """
    started = time.monotonic()
    limit = device.memory_limit(config.memory_limit_gb)  # before anything is taken of it
    compiler.prepare()
    model = load_unread(config.model, report)
    _check_fit(config, limit, model)
    read_weights(model, report)
    candidates = fused.available() if backends is None else backends
    merged: list[Merged] = []
    if candidates:
        merged = merge(find_groups(model.module))
    twin = clone(model.module)  # before anything of the served tree is changed
    report("checking products", 0.0)
    modules = skinny.candidates(model.module, merged)
    products = choose_products(modules)
    if products.few is not None:
        skinny.speed_up(modules, merged, products.few)
    log.info("products of few rows: %s", products.reason)
    hook.install()
    if device.is_cpu():
        cpu.install()
    report("checking the model", 0.0)
    found = probe.examine(model)
    vocab_size, axes = found.vocab_size, found.mask_axes
    shapes = _in_pool(config, found.layers)
    report("checking attention", 0.0)
    attention = choice.choose(
        config.cache.attention_backend,
        shapes,
        config.cache.block_size,
        probe.windows(model),
        candidates,
    )
    log.info("attention by %s: %s", attention.name, attention.reason)
    short_way = ""
    if any(attention.layers):
        short_way = blocks.choose(
            model,
            vocab_size,
            shapes,
            attention.layers,
            config.cache.block_size,
            axes,
            timed=config.cache.attention_backend == choice.AUTO,
        )
        if short_way:
            log.warning("attention blocks run their own code: %s", short_way)
    report("checking adapters", 0.0)
    kernels = choose(model.module, config.lora, model.dtype)
    lora = LoraState(model.module, config.lora, model.dtype, kernels.fused, products.few)
    log.info("adapters by %s: %s", lora.backend, kernels.reason)
    drawing = argmax.choose(model.dtype, vocab_size)
    log.info("greedy tokens: %s", drawing.reason)
    needs = footprint.needs(config, limit.size, model, shapes, vocab_size, lora.linears(), lora.dtype)
    memory = _divide(config, limit, needs)
    beside = BESIDE if attention.layers and all(attention.layers) else 0
    step_limits = needs.step.within(memory.activations)._replace(tokens=needs.chunk_tokens, beside=beside)
    device.wire(memory.total)
    if advice := device.advice(str(model.dtype).rpartition(".")[2]):
        log.warning("%s", advice)
    mx.set_cache_limit(memory.activations)  # freed arrays that MLX keeps for the next ones are a step's
    per_token = sum(s.bytes_per_token() for s in shapes)
    tuned = Tuned()  # on a CPU the time of a product is what one would think
    if not device.is_cpu():
        report("timing products", 0.0)
        tuned = tune(
            model.module,
            model.dtype,
            device=device.describe(),
            most_rows=config.scheduler.max_num_seqs,
            activations=memory.activations,
            folder=files.cache_folder() / "tuning",
            products=products.reason,
        )
    block_size = config.cache.block_size
    num_blocks = [pool.num_blocks for pool in memory.pools]
    runner = MLXRunner(
        model,
        shapes,
        lora,
        weights,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        mask_axes=axes,
        limits=step_limits,
        attention=attention.layers,
        row_counts=tuned.rows,
        greedy=drawing.greedy,
    )
    info = EngineInfo(
        model=config.model.path,
        model_type=model.model_type,
        dtype=str(model.dtype).rpartition(".")[2],
        quantization=model.quantization,
        parameters=model.parameters,
        layers=len(shapes),
        vocab_size=vocab_size,
        eos_token_ids=tuple(i for i in model.eos_token_ids if i < vocab_size),
        max_model_len=min(model.max_model_len, *(group.longest for group in open_groups(memory, block_size))),
        block_size=block_size,
        num_blocks=num_blocks[0],
        kv_bytes_per_token=per_token,
        kv_bits=shapes[0].keys.bits or shapes[0].keys.dtype.size * 8,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_loras=config.lora.max_loras,
        max_lora_rank=config.lora.max_lora_rank,
        device=device.describe(),
        attention_backend=attention.name,
        lora_backend=lora.backend,
        lora_reason=kernels.reason,
        products_reason=products.reason,
        load_seconds=time.monotonic() - started,
        memory=memory,
        attention_reason="; blocks run their own code: ".join(filter(None, (attention.reason, short_way))),
    )
    return Built(
        runner,
        info,
        lora.linears(),
        len(shapes),
        lambda cost: _warm_up(runner, info, cost, report, limit.size),
        lambda: MemoryInUse(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), runner.compiled_steps),
        lambda: lora.nbytes,
        twin,
        lora.dtype,
        lora.uploads,
        step_limits,
        SlotRoom(lora.linears(), config.lora.max_loras, lora.dtype.size, memory.adapter_slots),
    )


def plan(config: EngineConfig) -> tuple[MemoryBudget, int]:
    """The budget that `build` would come to, and the longest sequence; no weight is read. Raises ModelError."""
    limit = device.memory_limit(config.memory_limit_gb)
    model = load_unread(config.model, lambda stage, fraction: None)
    found = probe.examine(model, evaluate=False)
    shapes, vocab_size = _in_pool(config, found.layers), found.vocab_size
    lora = LoraState(model.module, config.lora, model.dtype)
    needs = footprint.needs(config, limit.size, model, shapes, vocab_size, lora.linears(), lora.dtype)
    memory = _divide(config, limit, needs)
    groups = open_groups(memory, config.cache.block_size)
    return memory, min(model.max_model_len, *(group.longest for group in groups))


def _in_pool(config: EngineConfig, shapes: list[LayerShape]) -> list[LayerShape]:
    if config.cache.kv_bits == 16:
        return shapes
    return [s.quantised(config.cache.kv_bits, config.cache.kv_group_size) for s in shapes]


def _check_fit(config: EngineConfig, limit: Limit, model: LoadedModel) -> None:
    """Raise ModelError when the device has too little memory for the model, before any weight is read."""
    found = probe.examine(model, evaluate=False)
    shapes, vocab_size = _in_pool(config, found.layers), found.vocab_size
    linears = footprint.linears(model.module)
    needs = footprint.needs(config, limit.size, model, shapes, vocab_size, linears, model.dtype)
    _divide(config, limit, needs)


def _divide(config: EngineConfig, limit: Limit, needs: Needs) -> MemoryBudget:
    size = limit.size
    if config.disk.on:  # blocks on their way to and from the drive may lie in the same memory
        size -= MAX_QUEUE_BYTES + READ_BYTES
    cpu = {"most_pool": _CPU_POOL_BYTES, "most_activations": _CPU_ACTIVATION_BYTES} if device.is_cpu() else {}
    return divide(config, size, needs, reason=limit.reason, shared=limit.shared, **cpu)


def _warm_up(runner: MLXRunner, info: EngineInfo, cost: CostModel, report: Report, limit: int) -> None:
    """Run the first shapes, learn what chunks of prompts cost, and see that the pool is written in place. `limit`: the
    device's bytes."""
    bs = info.block_size
    pools = [group.pool for group in open_groups(info.memory, bs)]
    room = min(info.max_model_len, *(pool.usable_blocks * bs for pool in pools))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    work = [
        (length, context)
        for length, context in ((8, 0), (64, 0), (256, 0), (8, 1024), (64, 1024), (256, 1024), (64, 6144))
        if length + context <= room
    ] or [(min(8, room), 0)]

    def chunk(length: int, start: int) -> StepPlan:
        end = -(-(start + length) // bs)
        tables = tuple(tuple(range(pool.scratch + 1, pool.scratch + 1 + end)) for pool in pools)
        seating = () if start else (Seating(0, greedy, 0, 1, (0,)),)
        return StepPlan((Row(RowKind.PROMPT, 0, 0, 0, start, (0,) * length, tables, True),), seatings=seating)

    measured = []
    for done, (length, context) in enumerate(work):
        times = []
        for _ in range(4):  # the first pays for tracing
            started = time.perf_counter()
            runner.wait(runner.launch(chunk(length, context)))
            times.append((time.perf_counter() - started) * 1e3)
        measured.append((length, context, min(times[1:])))
        report("warming up", (done + 1) / (len(work) + 1))
    most = min(pool.usable_blocks for pool in pools)
    cost.fit(measured, [_decode_time(runner, info, rows) for rows in (1, 4, 16) if rows <= most])
    _draw_once(runner, info)
    settle(runner, info)
    # Of sizes that what is served hardly asks for again; and with so much kept, what it frees would go back to the
    # system each time.
    mx.clear_cache()
    # Below the 95 % from where on MLX empties its cache for what does not come from the driver's pool.
    if device.is_cuda() and not device.keep_freed_memory(int(0.9 * limit)):
        log.warning("the driver does not keep freed memory: steps that need some again may take tens of milliseconds")
    mx.reset_peak_memory()
    report("warming up", 1.0)


def _decode_time(runner: MLXRunner, info: EngineInfo, rows: int) -> tuple[int, float]:
    """(rows, milliseconds) of a step in which `rows` short sequences decode, no more than there are seats for."""
    rows = min(rows, info.max_num_seqs)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    seatings = tuple(Seating(seat, greedy, 0, 1, (0,)) for seat in range(rows))
    times = []
    for position in range(4):
        each = (Row(RowKind.DECODE, i, i, 0, position, (0,), tables_of(info, 1 + i), True) for i in range(rows))
        plan = StepPlan(tuple(each), seatings=() if position else seatings)
        started = time.perf_counter()
        runner.wait(runner.launch(plan))
        times.append((time.perf_counter() - started) * 1e3)
    return rows, min(times[1:])


def _draw_once(runner: MLXRunner, info: EngineInfo) -> None:
    """A step that draws at random: its kernels are compiled when first met, and on a machine that has never run them
    that can take longer than a step may before the engine is taken for hung."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=20, logprobs=1)
    row = Row(RowKind.PROMPT, 0, 0, 0, 0, (0,), tables_of(info, 1), True)
    runner.wait(runner.launch(StepPlan((row,), seatings=(Seating(0, params, 0, 1, (0,)),))))
