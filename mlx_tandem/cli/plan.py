"""`tandem plan`: what fits on a machine and how fast it should be, from shapes, bandwidths and measured steps."""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from mlx_tandem.capacity.machines import Machine, machine
from mlx_tandem.capacity.plan import CapacityPlan, Speed, check_group, prompts, steps
from mlx_tandem.cli.console import fail, size_text
from mlx_tandem.config import CacheConfig, DutyConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.errors import InvalidRequest, ModelError, TandemError
from mlx_tandem.model_folder import CONFIG
from mlx_tandem.printable import printable

ROWS = (1, 16, 64)
"""Numbers of rows for which the time of a step is printed."""

LENGTHS = (1024, 8192, 32768)
"""Lengths of sequences in tokens for which the number that fits is printed."""

POSITIONS = 32768
"""Longest sequence of a built-in shape."""

_Model = Annotated[
    str,
    typer.Option(
        "--model", help="A model folder, of which only the shapes are read, a hub id, qwen3-8b or qwen3.5-9b."
    ),
]
_Machine = Annotated[str, typer.Option("--machine", help="m4-max-64, h200 and the like; if absent this machine.")]
_Devices = Annotated[int, typer.Option("--tensor-parallel-size", min=1, max=64, help="Devices that share the model.")]
_Adapters = Annotated[int, typer.Option("--adapters", min=0, max=4096, help="Slots for adapters on the device.")]
_Rank = Annotated[int, typer.Option("--rank", min=1, max=512, help="Rank of the adapters, and of a trained one.")]
_Learn = Annotated[bool, typer.Option("--learn", help="Count the memory of a trainer.")]
_Bits = Annotated[int, typer.Option("--bits", help="Bits of the weights of a built-in shape: 4 or 8; 0: 16.")]
_KVBits = Annotated[int, typer.Option("--kv-bits", help="Bits of keys and values: 16 or 8.")]
_Rows = Annotated[int, typer.Option("--max-num-seqs", min=1, max=4096, help="Most streams that decode at once.")]
_Context = Annotated[int, typer.Option("--context", min=1, max=1_000_000, help="Tokens of each decoding stream.")]


