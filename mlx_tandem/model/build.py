"""From settings to a runner: load the model, choose kernels, divide the memory, make the runner."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine.budget import Needs, StepLimits, divide
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.kv_offload.reads import READ_BYTES
from mlx_tandem.errors import ModelError
from mlx_tandem.kv.disk.cache import MAX_QUEUE_BYTES
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.model import backend, compiler, footprint, kernel_checks, probe
from mlx_tandem.model import deterministic as mode
from mlx_tandem.model.choices import NO_PACE, Choices, Kept, Subject
from mlx_tandem.model.deterministic import Deterministic
from mlx_tandem.model.device import Limit
from mlx_tandem.model.draft import draft_settings, with_draft, without_draft
from mlx_tandem.model.footprint import SlotRoom
from mlx_tandem.model.kernel_checks import Kernels, examine
from mlx_tandem.model.kernels import dialect, nvrtc
from mlx_tandem.model.kernels.checking import Pieces
from mlx_tandem.model.loader import (
    UNPACKED,
    LoadedModel,
    Report,
    is_packed,
    lay_out,
    load_unread,
    read_weights,
    report_nothing,
    unpack_for_cpu,
)
from mlx_tandem.model.modules import clone
from mlx_tandem.model.ops.attention import fused
from mlx_tandem.model.ops.lora.slots import Uploads
from mlx_tandem.model.ops.lora.state import LoraState, in_folders
from mlx_tandem.model.ops.products import tuning
from mlx_tandem.model.ops.products.merged import merge
from mlx_tandem.model.ops.products.tuning import Tuned, tune
from mlx_tandem.model.pending_choices import LATER, PendingChoices, find_kept
from mlx_tandem.model.recurrent import NO_DRAFTS, verifies_drafts
from mlx_tandem.model.runner import MLXRunner, RunnerSizes
from mlx_tandem.model.targets import find_groups
from mlx_tandem.model.vision.embeddings import ROOM_BYTES
from mlx_tandem.model.warm_up import warm_up
from mlx_tandem.types import EngineInfo, Image, MemoryBudget, MemoryInUse

if TYPE_CHECKING:
    from mlx_tandem.engine.ranks.leader import RankLeader

log = logging.getLogger(__name__)

PIGGYBACKED_TOKENS = 256
"""Most prompt tokens that are read in one forward with rows that decode, where kernels read the pool.

On an H200 they cost a third of a step of 128 rows; in a forward of their own they would cost a whole step.
"""


@dataclass(frozen=True, slots=True)
class Built:
    """A runner, what was found out about it, and what the engine and the trainers need beside it."""

    runner: MLXRunner
    info: EngineInfo
    linears: dict[str, LinearShape]
    """The linears that adapters may change, by path."""

    layers: int
    warm_up: Callable[[CostModel], Choices]
    """Runs the first steps and fits the cost model; returns everything that was chosen by timing. Call it once, before
    serving.
    """

    prepare_adapters: Callable[[], Pieces[tuple[str, str]]] | None
    """Makes ready, piece by piece, what only steps with adapters need, and returns `lora_backend` and `lora_reason` of
    EngineInfo. It has to be done before the first adapter is installed. None: it was done at start.
    """

    memory: Callable[[], MemoryInUse]
    """Returns the memory that is in use now."""

    adapter_bytes: Callable[[], int]
    """Returns the bytes of all adapter slots."""

    twin: nn.Module
    """A second tree of the model's modules over the same weights, in which nothing was changed; trainers use it."""

    mask_axes: int
    """Axes of the model's masks between rows and queries."""

    adapter_dtype: mx.Dtype
    uploads: Uploads
    step_limits: StepLimits
    slot_room: SlotRoom
    trainer_budget: int
    """Bytes that all trainers may use besides one micro-batch."""

    verifies: bool
    """Whether steps can verify drafts."""

    image_room: int
    """Number of embeddings of images that the runner may keep; 0: it encodes none."""

    image_columns: Callable[[Image], int]
    """Returns the columns of an image, as `engine/images.py` takes them."""

    deterministic: Deterministic | None
    """The arithmetic of `--deterministic`, which trainers use, too; None without that option."""


