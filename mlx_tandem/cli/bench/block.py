"""`tandem bench report`: one Markdown block with the machine, what the engine chose on it, and how fast it is.

People paste the block into an issue. It names no folder, user or secret of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_tandem.cli.bench.engine import Batch, EngineBench, EngineLoad
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.sides import BASE, PEER
from mlx_tandem.cli.console import fail
from mlx_tandem.cli.doctor.redact import Redactor
from mlx_tandem.config import DutyConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.prompt_cost import prompt_seconds
from mlx_tandem.errors import TandemError

BATCHES = (Batch(1, 64), Batch(16, 64), Batch(1, 1024))
"""Batches that are measured."""

TRAINER_RANK = 16
"""Rank of the trainer for which memory is reserved."""


def run(model: Path, repeats: int) -> str:
    """Measure the engine on `model` and return the block. End the process with one line if the model cannot be
    served.
    """
    found: dict[str, Any] = describe() | {"model": model.name}
    config = EngineConfig(
        ModelConfig(str(model)),
        scheduler=SchedulerConfig(max_num_seqs=max(batch.rows for batch in BATCHES)),
        lora=LoraConfig(max_loras=8, prepare=True),
        duty=DutyConfig(trainer_rank=TRAINER_RANK),
    )
    load = EngineLoad(BATCHES, max_tokens=64, repeats=repeats, sampling="greedy")
    try:
        EngineBench(config, load, [], found.update).measure()
    except TandemError as e:
        fail(e.message)
    return Redactor().text(markdown(found))


def markdown(found: Mapping[str, Any]) -> str:
    """Return the block for the results of `describe` and `EngineBench`."""
    machine, engine, commit = found["machine"], found["engine"], found["commit"]
    memory, form = engine["memory"], engine["prompt_cost"]
    lines = [
        f"### tandem bench report: {engine['device']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}, "
        f"{found['time'][:10]}" + (f", commit {commit}" if commit else ""),
        "",
        ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "",
        f"Model {found['model']}: {engine['model_type']}, {engine['parameters']:,} parameters, "
        f"{engine['quantization'] or engine['dtype']}.",
        "",
        "| memory, GB | " + " | ".join(name.replace("_", " ") for name in _PARTS) + " | why |",
        "|---|" + "---:|" * len(_PARTS) + "---|",
        "| | " + " | ".join(f"{memory[part] / 1e9:.2f}" for part in _PARTS) + f" | {memory['limit_reason']} |",
        "",
        "| streams × prompt | tokens/s | mlx-lm, tokens/s | ms a step | prompt tokens/s |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in found["results"]:
        own, peer = row[BASE], row.get(PEER)
        prompt = row["batch"] * row["prompt_tokens"] / own["prefill_ms"] * 1e3
        theirs = f"{peer['decode_tokens_per_s']:,.1f}" if peer else found.get("no_peer", "")
        lines.append(
            f"| {row['batch']} × {row['prompt_tokens']:,} | {own['decode_tokens_per_s']:,.1f} | {theirs} | "
            f"{own['step_ms']:.2f} | {prompt:,.0f} |"
        )
    lines += [
        "",
        f"- prompts of {memory['chunk_tokens']:,} tokens a step at most; 4,096 tokens predicted in "
        f"{prompt_seconds(tuple(form), 4096, memory['chunk_tokens']):.1f} s",
        f"- learning: micro-batches of {engine['micro_batch_tokens']} tokens",
        *(f"- {what}: {engine[name]}" for what, name in _REASONS.items() if engine[name]),
    ]
    return "\n".join(lines)


_PARTS = ("limit", "weights", "activations", "learning", "pool", "adapter_slots")
_REASONS = {
    "attention": "attention_reason",
    "adapters": "lora_reason",
    "products of few rows": "products_reason",
}
