"""Stages that run steps of the engine without serving: what a start decides, whether steps disturb each other, and what
a long prompt takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.mac import models
from mlx_tandem.cli.doctor.result import Failed, Figures, NotHere, Outcome
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig
from mlx_tandem.engine.prefill import Prefill

if TYPE_CHECKING:
    from mlx_tandem.model.build import Built
    from mlx_tandem.model.choices import Choices

REPORT = "This must not happen on a machine that is supported: please report it."

BLOCK = CacheConfig().block_size


def kernels(bench: Bench) -> Outcome:
    """Compile and check every kernel of this device separately."""
    from mlx_tandem.model.kernel_checks import tried
    from mlx_tandem.model.kernels import dialect

    targets = dialect.available()
    if not targets:
        raise NotHere("MLX computes on the CPU, for which this project has no kernels")
    figures: Figures = {}
    wrong = []
    for one in tried(targets[0]):
        figures[f"{one.name}, s"] = round(one.seconds, 2)
        if one.problem:
            wrong.append(f"{one.name}: {one.problem}")
    says = f"{len(figures)} kinds, compiled and run for the first time in {sum(map(float, figures.values())):.1f} s"
    if wrong:
        advice = f"Serving leaves out kernels that are wrong or slow by itself, and is slower. {REPORT}"
        raise Failed(f"{says}; {len(wrong)} cannot be used: {'; '.join(wrong)}", advice, figures)
    return Outcome(f"{says}: all are right", figures)


class Started(NamedTuple):
    """An engine's runner after its first steps, and the rule by which it cuts prompts into chunks."""

    built: Built
    choices: Choices
    prefill: Prefill


def _started(bench: Bench) -> Started:
    """Return the engine of the model, with room for the long prompt."""
    from mlx_tandem.model.build import build

    def make() -> Started:
        model = models.dense(bench)
        config = EngineConfig(
            model, CacheConfig(num_blocks=2 + -(-bench.sizes.prompt // BLOCK)), lora=LoraConfig(prepare=True)
        )
        built = build(config, {}, lambda stage, fraction: None)
        prefill = Prefill(config.scheduler, built.step_limits, built.info.vocab_size)
        return Started(built, built.warm_up(prefill.cost), prefill)

    started: Started = bench.keep("started", make)
    return started


def start(bench: Bench) -> Outcome:
    """Build the engine of the model and run its first steps, as a server does at start."""
    built, choices, _ = _started(bench)
    info, chosen, gib = built.info, choices.kernels, 2**30
    figures: Figures = {
        "model": f"{info.model_type}, {info.parameters:,} parameters, {info.quantization or info.dtype}",
        "limit_gb": round(info.memory.limit / gib, 2),
        "weights_gb": round(info.memory.weights / gib, 2),
        "activations_gb": round(info.memory.activations / gib, 2),
        "pool_gb": round(info.memory.pool / gib, 2),
        "limit_reason": info.memory.limit_reason,
        "prompt_tokens_a_step": info.memory.chunk_tokens,
        "attention": info.attention_reason,
        "adapters": info.lora_reason,
        "sampling": chosen.sampling.reason,
        "products": info.products_reason,
    }
    if chosen.own_blocks:
        figures["attention_blocks"] = chosen.own_blocks
    if chosen.store_problem:
        figures["writing_in_place"] = chosen.store_problem
    for rows, milliseconds in choices.pace.decodes:
        figures[f"step_of_{rows}_ms"] = round(milliseconds, 2)
    steps = "one step at a time" if choices.pace.one_at_a_time else "steps overlap"
    says = f"loaded in {info.load_seconds:.1f} s; attention by {info.attention_backend}, adapters by "
    return Outcome(f"{says}{info.lora_backend}, {steps}", figures)


def overlap(bench: Bench) -> Outcome:
    """Launch each step while the one before it runs, many times; compare the pool with that after separate steps."""
    from mlx_tandem.model.overlap import disturbed

    built, times = _started(bench).built, bench.sizes.overlaps
    wrong = disturbed(built.runner, built.info, times)
    figures: Figures = {"runs": times, "other_contents": wrong}
    if wrong:
        raise Failed(
            f"{wrong} of {times} runs left other keys and values in the pool than steps apart do",
            f"Answers would be wrong where a start does not notice it and runs steps one at a time. {REPORT}",
            figures,
        )
    return Outcome(f"{times} runs of steps in flight together left the same in the pool as steps apart", figures)


def overlap_on_gpu(bench: Bench) -> Outcome:
    """Do the same as `overlap`. The environment sets another number of operations in a command buffer."""
    from mlx_tandem.model import backend

    if backend.current().steps.one_at_a_time:
        raise NotHere("MLX computes on the CPU, which has no command buffers")
    return overlap(bench)


def prompt(bench: Bench) -> Outcome:
    """Read a long prompt, and measure its longest step and the memory that it takes."""
    from mlx_tandem.model.trials import read_long_prompt, room

    built, _, prefill = _started(bench)
    info, allowed = built.info, built.info.memory.activations
    tokens = min(bench.sizes.prompt, room(info))
    found = read_long_prompt(built.runner, info, tokens, bench.sizes.prompt_seconds, prefill.chunk_alone)
    mb = 2**20
    figures: Figures = {
        "tokens": found.tokens,
        "chunks": f"{min(found.chunks)} to {max(found.chunks)}",
        "tokens_s": round(found.tokens / found.seconds),
        "longest_step_ms": round(found.longest * 1e3, 1),
        "beside_mb": round(found.bytes / mb, 1),
        "planned_mb": round(allowed / mb, 1),
    }
    cut = "" if found.tokens == tokens else f" of {tokens:,}, for which there was time,"
    says = (
        f"{found.tokens:,} tokens{cut} at {figures['tokens_s']:,} a second, {figures['chunks']} a step; the longest: "
        f"{figures['longest_step_ms']} ms; {figures['beside_mb']} MB beside weights and pool, "
        f"{figures['planned_mb']} planned"
    )
    if found.bytes > allowed:
        return Outcome(says, figures, f"A prompt takes more memory than was set aside for it. {REPORT}")
    return Outcome(says, figures)