def build(
    config: EngineConfig,
    weights: Mapping[str, AdapterWeights],
    report: Report,
    backends: Sequence[fused.Fused] | None = None,
    given: Choices | None = None,
    kept: Kept | None = None,
    whole: MemoryBudget | None = None,
    leader: RankLeader | None = None,
) -> Built:
    """Load the model, check it on this device, and return a runner for it with pools of a fixed size.

    Call it on the thread that will run the steps. Where `kept` has the choices of an earlier start, they are used
    unless one run of each kernel beside plain operations shows that something is wrong.

    Args:
        config: The engine's settings.
        weights: Adapters by digest that the runner may be asked to load; the caller keeps it current.
        report: Is told the stage and the fraction of it that is done.
        backends: Fused attention back ends to try; None: those of this device.
        given: The choices of another process, for the same model, settings and kind of device; None: this process
            checks and times its kernels itself.
        kept: The choices of earlier starts, which are looked up unless some are `given`, and to which those of this
            start are added; None: nothing is kept.
        whole: The budget of everything in this process, of which this model takes a part; None: it takes everything.
        leader: Leads the other ranks where the settings are for several.

    Raises:
        ModelError: The model cannot be served with these settings on this device.
        GroupFailed: Another rank has ended.
    """
    try:
        return _build(config, weights, report, backends, given, kept, whole, leader)
    except _WrongKernels as e:
        log.warning("everything is checked anew, because with the choices of the last start %s", e)
        if kept is not None:
            kept.drop(e.subject)
    kernel_checks.forget()
    gc.collect()  # merged linears refer to each other
    mx.clear_cache()
    # The first attempt has changed the model's modules, so the second one loads the model again.
    return _build(config, weights, report, backends, None, None, whole, leader)


class _WrongKernels(Exception):
    """Raised when the choices of an earlier start for `subject` lead to wrong results."""

    def __init__(self, problem: str, subject: Subject):
        super().__init__(problem)
        self.subject = subject


