"""An engine on a Metal device that is not there, and steps of every kind that it may have in flight together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace as changed

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine.learning import TrainerSpec
from mlx_tandem.engine.plan import CARRY, Row, RowKind, Seating, StepPlan
from mlx_tandem.model.kernels import dialect, inplace
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.training.device.trained_adapter import TrainedAdapter
from mlx_tandem.types import AdapterInfo, SamplingParams
from tests import tiny_families, tiny_heads, tiny_models, tiny_vision
from tests.engine.mlx_engine import Engine, make_engine
from tests.hazards.graph import Graph, record
from tests.kernels import gpu as fake
from tests.kernels import shim
from tests.kernels.gpu import Gpu

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
RANK = 8


@dataclass(frozen=True)
class Metal:
    """An engine whose kernels are recorded. `patch` lasts as long as it does."""

    engine: Engine
    gpu: Gpu
    patch: pytest.MonkeyPatch
    name: str = ""

    @property
    def runner(self) -> MLXRunner:
        return self.engine.built.runner

    def state(self) -> dict[str, mx.array]:
        """Return all arrays that a step finds and leaves, but for what the host sends."""
        runner = self.runner
        found = {
            f"array {n} of layer {i}": array
            for i, arrays in enumerate(runner._pool.layers)
            for n, array in enumerate(arrays)
        }
        for path, stack in runner._lora._stacks.items():
            found |= {f"A of {path}": stack.a, f"B of {path}": stack.b}
        found |= {f"order {i}": zero for i, zero in enumerate(runner._order.zeros)}
        return found | {"last tokens": runner._last, "last places": runner._places_of_last}

    def bind(self, state: dict[str, mx.array]) -> None:
        """Put these in the place of what `state` returns."""
        runner, given = self.runner, iter(state.values())
        runner._pool.layers = [[next(given) for _ in arrays] for arrays in runner._pool.layers]
        for stack in runner._lora._stacks.values():
            stack.a, stack.b = next(given), next(given)
        runner._order.zeros = [next(given) for _ in runner._order.zeros]
        runner._last, runner._places_of_last = next(given), next(given)
        runner._lora._routes.clear()  # they hold views of the arrays

    @property
    def kept(self) -> list[str]:
        """The labels of the arrays of the pool and of the slots."""
        return [label for label in self.state() if " of " in label]

    def launch(self, *steps: StepPlan | Callable[[Metal], None]) -> Graph:
        """Record steps that are all in flight together, and whatever else is called between them."""
        before, lora = self.state(), self.runner._lora
        stacks, rank = dict(lora._stacks), lora.rank
        self.runner.compiled.clear()
        marks = {f"mark {i}": mx.zeros((1,)) for i in range(len(steps))}

        def work(given: dict[str, mx.array]) -> None:
            self.bind({label: given[label] for label in before})
            for mark, step in zip(marks, steps, strict=True):
                # Each step has a graph of its own: what two of them compute alike is computed twice.
                state = self.state()
                self.bind(dict(zip(state, mx.depends(list(state.values()), [given[mark]]), strict=True)))
                if isinstance(step, StepPlan):
                    self.runner.launch(step)
                else:
                    step(self)

        self.gpu.records = True
        self.gpu.called.clear()
        try:
            return record(work, before | marks, self.gpu.sources, self.gpu.called, self.patch)
        finally:
            self.gpu.records = False
            lora._stacks, lora.rank = stacks, rank
            self.bind(before)
            self.runner._seats.reset()
            self.runner._embeddings.clear()
            self.runner.prebuilt.reset()
            self.runner.queue.clear()


@dataclass(frozen=True)
class Kind:
    """Of an engine: its model, its cache, and what it may not do."""

    family: str = "llama"
    changes: Mapping[str, Any] = field(default_factory=dict)
    kv_bits: Literal[8, 16] = 16
    common_offset: bool = True  # whether chunks behind a context are read without a mask
    fused_adapters: bool = True
    make: Callable[..., Path] = tiny_models.make
    method: Literal["none", "mtp"] = "none"  # of its drafts


SERVED = {
    "states": Kind("qwen3_next"),
    "states of a short convolution": Kind("lfm2"),
    "a head": Kind("mimo", make=tiny_heads.make, method="mtp"),
    "images": Kind("qwen2_5_vl", make=tiny_vision.make),
}
"""Engines whose steps are those that the scheduler asks for, since they follow from each other."""

ENGINES = {
    "short blocks": Kind(),
    "short blocks, no common offset": Kind(common_offset=False),
    "own blocks": Kind("gemma"),
    "own blocks, no common offset": Kind("gemma", common_offset=False),
    "windows": Kind(changes=tiny_families.WINDOW),
    "few bits": Kind(kv_bits=8),
    "few bits, own blocks, no common offset": Kind("gemma", kv_bits=8, common_offset=False),
    "experts": Kind("qwen3_moe"),
    "plain adapters": Kind(fused_adapters=False),
    "states": Kind("qwen3_5", {"linear_key_head_dim": 32, "linear_value_head_dim": 32}),
}


@contextmanager
def engine(kind: Kind, folder: Path) -> Iterator[Metal]:
    """Build an engine of which all kernels have been found to be right, with adapters "one" and "two" in its slots."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = fake.install("metal", shim.maker(), patch)
        forget = inplace.writing.cache_clear
        fake.time_by_clock(gpu, patch)
        patch.setattr("mlx_tandem.model.ops.lora.choice._TOKENS", (1, 16))
        patch.setattr("mlx_tandem.model.step.rows.COMMON_OFFSET_TOKENS", 16 if kind.common_offset else 1 << 20)
        mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
        try:
            made = make_engine(
                kind.make(folder, kind.family, **kind.changes),
                kv_bits=kind.kv_bits,
                kv_group_size=16,
                attention_backend="metal",
                backends=[Fused("metal", dialect.maker("metal"))],
                method=kind.method,
            )
            metal = Metal(made, gpu, patch, folder.name)
            if not kind.fused_adapters:
                metal.runner._lora._fused = None
            for seed, name in enumerate(("one", "two")):
                made.weights[name] = adapter(made, name, seed)
                metal.runner._lora.install(1 + seed, made.weights[name])  # which finds the writing kernel to be right
            yield metal
        finally:
            mx.enable_compile()
            forget()


