"""Write the tables of docs/macs.md: what this program would decide on Macs on which nobody has run it yet.

python scripts/macs.py [--check]

The device facts below go through the code that a real start runs: the memory limit, the budget, the footprint of a
model, the size of prompt chunks and of learning's micro-batches. Times are predictions from memory bandwidth and
arithmetic throughput, not measurements.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from unittest.mock import patch

from mlx_tandem.cli.bench.shapes import Shape, write_model
from mlx_tandem.config import DutyConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.prefill import WHOLE, Prefill
from mlx_tandem.engine.prompt_cost import prompt_seconds
from mlx_tandem.model import backend
from mlx_tandem.model.backend.metal import METAL, Metal
from mlx_tandem.model.build import plan
from mlx_tandem.model.device import HOST_BYTES, Limit, UnifiedMemory, parse_vm_stat
from mlx_tandem.training.device import pace
from mlx_tandem.types import MemoryBudget

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "macs.md"
SAMPLES = ROOT / "scripts" / "vm_stat"
BEGIN, END = "<!-- macs: python scripts/macs.py -->\n", "<!-- end of macs -->\n"
GIB = 1 << 30

READ, COMPUTED = 0.7, 0.6
"""Shares of the memory bandwidth and of the arithmetic throughput that steps are assumed to reach."""

SYSTEM = 3 * GIB
"""Bytes that macOS and a browser are assumed to need."""


@dataclass(frozen=True)
class Mac:
    """Facts of one machine.

    Bandwidth in GB/s and memory sizes are Apple's published specifications. The working set is what Metal
    recommends: logs in llama.cpp's issues 5206, 434, 1870 and 3213 have 2/3 of the memory up to 32 GB and 3/4 above
    (newer systems recommend more of 128 GB). Throughput in TFLOP/s of float32 is Apple's for M1 and M2; for later
    GPUs it is cores times 0.36, as in M2, which is less than they have.
    """

    name: str
    gib: int
    bandwidth: float
    tflops: float

    @property
    def memory(self) -> UnifiedMemory:
        """The memory as the program would find it."""
        return memory_of(self.gib, self.gib * GIB - SYSTEM)


def memory_of(gib: int, available: int) -> UnifiedMemory:
    """Return the memory of a Mac of so many GiB, of which other programs leave `available` bytes."""
    total = gib * GIB
    return UnifiedMemory(total, total * 2 // 3 if gib <= 32 else total * 3 // 4, available)


MACS = (
    Mac("M1, 8 GB", 8, 68, 2.6),
    Mac("M1, 16 GB", 16, 68, 2.6),
    Mac("M2, 24 GB", 24, 100, 3.6),
    Mac("M1 Max, 32 GB", 32, 400, 10.4),
    Mac("M3 Pro, 36 GB", 36, 150, 18 * 0.36),
    Mac("M4 Max, 128 GB", 128, 546, 40 * 0.36),
    Mac("M2 Ultra, 192 GB", 192, 800, 27.2),
    Mac("M3 Ultra, 512 GB", 512, 819, 80 * 0.36),
)

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

    mac: Mac
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


def decide(mac: Mac, size: str, bits: int, *, learns: bool = False, adapters: int = 8) -> Decided:
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
    cost = _cost(mac, _SIZES[size], memory)
    prefill = Prefill(SchedulerConfig(), _limits(memory), _SIZES[size].vocab)
    prefill.cost = cost
    chunk = cost.affordable(0, prefill.idle_ms(), memory.chunk_tokens)
    full = (memory.pools[0].num_blocks - 1) * 16
    deep = cost.affordable(full, WHOLE * prefill.idle_ms(), memory.chunk_tokens)
    layer_ms = 3 * 2 * _SIZES[size].parameters / _SIZES[size].layers / (COMPUTED * mac.tflops * 1e9)
    tokens = pace.micro_batch_tokens(lambda n: n * layer_ms, cost.decode(1), METAL.learning.micro_batch_tokens)
    name = f"{size} in {bits} bits" if bits else f"{size} in bfloat16"
    seconds = prompt_seconds(cost.form, 4096, chunk)
    return Decided(mac, name, memory, cost.decode(1), chunk, deep, seconds, tokens, tokens * layer_ms)


@contextmanager
def simulated(mac: Mac) -> Iterator[None]:
    """Make decisions about memory inside the block as on `mac`."""

    class Simulated(Metal):
        def free_memory(self) -> Limit:
            return mac.memory.limit()

    there = Simulated(**{field.name: getattr(METAL, field.name) for field in fields(METAL)})
    with patch.object(backend, "current", lambda: there):
        yield


def _limits(memory: MemoryBudget) -> StepLimits:
    return StepLimits(tokens=memory.chunk_tokens)


def _cost(mac: Mac, shape: Shape, memory: MemoryBudget) -> CostModel:
    """Return the cost model that warm-up would fit if steps took the time that bandwidth and arithmetic imply."""
    read_ms = memory.weights / (READ * mac.bandwidth * 1e6)
    token_ms = 2 * shape.parameters / (COMPUTED * mac.tflops * 1e9)
    pair_ms = 4 * shape.heads * shape.head_dim * shape.layers / (COMPUTED * mac.tflops * 1e9)

    def chunk(length: int, context: int) -> float:
        return read_ms + length * token_ms + length * (context + length / 2) * pair_ms

    cost = CostModel()
    points = ((8, 0), (64, 0), (256, 0), (8, 1024), (64, 1024), (256, 1024), (64, 6144))
    cost.fit([(n, c, chunk(n, c)) for n, c in points], [(rows, read_ms + rows * token_ms) for rows in (1, 4, 16)])
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
        rest = d.mac.memory.working_set - m.total
        memory.append(
            f"| {d.mac.name} | {d.model} | {' | '.join(_gb(c) for c in cells)} | {d.pool_tokens:,} | "
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
            f"| {d.mac.name} | {d.model} | {d.decode_ms:.0f} | {d.chunk:,} | {d.prompt_s:.1f} | {d.micro_batch} | "
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
        limit = memory_of(gib, available).limit()
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
