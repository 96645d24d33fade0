"""Models of real sizes, as they would be served on Macs that nobody here has: steps are recorded and never computed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.cli.bench import shapes
from mlx_tandem.config import DutyConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.plan import CARRY, Row, RowKind
from mlx_tandem.model import build as build_module
from mlx_tandem.model.backend.elsewhere import elsewhere
from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.choices import Choices, KernelChoices, Pace, Subject
from mlx_tandem.model.kernels import dialect, inplace
from mlx_tandem.model.kernels.dialect import Source
from mlx_tandem.model.ops.attention.choice import AttentionDivision
from mlx_tandem.model.ops.attention.division import start
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.lora.choice import AdapterLimits
from mlx_tandem.model.ops.products.few_rows import Products
from mlx_tandem.model.ops.products.tuning import Tuned
from mlx_tandem.model.ops.sampling.choice import SamplingKernels
from tests.engine.mlx_engine import Engine
from tests.hazards.command_buffers import Run
from tests.hazards.graph import Graph, Op
from tests.hazards.rule import ALIASES, RESHAPES
from tests.hazards.steps import Metal, plan
from tests.kernels import gpu as fake
from tests.kernels.gpu import Gpu

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "macs.py"

READ, COMPUTED = 0.7, 0.6
"""Shares of the memory bandwidth and of the arithmetic throughput that operations are assumed to reach at least."""


def load() -> ModuleType:
    """Return the script that has the machines and what a start would decide on them."""
    if "macs" not in sys.modules:
        spec = importlib.util.spec_from_file_location("macs", SCRIPT)
        assert spec is not None and spec.loader is not None
        sys.modules["macs"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["macs"]


@dataclass(frozen=True)
class Served:
    """A model on a Mac."""

    mac: Any
    metal: Metal
    limits: list[int]
    """The limits of memory that MLX was given."""

    @property
    def full(self) -> int:
        """The tokens that the pool holds."""
        info = self.metal.engine.built.info
        return (info.num_blocks - 1) * info.block_size

    def chunk(self, length: int, end: int) -> Graph:
        """Record a chunk of a prompt that ends at a position."""
        table = [list(range(1, 1 + -(-end // self.metal.engine.built.info.block_size)))]
        return self.metal.launch(plan(Row(RowKind.PROMPT, 0, 0, 0, end - length, (5,) * length, table, True)))

    def decode(self, rows: int) -> Graph:
        """Record a step in which so many rows share the whole pool."""
        size = self.metal.engine.built.info.block_size
        each = self.full // size // rows
        tables = [list(range(1 + each * i, 1 + each * (i + 1))) for i in range(rows)]
        made = [Row(RowKind.DECODE, i, i, 0, each * size - 1, (CARRY,), [t], True) for i, t in enumerate(tables)]
        return self.metal.launch(plan(*made))

    def longest_ms(self, run: Run) -> float:
        """Return the longest time of a command buffer, if operations reach the shares READ and COMPUTED."""
        graph, pool = run.graph, set(run.graph.labels)
        times = []
        for committed in run.committed:
            times.append(0.0)
            for op in committed.ops:
                if op.name in ALIASES or op.name in RESHAPES:
                    if op.inputs[0] in pool:
                        pool.update(op.outputs)
                    continue
                written = sum(map(graph.nbytes, op.outputs))
                # Of the pool an operation reads no more than it returns.
                moved = written + sum(written if array in pool else graph.nbytes(array) for array in op.inputs)
                work = _work(op, graph) / (COMPUTED * self.mac.chip.tflops * 1e9)
                times[-1] += max(work, moved / (READ * self.mac.chip.bandwidth * 1e6))
        return max(times)


def _work(op: Op, graph: Graph) -> float:
    """Return the floating-point operations of a product or an attention."""
    shape = graph.arrays[op.outputs[0]][0]
    if op.name in ("Matmul", "QuantizedMatmul"):
        return 2.0 * prod(shape) * graph.arrays[op.inputs[0]][0][-1]
    if op.name == "mlx_scaled_dot_product_attention":
        return 4.0 * prod(shape) * graph.arrays[op.inputs[1]][0][2]
    return 0.0


@contextmanager
def served(mac: Any, size: str, bits: int, folder: Path) -> Iterator[Served]:
    """Yield a model as it would be served on a Mac whose kernels were all found to be right. No weight is ever made."""
    macs = load()
    shape, limit = macs._SIZES[size], elsewhere(mac).free_memory()
    with pytest.MonkeyPatch.context() as patch:  # nobody reads its texts
        patch.setattr(shapes, "_write_tokenizer", lambda *_: {"<|im_end|>": 1, "<|endoftext|>": 2})
        shapes.write_model(folder, shape, weights=False, bits=bits or None)
    config = EngineConfig(
        ModelConfig(str(folder), "bfloat16", random_weights=True),
        scheduler=SchedulerConfig(max_num_seqs=16),
        lora=LoraConfig(max_loras=8, max_lora_rank=16),
        duty=DutyConfig(),
    )
    form = RowFormat(shape.kv_heads, shape.head_dim, mx.bfloat16)
    kernels = KernelChoices(
        mask_axes=1,
        store_problem="",
        products=Products("not timed"),
        attention=AttentionDivision("metal", "not timed", (start("metal", form),)),
        own_blocks="",
        adapters=AdapterLimits("not timed", same=512, mixed=512),
        sampling=SamplingKernels("not timed", plain=True, truncated=True),
    )
    given = Choices(Subject("", "", "", "", ""), kernels, Tuned(), Pace((), (), one_at_a_time=False))
    with pytest.MonkeyPatch.context() as patch:
        gpu = fake.install("metal", dialect.maker("metal"), patch, limit)
        patch.setattr(build_module, "read_weights", lambda *_: None)
        patch.setattr(Choices, "require", lambda *_: None)
        patch.setattr(inplace.verdict, "_given", "")
        patch.setattr(mx, "eval", lambda *_: None)
        limits: list[int] = []
        patch.setattr(mx, "set_memory_limit", limits.append)
        patch.setattr(mx, "set_cache_limit", lambda _: 0)
        for name in ("rms_norm", "rope", "scaled_dot_product_attention"):
            patch.setattr(mx.fast, name, _as_one(name, getattr(mx.fast, name), gpu))
        mx.disable_compile()
        try:
            built = build_module.build(config, {}, lambda *_: None, [Fused("metal", dialect.maker("metal"))], given)
            yield Served(mac, Metal(Engine(built, {}), gpu, patch), limits)
        finally:
            mx.enable_compile()
            inplace.writing.cache_clear()


def _as_one(name: str, function: Callable[..., mx.array], gpu: Gpu) -> Callable[..., mx.array]:
    """Return a function that is recorded as one operation, as on Metal; on a CPU MLX makes it of several."""

    def call(*args: Any, **options: Any) -> mx.array:
        made = function(*args, **options)
        if not gpu.records:
            return made
        arrays = [x for x in (*args, *options.values()) if isinstance(x, mx.array)]
        source = Source(f"mlx_{name}", [f"x{i}" for i in range(len(arrays))], ["y"], "y[0] = x0[0];")
        return gpu.maker("metal")(source)(arrays, {}, (1, 1, 1), 32, [(made.shape, made.dtype)])[0]

    return call