def adapter(made: Engine, digest: str, seed: int, rank: int = RANK) -> AdapterWeights:
    rng = np.random.default_rng(seed)
    tensors = {
        path: tuple(rng.standard_normal(size).astype(np.float32) for size in ((s.inputs, rank), (rank, s.outputs)))
        for path, s in made.built.linears.items()
        if not s.experts
    }
    return AdapterWeights(AdapterInfo(digest, rank, 1.0, "peft", (), 0, 0), tensors)


# --- steps ------------------------------------------------------------------------------------------------------------

Step = StepPlan | Callable[[Metal], None]


def tables(metal: Metal, *blocks: int) -> list[list[int]]:
    """Of each pool."""
    firsts = metal.runner._pool.firsts
    return [[first + block for block in blocks] for first in firsts]


def row(
    metal: Metal, start: int, tokens: Sequence[int], *, seat: int = 0, slot: int = 0, blocks: Sequence[int] = ()
) -> Row:
    blocks = blocks or range(1 + 10 * seat, 11 + 10 * seat)
    kind = RowKind.PROMPT if len(tokens) > 1 else RowKind.DECODE
    return Row(kind, seat, seat, slot, start, tuple(tokens), tables(metal, *blocks), True)


def plan(*rows: Row, **more: Any) -> StepPlan:
    seatings = tuple(Seating(r.seat, GREEDY, 0, 1, (0,)) for r in rows)
    return StepPlan(rows, seatings=seatings, **more)


def everywhere(metal: Metal, *blocks: int) -> tuple[int, ...]:
    return tuple(block for table in tables(metal, *blocks) for block in table)


def decode(metal: Metal, *slots: int) -> StepPlan:
    """Two rows that carry the tokens of the step before, of the base or of adapters."""
    first, second = slots or (0, 0)
    return plan(row(metal, 40, [CARRY], slot=first), row(metal, 21, [CARRY], seat=1, slot=second))


def decode_others(metal: Metal) -> StepPlan:
    """A row whose token comes from the host, as after a preemption: nothing else makes it follow the step before."""
    return plan(row(metal, 24, [3]))


def unlike(metal: Metal) -> StepPlan:
    """Rows of several kinds, which are parts of one step."""
    return plan(row(metal, 40, [CARRY]), row(metal, 0, range(20), seat=1))


def chunks(metal: Metal) -> StepPlan:
    """Chunks of two prompts that begin at different positions."""
    return plan(row(metal, 16, range(20)), row(metal, 3, range(20), seat=1))


def unsampled(metal: Metal) -> StepPlan:
    """A chunk of a prompt that goes on: no token is drawn behind it."""
    return plan(changed(row(metal, 16, range(20)), sample=False))


