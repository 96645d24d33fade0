"""Write the tables of docs/macs.md: what this program would decide on Macs on which nobody has run it yet.

python scripts/macs.py [--check]

The facts of the Macs go through the code that a real start runs: the memory limit, the budget, the footprint of a
model, the size of prompt chunks and of learning's micro-batches. Times are those that `tandem plan` predicts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from mlx_tandem.capacity.machines import Machine, machine
from mlx_tandem.capacity.speed import chunk_ms, decode_ms
from mlx_tandem.capacity.work import StepWork
from mlx_tandem.cli.bench.shapes import Shape, write_model
from mlx_tandem.config import DutyConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.prefill import WHOLE, Prefill
from mlx_tandem.engine.prompt_cost import prompt_seconds
from mlx_tandem.model import backend
from mlx_tandem.model.backend.elsewhere import elsewhere, unified_memory
from mlx_tandem.model.backend.metal import METAL
from mlx_tandem.model.build import plan
from mlx_tandem.model.device import HOST_BYTES, parse_vm_stat
from mlx_tandem.model.workload import workload
from mlx_tandem.training.device import pace
from mlx_tandem.types import MemoryBudget

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "macs.md"
SAMPLES = ROOT / "scripts" / "vm_stat"
BEGIN, END = "<!-- macs: python scripts/macs.py -->\n", "<!-- end of macs -->\n"
MACS = tuple(
    machine(name)
    for name in ("m1-8", "m1-16", "m2-24", "m1-max-32", "m3-pro-36", "m4-max-128", "m2-ultra-192", "m3-ultra-512")
)
"""The Macs of the tables. Their facts, with sources, are those of `tandem plan`."""

_SIZES = {
    "1.7B": Shape(2048, 28, 16, 8, 128, 6144, 151_936, dtype="bfloat16"),
    "4B": Shape(2560, 36, 32, 8, 128, 9728, 151_936, dtype="bfloat16"),
    "8B": Shape(4096, 36, 32, 8, 128, 12288, 151_936, tied=False, dtype="bfloat16"),
    "32B": Shape(5120, 64, 64, 8, 128, 25600, 151_936, tied=False, dtype="bfloat16"),
    "70B": Shape(8192, 80, 64, 8, 128, 28672, 128_256, tied=False, dtype="bfloat16"),
}

SERVED = (("1.7B", 4), ("8B", 4), ("8B", 8), ("8B", 0), ("8B", 0), ("32B", 8), ("70B", 8), ("70B", 0))
"""The model for each of MACS: its size, and the bits of its weights; 0: bfloat16."""


@dataclass(frozen=True)
class Decided:
    """The decisions of a start on a Mac."""

    mac: Machine
    model: str
    memory: MemoryBudget
    decode_ms: float  # predicted time of a step of one stream
    chunk: int  # prompt tokens of a step while nothing decodes
    deep: int  # the same at the end of a prompt that fills the pool, at most
    prompt_s: float  # predicted time to read 4,096 tokens
    micro_batch: int  # tokens of a micro-batch of learning
    slice_ms: float  # predicted time of a slice of learning

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return (self.memory.pools[0].num_blocks - 1) * 16

    @property
    def everything(self) -> int:
        """Bytes of the device's budget and of the processes' own memory."""
        return self.memory.total + HOST_BYTES


def decide(mac: Machine, size: str, bits: int, *, learns: bool = False, adapters: int = 8) -> Decided:
    """Run the decisions of a start for `mac`. Raise ModelError if the model does not fit."""
    with simulated(mac), tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "model", _SIZES[size], weights=False, bits=bits or None)
        config = EngineConfig(
            ModelConfig(str(path), dtype="bfloat16", random_weights=True),
            scheduler=SchedulerConfig(max_num_seqs=16),
            lora=LoraConfig(max_loras=adapters, max_lora_rank=16),
            duty=DutyConfig(trainer_rank=16 if learns else 0),
        )
        memory, _ = plan(config)
        work = workload(config, 16)
    cost = _cost(mac, work)
    prefill = Prefill(SchedulerConfig(), _limits(memory), _SIZES[size].vocab)
    prefill.cost = cost
    chunk = cost.affordable(0, prefill.idle_ms(), memory.chunk_tokens)
    full = (memory.pools[0].num_blocks - 1) * 16
    deep = cost.affordable(full, WHOLE * prefill.idle_ms(), memory.chunk_tokens)
    layer_ms = 3 * token_ms(mac, work) / work.layers
    tokens = pace.micro_batch_tokens(lambda n: n * layer_ms, cost.decode(1), METAL.learning.micro_batch_tokens)
    name = f"{size} in {bits} bits" if bits else f"{size} in bfloat16"
    seconds = prompt_seconds(cost.form, 4096, chunk)
    return Decided(mac, name, memory, cost.decode(1), chunk, deep, seconds, tokens, tokens * layer_ms)


def simulated(mac: Machine) -> AbstractContextManager[None]:
    """Make decisions about memory inside the block as on `mac`."""
    return backend.planning_for(elsewhere(mac))


def token_ms(mac: Machine, work: StepWork) -> float:
    """Return the milliseconds of a prompt's token beside others, without attention to those before it."""
    return chunk_ms(work, mac.chip, 2, 0) - chunk_ms(work, mac.chip, 1, 0)


