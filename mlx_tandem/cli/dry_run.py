"""`tandem serve --dry-run`: prints how a server would divide the device's memory, and how many sequences would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mlx_tandem.cli import hub, keys
from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.cli.console import fail, size_text
from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.config import Config, EngineConfig
from mlx_tandem.engine.budget import sequences
from mlx_tandem.errors import TandemError
from mlx_tandem.types import MemoryBudget

LENGTHS = (512, 2048, 8192, 32768)
"""Lengths of sequences in tokens for which the number that fits is printed."""


def show(
    file: Path | None,
    options: Mapping[str, object],
    called_as: str,
    defaults: Mapping[str, object] | None,
    words: Sequence[str] = (),
) -> None:
    """Print the budget of the server that these settings would start; the settings are read as by cli.serve.prepare.

    Of ranks on several machines print also how the command line `words` would be launched.

    End the process with one line and status 1 if that server could not be started.
    """
    from msgspec.structs import replace

    from mlx_tandem.planning import plan

    try:
        caller = CALLERS[called_as]
        config = build(file, caller.options(options), {**caller.defaults, **(defaults or {})})
        if config.cluster.connect_to:
            from mlx_tandem.cli.joining import join

            config = join(config, keys.read(config.server.api_key, config.server.api_key_file))
        engine, _ = hub.find_models(config.engine)
        memory, longest, device = plan(engine)
    except SettingsError as e:
        fail(str(e))
    except hub.HubError as e:
        fail(str(e))
    except TandemError as e:
        fail(e.message)
    print("\n".join(lines(replace(config, engine=engine), memory, longest, device)))
    if engine.parallel.hostfile:
        from mlx_tandem.cli.launching import plan_lines

        print("\n".join(plan_lines(config, words)))


def lines(config: Config, memory: MemoryBudget, longest: int, device: str) -> Iterator[str]:
    """Yield the lines of the budget."""
    engine = config.engine
    size = engine.cache.block_size
    yield f"device               {device}"
    if engine.parallel.ranks > 1:
        yield f"ranks                {engine.parallel.ranks:9,}     by {engine.parallel.mode}; what follows is for each"
    yield f"there is             {size_text(memory.limit)}  {memory.limit_reason}"
    yield f"weights              {size_text(memory.weights)}"
    chunk = f"steps of {memory.chunk_tokens:,} prompt tokens"
    yield f"activations          {size_text(memory.activations)}  at most, {chunk}"
    if memory.learning:
        duty = engine.duty
        trainers = "a trainer" if duty.trainers == 1 else f"{duty.trainers} trainers"
        yield f"learning             {size_text(memory.learning)}  {trainers} of rank {duty.trainer_rank}"
    for pool in memory.pools:
        if pool.state:
            rows = f"{pool.num_blocks:,} states of {pool.block_bytes:,} bytes each"
            yield f"states               {size_text(pool.num_blocks * pool.block_bytes)}  {rows}"
            continue
        shape = f"{pool.num_blocks:,} blocks of {size} tokens, {pool.block_bytes:,} bytes each"
        of = f", for layers that see {pool.window:,} tokens" if pool.window else ""
        yield f"KV pool              {size_text(pool.num_blocks * pool.block_bytes)}  {shape}{of}"
    if drafts := memory.pool - sum(pool.num_blocks * pool.block_bytes for pool in memory.pools):
        yield f"draft model's KV     {size_text(drafts)}  beside its weights, which are among those above"
    yield f"adapter slots        {size_text(memory.adapter_slots)}  at most, {_slots(engine, memory)}"
    yield f"all                  {size_text(memory.total)}"
    host = int(engine.lora.max_cpu_lora_gb * 1e9)
    yield f"beside it            {size_text(host)}  at most, for adapters that wait in the host's memory"
    yield ""
    yield f"tokens      sequences that fit (at most {engine.scheduler.max_num_seqs} run at once)"
    for length in (*(n for n in LENGTHS if n < longest), longest):
        yield f"{length:>6,}      {sequences(memory, size, length):,}"


def _slots(engine: EngineConfig, memory: MemoryBudget) -> str:
    lora = engine.lora
    wanted = f"{lora.max_loras} of rank {lora.max_lora_rank} on every linear"
    if memory.adapter_slots < memory.adapter_slots_wanted:
        return f"less than the {size_text(memory.adapter_slots_wanted).strip()} of {wanted}"
    return wanted