def scored(metal: Metal) -> StepPlan:
    """A chunk whose prompt's logprobs are wanted."""
    targets = tuple(range(1, 21))
    made = changed(row(metal, 16, range(20)), sample=False, targets=targets)
    seating = Seating(0, SamplingParams(max_tokens=1, prompt_logprobs=1), 0, 1, (0,))
    return StepPlan((made,), seatings=(seating,))


def drawn(metal: Metal) -> StepPlan:
    """Tokens drawn at random, with penalties and logprobs."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, frequency_penalty=0.5, logprobs=2)
    made = row(metal, 40, [CARRY])
    return StepPlan((made,), seatings=(Seating(0, params, 0, 1, (0, 1)),))


def beside(metal: Metal) -> StepPlan:
    """A prompt's tokens as rows of their own beside one that decodes."""
    return plan(row(metal, 40, [CARRY]), changed(row(metal, 8, range(6), seat=1), piggybacked=True))


def first_chunk(metal: Metal) -> StepPlan:
    """The beginning of a prompt, which sees nothing before itself."""
    return plan(row(metal, 0, range(32)))


def next_chunk(metal: Metal) -> StepPlan:
    """A chunk of one prompt behind others, long enough for attention without a mask (`runner.COMMON_OFFSET_TOKENS`)."""
    return plan(row(metal, 32, range(32)))


def few(metal: Metal) -> StepPlan:
    """A chunk so short that the kernels answer it."""
    return plan(row(metal, 16, range(5)))


def copy(metal: Metal) -> StepPlan:
    """A block copied, which a row reads at once."""
    copies = tuple(zip(everywhere(metal, 2), everywhere(metal, 3), strict=True))
    return plan(row(metal, 40, [CARRY]), copies=copies)


def load(metal: Metal) -> StepPlan:
    """A block from the drive, which a row reads at once."""
    pools = metal.engine.built.info.memory.pools
    loads = tuple(zip(everywhere(metal, 4), (bytes(p.block_bytes) for p in pools), strict=True))
    return plan(row(metal, 40, [CARRY]), loads=loads)


def save(metal: Metal) -> StepPlan:
    """A block on its way to the drive, which a row writes behind that."""
    return plan(row(metal, 40, [CARRY]), saves=everywhere(metal, 5, 6))


def fork(metal: Metal) -> StepPlan:
    """A second choice of a request: the last block is copied, and both go on in one step."""
    copies = tuple(zip(everywhere(metal, 6), everywhere(metal, 16), strict=True))
    other = row(metal, 41, [7], seat=1, blocks=[1, 2, 3, 4, 5, 16])
    return plan(row(metal, 41, [CARRY]), other, copies=copies)


def upload(metal: Metal) -> StepPlan:
    """An adapter into a slot that the rows use, and others of the step before have used."""
    return plan(row(metal, 40, [CARRY], slot=1), row(metal, 21, [CARRY], seat=1, slot=2), uploads=((1, "two"),))


def upload_for_one(metal: Metal) -> StepPlan:
    """As `upload`, where all rows use that slot."""
    return plan(row(metal, 40, [CARRY], slot=1), row(metal, 21, [CARRY], seat=1, slot=1), uploads=((1, "one"),))


def wider(metal: Metal) -> StepPlan:
    """An adapter of a higher rank than all before it: the arrays of all slots are made anew."""
    metal.engine.weights["wider"] = adapter(metal.engine, "wider", 7, rank=2 * RANK)
    return plan(row(metal, 40, [CARRY], slot=2), uploads=((2, "wider"),))


def publish(metal: Metal) -> None:
    """A trainer publishes its weights, which go into a slot as soon as they are wanted there (`upload`)."""
    trainer = TrainedAdapter.fresh(TrainerSpec("t", RANK, float(RANK)), metal.engine.built.linears)
    trainer.publish()
    served = trainer.served(metal.runner._lora.dtype)
    mx.async_eval(served)
    metal.runner._lora.uploads.keep("two", served)


KINDS: dict[str, Callable[[Metal], Step]] = {
    "decode": decode,
    "decode of others": decode_others,
    "decode under adapters": lambda metal: decode(metal, 1, 2),
    "decode under one adapter": lambda metal: decode(metal, 1, 1),
    "unlike rows": unlike,
    "chunks": chunks,
    "first chunk": first_chunk,
    "next chunk": next_chunk,
    "unsampled chunk": unsampled,
    "scored chunk": scored,
    "few tokens": few,
    "drawn": drawn,
    "beside": beside,
    "copy": copy,
    "load": load,
    "save": save,
    "fork": fork,
    "adapter upload": upload,
    "upload for one": upload_for_one,
    "adapter of a higher rank": wider,
    "learning's publish": lambda metal: publish,
}
"""Of steps, and of what may come between two of them."""