def _limits(memory: MemoryBudget) -> StepLimits:
    return StepLimits(tokens=memory.chunk_tokens)


def _cost(mac: Machine, work: StepWork) -> CostModel:
    """Return the cost model that warm-up would fit if steps took the predicted time."""
    cost = CostModel()
    points = ((8, 0), (64, 0), (256, 0), (8, 1024), (64, 1024), (256, 1024), (64, 6144))
    chunks = [(n, c, chunk_ms(work, mac.chip, n, c)) for n, c in points]
    cost.fit(chunks, [(rows, decode_ms(work, mac.chip, rows, 0)) for rows in (1, 4, 16)])
    return cost


def tables() -> str:
    """Return the tables of the page."""
    decided = [decide(mac, *model) for mac, model in zip(MACS, SERVED, strict=True)]
    memory = [
        "**How memory is divided**, in GB, with 8 adapters of rank 16 and nothing but macOS and a browser beside it. "
        "*Rest* is what stays free in what macOS recommends for the GPU.",
        "",
        "| Mac | model | limit | weights | activations | slots | KV pool | its tokens | all, with processes | rest |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for d in decided:
        m = d.memory
        cells = [m.limit, m.weights, m.activations, m.adapter_slots, m.pool]
        rest = d.mac.working_set - m.total
        memory.append(
            f"| {d.mac.title} | {d.model} | {' | '.join(_gb(c) for c in cells)} | {d.pool_tokens:,} | "
            f"{_gb(d.everything)} | {_gb(rest)} |"
        )
    speed = [
        "",
        "**What follows from the predicted speed.** Prompt chunks are those while nobody decodes; micro-batches and "
        "slices are learning's.",
        "",
        "| Mac | model | a token of one stream, ms | prompt tokens of a step | 4,096 prompt tokens, s | "
        "micro-batch, tokens | its slice, ms |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for d in decided:
        speed.append(
            f"| {d.mac.title} | {d.model} | {d.decode_ms:.0f} | {d.chunk:,} | {d.prompt_s:.1f} | {d.micro_batch} | "
            f"{d.slice_ms:.0f} |"
        )
    return "\n".join([*memory, *speed, *in_use()]) + "\n"


def in_use() -> Iterator[str]:
    """Yield the lines of the table of Macs that are in use."""
    yield from (
        "",
        "**What is left on Macs in use.** Each line is from the output of `vm_stat` on one Mac at one moment, as its "
        "owner has published it (`scripts/vm_stat`): samples, not averages.",
        "",
        "| memory | free and inactive | and cached files in use | limit | which is |",
        "|---:|---:|---:|---:|---|",
    )
    for gib, said in sorted((int(file.stem.removesuffix("gb")), file.read_text()) for file in SAMPLES.glob("*.txt")):
        available, without = parse_vm_stat(said), parse_vm_stat(said.replace("File-backed", "Other"))
        assert available is not None and without is not None
        limit = unified_memory(Machine("", MACS[0].chip, gib), available).limit()
        yield f"| {gib} GB | {_gb(without)} | {_gb(available)} | {_gb(limit.size)} | {limit.reason} |"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"


def page() -> str:
    """Return the page with new tables."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


def main() -> int:
    """Write the page, or with --check return whether it differs."""
    new = page()
    if "--check" in sys.argv[1:]:
        return int(new != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