def _build(
    config: EngineConfig,
    weights: Mapping[str, AdapterWeights],
    report: Report,
    backends: Sequence[fused.Fused] | None,
    given: Choices | None,
    kept: Kept | None,
    whole: MemoryBudget | None,
    leader: RankLeader | None,
) -> Built:
    started = time.monotonic()
    limit = _begin(config)
    model, unread = _load_unread(config, limit, report)
    subject = _subject(config, model, unread, given)
    again, known = (None, None) if kept is None or given is not None else find_kept(kept, subject, config, model)
    given = given or again
    _read_weights(config, model, report)
    candidates = fused.available() if backends is None else backends
    merged = merge(find_groups(model.module)) if candidates and not config.deterministic else []
    twin = clone(model.module)  # before anything of the served tree is changed
    found, kernels = kernel_checks.choose(config, model, merged, candidates, report, given.kernels if given else None)
    if again is not None and (problem := kernel_checks.problem(config, model, twin, found, kernels, report)):
        raise _WrongKernels(problem, subject)
    exact, adapters = _adapters(config, model, found, kernels, twin, candidates)
    memory = _divide(config, limit, needs := _needs(config, limit, model, found, adapters))
    step_limits = _limit_steps(model, kernels, needs, memory, whole or memory)
    tuned = _tune(config, model, memory, report, given)
    runner = _runner(config, model, found, exact, kernels, adapters, weights, memory, step_limits, tuned)
    chosen = kernels.choices(found.mask_axes)  # before another model is built in this process, such as a draft model
    _lead(leader, runner, config, model, Choices(subject, chosen, tuned, NO_PACE), memory, step_limits)
    info = _describe(config, model, found, kernels, memory, adapters.backend, time.monotonic() - started)
    later = PendingChoices(config, model, adapters, known, kept, memory.activations // 2)

    def run_first_steps(cost: CostModel) -> Choices:
        method, pace = config.speculation.method, given.pace if given else None
        pace = warm_up(runner, info, cost, report, limit.size, pace, method=method)
        return later.take(Choices(subject, chosen, tuned, pace), again)

    return Built(
        runner=runner,
        info=info,
        linears=in_folders(adapters),
        layers=probe.count_layers(model),
        warm_up=run_first_steps,
        prepare_adapters=later.prepare if kernels.adapters is None else None,
        memory=partial(_memory_in_use, runner),
        adapter_bytes=lambda: adapters.nbytes,
        twin=twin,
        mask_axes=found.mask_axes,
        adapter_dtype=adapters.dtype,
        uploads=adapters.uploads,
        step_limits=step_limits,
        slot_room=_slot_room(config, adapters, memory),
        trainer_budget=_trainer_budget(config, model, found, adapters, memory),
        verifies=verifies_drafts(model, found),
        image_room=0 if model.encoder is None else model.encoder.room(ROOM_BYTES),
        image_columns=_no_columns if model.encoder is None else model.encoder.columns,
        deterministic=exact,
    )


@dataclass(frozen=True, slots=True)
class BuiltShare:
    """The share of a model on a rank that is led: see `engine.ranks.follower.Share`."""

    runner: MLXRunner
    uploads: Uploads
    connect: Callable[[Sequence[tuple[int, int]]], str]

    def join(self, shapes: tuple[tuple[int, int], ...]) -> str:
        """Connect with the other ranks, check sums of these shapes, and return what is wrong; empty: nothing."""
        return self.connect(shapes)

    def prepare(self, weights: AdapterWeights) -> None:
        """Make an adapter ready to be installed; called on another thread than the one that computes."""
        self.uploads.prepare(weights)

    def memory(self) -> int:
        """Return the bytes that this rank uses on its device."""
        return int(mx.get_active_memory())


def build_share(
    config: EngineConfig,
    rank: int,
    weights: Mapping[str, AdapterWeights],
    decided: Callable[[], tuple[Choices, MemoryBudget, StepLimits]],
) -> BuiltShare:
    """Load the share of rank number `rank`, and return its runner with the kernels and pools that the first rank has
    chosen. `decided` waits for these; it is called when the weights are in memory.

    Raises:
        ModelError: The share cannot be served on this device, or it is not of the same model.
    """
    limit = _begin(config)
    model, unread = _load_unread(config, limit, report_nothing, rank)
    _read_weights(config, model, report_nothing)
    candidates = fused.available()
    merged = merge(find_groups(model.module)) if candidates else []
    given, memory, step_limits = decided()
    _subject(config, model, unread, given)
    twin = clone(model.module)
    found, kernels = kernel_checks.choose(config, model, merged, candidates, report_nothing, given.kernels)
    exact, adapters = _adapters(config, model, found, kernels, twin, candidates)
    _bound_memory(model, memory)
    tuned = _tune(config, model, memory, report_nothing, given)
    from mlx_tandem.model.leading import connect

    runner = _runner(config, model, found, exact, kernels, adapters, weights, memory, step_limits, tuned, led=True)
    return BuiltShare(runner, adapters.uploads, partial(connect, config, model))


def _memory_in_use(runner: MLXRunner) -> MemoryInUse:
    return MemoryInUse(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), runner.compiled_steps)


def _lead(
    leader: RankLeader | None,
    runner: MLXRunner,
    config: EngineConfig,
    model: LoadedModel,
    choices: Choices,
    memory: MemoryBudget,
    limits: StepLimits,
) -> None:
    """Have the other ranks begin with what was chosen here, if there are any. Raises as `build` says."""
    if leader is not None:
        from mlx_tandem.model.leading import lead

        lead(runner, leader, config, model, choices, memory, limits)