def plan(
    model: _Model = "qwen3-8b",
    on: _Machine = "",
    devices: _Devices = 1,
    adapters: _Adapters = 8,
    rank: _Rank = 16,
    learn: _Learn = False,
    bits: _Bits = 0,
    kv_bits: _KVBits = 16,
    context: _Context = 1024,
    max_num_seqs: _Rows = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Compute what fits on a machine and how fast it should be, without reading a weight or measuring anything.

    Exit status 1 if the model does not fit.
    """
    from msgspec import to_builtins

    for name, value, allowed in (("--bits", bits, (0, 4, 8)), ("--kv-bits", kv_bits, (8, 16))):
        if value not in allowed:
            raise typer.BadParameter(f"must be {' or '.join(map(str, allowed))}", param_hint=name)
    try:
        chosen = machine(on) if on else None
        with _folder(model, bits) as config:
            asked = _Asked(model, chosen, devices, adapters, rank, learn, kv_bits, context, max_num_seqs)
            found = _computed(asked, config)
    except ModelError as e:
        fail(e.message)
    except InvalidRequest as e:
        raise typer.BadParameter(e.message, param_hint=f"--{(e.param or 'model').replace('_', '-')}") from None
    except TandemError as e:
        fail(e.message)
    if as_json:
        print(json.dumps(to_builtins(found, str_keys=True), indent=1))
    else:
        print("\n".join(printable(line) for line in lines(found)))


@contextmanager
def _folder(model: str, bits: int) -> Iterator[ModelConfig]:
    """Yield the settings of a model: a folder, a built-in shape, or a hub id, of which config.json alone is fetched."""
    from mlx_tandem.cli import hub
    from mlx_tandem.cli.bench.hybrid_shape import HYBRIDS
    from mlx_tandem.cli.bench.shapes import SHAPES

    shape = (SHAPES | HYBRIDS).get(model)
    if shape is not None and not Path(model).exists():
        settings = shape.config(POSITIONS, [shape.vocab - 1])
        if bits:
            settings["quantization"] = {"group_size": 64, "bits": bits}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_text(json.dumps(settings), encoding="utf-8")
            yield ModelConfig(folder, dtype="bfloat16", random_weights=True)
        return
    if bits:
        raise InvalidRequest("goes with a built-in shape only: a folder says its own bits", param="bits")
    try:
        path = hub.find(model, "model", wanted=[CONFIG]).folder
    except hub.HubError as e:
        raise InvalidRequest(str(e), param="model") from None
    # A folder with config.json alone has shapes enough.
    yield ModelConfig(str(path), random_weights=not any(path.glob("*.safetensors")))


class _Asked(NamedTuple):
    """The options of the command."""

    model: str
    machine: Machine | None
    devices: int
    adapters: int
    rank: int
    learn: bool
    kv_bits: int
    context: int
    max_num_seqs: int


def _computed(asked: _Asked, model: ModelConfig) -> CapacityPlan:
    """Return the plan of a model on a machine; the errors are those of a start there."""
    from mlx_tandem.engine.budget import sequences
    from mlx_tandem.planning import capacity

    config = EngineConfig(
        model=model,
        scheduler=SchedulerConfig(max_num_seqs=asked.max_num_seqs),
        cache=CacheConfig(kv_bits=16 if asked.kv_bits == 16 else 8),
        lora=LoraConfig(max_loras=asked.adapters, max_lora_rank=asked.rank),
        duty=DutyConfig(trainer_rank=asked.rank if asked.learn else 0),
    )
    devices = asked.devices
    found = capacity(config, asked.rank, asked.machine, devices)
    work, memory, size = found.work, found.memory, config.cache.block_size
    check_group(work, devices)
    speed = None
    if found.machine is not None:
        chip, most = found.machine.chip, sequences(memory, size, asked.context)
        decode = steps(work, chip, ROWS, asked.context, asked.adapters, devices, most)
        speed = Speed(chip.bandwidth, chip.tflops, chip.source, decode, prompts(work, chip, found.longest, devices))
    whole = [pool for pool in memory.pools if not pool.window and not pool.state]
    return CapacityPlan(
        model=asked.model,
        device=found.device,
        devices=devices,
        work=work,
        limit=memory.limit // devices,
        limit_reason=memory.limit_reason,
        weights=memory.weights // devices,
        activations=memory.activations // devices,
        learning=memory.learning // devices,
        adapter_slots=memory.adapter_slots // devices,
        adapter_slots_wanted=memory.adapter_slots_wanted // devices,
        pool=memory.pool // devices,
        adapters=asked.adapters,
        rank=asked.rank,
        slot_bytes=work.adapter_bytes // devices,
        host_bytes=4 * work.adapter_parameters,
        drive_bytes=2 * work.adapter_parameters,
        context=asked.context,
        max_num_seqs=asked.max_num_seqs,
        longest=found.longest,
        pool_tokens=min(((pool.num_blocks - 1) * size for pool in whole), default=0),
        streams={n: sequences(memory, size, n) for n in (*(n for n in LENGTHS if n < found.longest), found.longest)},
        speed=speed,
    )


def lines(plan: CapacityPlan) -> Iterator[str]:
    """Yield the lines of a plan, at most 80 columns wide but for names."""
    work = plan.work
    precision = f"{work.dtype}, weights in {work.quantization}" if work.quantization else work.dtype
    yield f"model           {plan.model}: {work.parameters / 1e9:,.2f}e9 parameters, {work.layers} layers"
    yield f"computed in     {precision}"
    group = f"{plan.devices} x " if plan.devices > 1 else ""
    yield f"machine         {group}{plan.device}"
    each = " of each device" if plan.devices > 1 else ""
    yield ""
    yield f"memory          {size_text(plan.limit)}{each}"
    yield f"which is        {plan.limit_reason}"
    yield f"weights         {size_text(plan.weights)}"
    yield f"activations     {size_text(plan.activations)}  at most"
    if plan.learning:
        yield f"learning        {size_text(plan.learning)}  a trainer of rank {plan.rank}"
    if plan.adapters:
        yield f"adapter slots   {size_text(plan.adapter_slots)}  {plan.adapters} of rank {plan.rank} on every linear"
        if plan.adapter_slots < plan.adapter_slots_wanted:
            yield f"they want       {size_text(plan.adapter_slots_wanted)}  for {plan.adapters} such adapters at once"
    yield f"keys and values {size_text(plan.pool)}  for {plan.pool_tokens:,} tokens of {work.token_bytes:,} bytes"
    if work.state_bytes:
        yield f"a stream's state {work.state_bytes:,} bytes, in that, too"
    yield ""
    drive = size_text(plan.drive_bytes).strip()
    yield f"an adapter      {size_text(plan.slot_bytes)}  in a slot; {drive} on the drive in 16 bits"
    fit = ", ".join(f"{n:,} of {tokens:,} tokens" for tokens, n in plan.streams.items())
    fit += f"; at most {plan.max_num_seqs:,} run at once"
    yield from textwrap.wrap(f"streams that fit {fit}", 80, subsequent_indent=" " * 17)
    yield ""
    if plan.speed is None:
        yield "speed           unknown for this device; --machine names one that is in the table"
        return
    yield from _speed_lines(plan, plan.speed)


def _speed_lines(plan: CapacityPlan, speed: Speed) -> Iterator[str]:
    """Yield the lines about predicted times."""
    limits = f"{speed.bandwidth_gb_s:,.0f} GB/s and {speed.tflops:,.1f} TFLOP/s"
    yield f"predicted from {limits}{' a device' if plan.devices > 1 else ''}, {plan.context:,} tokens of context:"
    yield ""
    beside = "   adapters   step ms   tokens/s" if plan.adapters else ""
    yield f"rows   step ms   tokens/s{beside}"
    for step in speed.decode:
        line = f"{step.rows:>4,} {step.step_ms:>9.2f} {step.tokens_per_s:>10,.0f}"
        if plan.adapters:
            line += (
                f" {step.adapters:>10,} {step.step_ms_with_adapters:>9.2f} {step.tokens_per_s_with_adapters:>10,.0f}"
            )
        yield line + ("" if step.fits else "  *")
    if not all(step.fits for step in speed.decode):
        yield "* more rows than the keys and values of so many tokens have room for"
    yield ""
    for prompt in speed.prompts:
        rate = prompt.tokens / prompt.seconds
        yield f"a prompt of {prompt.tokens:,} tokens takes {prompt.seconds:.3f} s, {rate:,.0f} tokens/s"