def _slot_room(config: EngineConfig, adapters: LoraState, memory: MemoryBudget) -> SlotRoom:
    """Return the room for adapters' slots, which adapters have to fit into."""
    linears = adapters.linears() | adapters.head()
    return SlotRoom(linears, config.lora.max_loras, adapters.dtype.size, memory.adapter_slots)


def _no_columns(image: Image) -> int:
    return 0


def build_draft(config: EngineConfig, served: EngineInfo, report: Report) -> Built:
    """Load the draft model of an engine that serves `served`, and return a runner for it. Raises ModelError."""
    built = build(draft_settings(config, served.num_blocks), {}, report, whole=served.memory)
    built.runner.compiled.untraced = 0  # kinds of steps recur: rows read only the tokens since the last
    return built


def _adapters(
    config: EngineConfig,
    model: LoadedModel,
    found: probe.Examined,
    kernels: Kernels,
    twin: nn.Module,
    candidates: Sequence[fused.Fused],
) -> tuple[Deterministic | None, LoraState]:
    """Return the arithmetic of `--deterministic`, where that is asked for, and the adapters of a model."""
    exact = mode.of(config, model, found, twin, candidates) if config.deterministic else None
    chosen = None if kernels.adapters is None else kernels.adapters.chosen, kernels.products.chosen
    tiled = None if exact is None else exact.deltas
    return exact, LoraState(model.module, config.lora, model.dtype, *chosen, tiled)


def _runner(
    config: EngineConfig,
    model: LoadedModel,
    found: probe.Examined,
    exact: Deterministic | None,
    kernels: Kernels,
    adapters: LoraState,
    weights: Mapping[str, AdapterWeights],
    memory: MemoryBudget,
    limits: StepLimits,
    tuned: Tuned,
    *,
    led: bool = False,
) -> MLXRunner:
    """Return the runner of a model with these kernels and pools. `led`: it belongs to another rank than the first."""
    several, kind = config.parallel.ranks > 1, MLXRunner
    if several and not led:
        from mlx_tandem.model.leading import LeadingRunner as kind
    runner = kind(
        model,
        found.layers,
        adapters,
        weights,
        RunnerSizes(
            found.vocab_size,
            [pool.num_blocks for pool in memory.pools],
            config.cache.block_size,
            config.scheduler.max_num_seqs,
            found.mask_axes,
            limits,
            tuned.rows,
        ),
        kernels.attention.layers if exact is None else exact.attention,
        kernels.sampling.chosen,
        found.states,
    )
    # A draft model computes before each step is planned. A step that was dispatched and is not wanted would be one that
    # the other ranks do not compute.
    runner.prebuilt.may_dispatch = config.speculation.method != "draft" and not several
    return runner


def plan(config: EngineConfig) -> tuple[MemoryBudget, int]:
    """Return the memory budget that `build` would reach, and the longest sequence, without reading any weight.

    Raises:
        ModelError: The model cannot be served with these settings on this device.
    """
    limit = _limit(config)
    model, found = _load_unread(config, limit, report_nothing)
    memory = _divide(
        config, limit, _needs(config, limit, model, found, LoraState(model.module, config.lora, model.dtype))
    )
    groups = open_groups(memory, config.cache.block_size)
    return memory, min(model.max_model_len, *(group.longest for group in groups))


def _read_weights(config: EngineConfig, model: LoadedModel, report: Report) -> None:
    """Read all weights into memory, and give them the layout with which a CPU is fastest.

    Under `--deterministic` this also makes the model's products compute in tiles.
    """
    read_weights(model, report)
    for module in (model.module, model.mtp) if backend.current().products.only_float32_is_fast else ():
        if module is not None:
            lay_out(module)
    if config.deterministic:
        report("checking exact products", 0.0)
        mode.prepare(config, model)


def _begin(config: EngineConfig) -> Limit:
    """Prepare the compiler, begin to compile, and return the memory of this rank, measured before any of it is used."""
    limit = _limit(config)
    compiler.prepare()
    dialect.compile_ahead(nvrtc.groups_of(config, packed=is_packed(config.model)))
    return limit


def _limit(config: EngineConfig) -> Limit:
    """Return the memory that this rank may use. Ranks on one machine share it, unless each has a GPU of its own."""
    limit = backend.current().memory_limit(config.memory_limit_gb)
    if config.parallel.mode in ("off", "nccl"):
        return limit
    here = config.parallel.local_ranks or config.parallel.ranks
    return limit._replace(size=limit.size // here, reason=f"{limit.reason}, for each of {here} ranks")


def _load_unread(
    config: EngineConfig, limit: Limit, report: Report, rank: int = 0
) -> tuple[LoadedModel, probe.Examined]:
    """Return this rank's share of the model with its weights unread, on a CPU unpacked where everything fits into
    `limit` then, and what it caches. Raise ModelError if it does not fit.
    """
    mtp, ranks = config.speculation.method == "mtp", config.parallel.ranks

    def own(model: LoadedModel) -> LoadedModel:
        if ranks == 1:
            return model
        from mlx_tandem.model.sharding import RankPlace, shard

        return shard(model, RankPlace(rank, ranks))

    packed = load_unread(config.model, report, mtp=mtp)
    model = own(unpack_for_cpu(packed, config.model, limit.size * ranks))
    try:
        return model, _estimate(config, limit, model)
    except ModelError as e:
        if not model.quantization or not model.quantization.endswith(UNPACKED):
            raise
        log.warning("its weights stay packed, which is slow on a CPU: unpacked, %s", e.message)
    packed = own(load_unread(config.model, report, mtp=mtp))
    return packed, _estimate(config, limit, packed)


def _subject(config: EngineConfig, model: LoadedModel, found: probe.Examined, given: Choices | None) -> Subject:
    """Return the subject that choices are made for. Raise ModelError if drafts are asked for that the model cannot
    verify, or if `given` is for another subject. It is called before any weight is read.
    """
    if config.speculation.method != "none" and not verifies_drafts(model, found):
        raise ModelError(
            f"model_type {model.model_type!r} {NO_DRAFTS}: it is served without --spec-decode", param="speculation"
        )
    subject = Subject.of(config, model, found.layers, found.vocab_size, found.states)
    if given is not None:
        given.require(subject)
    return subject


def _estimate(config: EngineConfig, limit: Limit, model: LoadedModel) -> probe.Examined:
    """Return what the model caches. Raise ModelError if it and its adapters do not fit into `limit`."""
    found = examine(config, model, evaluate=False)
    linears, head = footprint.linears(model.module), footprint.head(model.module)
    _divide(config, limit, footprint.needs(config, limit.size, model, found, linears, head, model.dtype))
    return found


def _needs(config: EngineConfig, limit: Limit, model: LoadedModel, found: probe.Examined, adapters: LoraState) -> Needs:
    linears, head = adapters.linears(), adapters.head()
    return footprint.needs(config, limit.size, model, found, linears, head, adapters.dtype)


def _divide(config: EngineConfig, limit: Limit, needs: Needs) -> MemoryBudget:
    """Divide the memory within `limit` by `needs`. Raise ModelError where it is too little."""
    size = limit.size
    if config.disk.on:  # blocks on their way to and from the drive may lie in the same memory
        size -= MAX_QUEUE_BYTES + READ_BYTES
    drafts = config.speculation.method == "draft"
    here = backend.current().memory
    whole = divide(
        config,
        size,
        with_draft(config, needs) if drafts else needs,
        reason=limit.reason,
        shared=limit.shared,
        most_pool=here.most_pool,
        most_activations=here.most_activations,
    )
    return without_draft(config, whole) if drafts else whole


def _trainer_budget(
    config: EngineConfig, model: LoadedModel, found: probe.Examined, adapters: LoraState, memory: MemoryBudget
) -> int:
    """Return the bytes that all trainers may use: what nothing else was given, less one micro-batch."""
    return memory.unassigned + memory.learning - footprint.pass_bytes(config, model, found, adapters.linears())


def _limit_steps(
    model: LoadedModel, kernels: Kernels, needs: Needs, memory: MemoryBudget, whole: MemoryBudget
) -> StepLimits:
    """Return how large a step may be, and tell MLX how much memory all of this process may wire, use and keep."""
    layers = kernels.attention.layers
    # The tokens of a row of a state cannot be computed side by side.
    piggybacked = PIGGYBACKED_TOKENS if layers and all(layers) and not needs.state else 0
    _bound_memory(model, whole)
    return needs.step.within(memory.activations)._replace(tokens=needs.chunk_tokens, piggybacked=piggybacked)


def _bound_memory(model: LoadedModel, whole: MemoryBudget) -> None:
    """Tell MLX how much memory all of this process may wire, use and keep."""
    here = backend.current()
    # Trainers may use the memory that no other part was given.
    here.bound_memory(whole.total, whole.limit if whole.learning else whole.total)
    if advice := here.advice(str(model.dtype).rpartition(".")[2]):
        log.warning("%s", advice)
    mx.set_cache_limit(whole.activations)  # MLX keeps freed arrays, which later steps use again


def _tune(
    config: EngineConfig,
    model: LoadedModel,
    memory: MemoryBudget,
    report: Report,
    given: Choices | None,
) -> Tuned:
    """Time the model's products on a GPU, unless another process did.

    Nothing is timed where their time is proportional to their size, or if products are computed in tiles.
    """
    if given is not None:
        tuning.use(model.module, given.tuned)
        return given.tuned
    if config.deterministic or not backend.current().products.worth_timing:
        return Tuned()
    report(kernel_checks.TIMING, 0.0)
    return tune(model.module, model.dtype, most_rows=config.scheduler.max_num_seqs, activations=memory.activations)


def _describe(
    config: EngineConfig,
    model: LoadedModel,
    found: probe.Examined,
    kernels: Kernels,
    memory: MemoryBudget,
    lora_backend: str,
    load_seconds: float,
) -> EngineInfo:
    lora_reason = LATER if kernels.adapters is None else kernels.adapters.reason
    log.info("adapters by %s: %s", lora_backend, lora_reason)
    shapes, attention = found.layers, kernels.attention
    groups = open_groups(memory, config.cache.block_size)
    return EngineInfo(
        model=config.model.path,
        model_type=model.model_type,
        dtype=str(model.dtype).rpartition(".")[2],
        quantization=model.quantization,
        parameters=model.parameters,
        layers=probe.count_layers(model),
        vocab_size=found.vocab_size,
        eos_token_ids=tuple(i for i in model.eos_token_ids if i < found.vocab_size),
        max_model_len=min(model.max_model_len, *(group.longest for group in groups)),
        block_size=config.cache.block_size,
        num_blocks=memory.pools[0].num_blocks,
        kv_bytes_per_token=sum(s.bytes_per_token() for s in shapes),
        kv_bits=(shapes[0].keys.bits or shapes[0].keys.dtype.size * 8) if shapes else config.cache.kv_bits,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_loras=config.lora.max_loras,
        max_lora_rank=config.lora.max_lora_rank,
        device=backend.current().describe(),
        attention_backend=attention.name,
        lora_backend=lora_backend,
        lora_reason=lora_reason,
        products_reason=kernels.products.reason,
        load_seconds=load_seconds,
        vision=model.vision,
        deterministic=config.deterministic,
        memory=memory,
        attention_reason="; blocks run their own code: ".join(filter(None, (attention.reason, kernels.own_blocks))),
    )
