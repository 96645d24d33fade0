"""Fused attention in the real engine: its kernels run on the CPU, and what is served is what mlx-lm says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import Store, Writing
from mlx_tandem.model.ops import delta_net, gated_delta, residual
from mlx_tandem.model.ops.attention.block import FusedBlock
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.attention.paged import PagedAttention
from mlx_tandem.model.ops.delta_net import DeltaNetInputs, GatedNorm
from mlx_tandem.model.ops.gated_delta import GatedDelta
from mlx_tandem.model.ops.residual import AddNorm, Norm
from mlx_tandem.model.step.pauses import Pacer, Pauses
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_families, tiny_models
from tests.engine.mlx_engine import Oracle, assert_agrees, make_engine
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

_rng = np.random.default_rng(5)
PROMPTS = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 70, 12)]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """The shim computes at once; while a step is traced there are no numbers."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(autouse=True)
def _writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write the pool."""
    monkeypatch.setattr(inplace, "writing", lambda: Writing(Store(shim.maker())))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long each rectangle was that a kernel answered."""
    seen: list[int] = []
    answer = PagedAttention.__call__

    def counted(self: PagedAttention, queries: mx.array, *rest: object, **options: object) -> mx.array:
        seen.append(queries.shape[2])
        return answer(self, queries, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedAttention, "__call__", counted)
    return seen


def ask() -> list[Request]:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3)
    return [Request(i, prompt, params) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    ("family", "kv_bits", "changes"),
    [
        ("llama", 16, {}),
        ("llama", 8, {}),
        ("llama", 16, tiny_families.WINDOW),  # tables begin with the window's first block
        ("qwen3", 16, {}),
        ("gemma", 16, {}),
    ],
)
def test_it_says_what_mlx_lm_says(
    tmp_path: Path,
    family: str,
    kv_bits: Literal[16, 8],
    changes: dict[str, Any],
    calls: list[int],
) -> None:
    """With all that a CUDA device has: kernels write the pool, numbers travel together, chunks need no mask."""
    # In few bits a number at the edge between two codes may get either of them.
    near: dict[str, float] = {"tolerance": 1e-2, "near_tie": 1e-2} if kv_bits == 8 else {}
    folder = tiny_models.make(tmp_path / "model", family, **changes)
    backends = [Fused("cuda", shim.maker())]
    engine = make_engine(folder, kv_bits=kv_bits, kv_group_size=16, attention_backend="cuda", backends=backends)
    engine.built.runner.rectangles.common_offsets = engine.built.runner.inputs.packed = True
    assert any(isinstance(m, FusedBlock) for m in engine.built.runner.module.modules()) == (family != "gemma")
    info = engine.built.info
    assert (info.attention_backend, info.attention_reason) == ("cuda", "asked for")
    calls.clear()
    oracle = Oracle.load(folder, kv_bits=kv_bits if kv_bits < 16 else 0, kv_group_size=16)
    assert_agrees(engine.run(ask()), oracle, "fused", **near)
    layers, steps = info.layers, 5  # the first token comes with the prompt
    assert calls.count(1) == layers * steps
    assert calls.count(8) == layers  # the prompt of 5
    assert_agrees(engine.run(ask(), chunks=5, stagger=1), oracle, "in chunks that are verified like guesses", **near)
    assert calls.count(8) > 2 * layers
    calls.clear()
    loop = engine.run(ask(), piggybacked=engine.built.step_limits.piggybacked, stagger=1)
    assert loop.piggybacked == 2
    assert set(calls) == {1, 8}  # the prompts of 70 and 12 tokens, each token a row of its own
    assert_agrees(loop, oracle, "prompts beside rows that decode", **near)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_layers_hand_on_tokens(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with few tokens a row have arrays [tokens, dim] between all layers, and prompts have three axes."""
    axes: list[tuple[int, int]] = []

    class Watched(AddNorm):
        def __call__(self, a: mx.array, b: mx.array, norm: Norm, shape: Sequence[int]) -> tuple[mx.array, mx.array]:
            axes.append((a.ndim, len(shape)))
            return super().__call__(a, b, norm, shape)

    rule = GatedDelta(shim.maker())
    kernels = delta_net.Kernels(DeltaNetInputs(shim.maker()), rule, GatedNorm(shim.maker()))
    monkeypatch.setattr(gated_delta, "kernel", lambda: rule)
    monkeypatch.setattr(delta_net.Kernels, "made", lambda *_: kernels)
    own = SimpleNamespace(available=lambda: ("cuda",), maker=lambda target: shim.maker())
    monkeypatch.setattr(delta_net, "dialect", own)
    changes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if family == "qwen3_5" else {}
    folder = tiny_models.make(tmp_path / "model", family, **changes)
    made = {"attention_backend": "cuda", "backends": [Fused("cuda", shim.maker())], "dtype": "float16"}
    apart = make_engine(folder, **made)
    monkeypatch.setattr(residual, "install", lambda model: residual.use(residual.fusable(model), Watched(shim.maker())))
    engine = make_engine(folder, **made)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
    asked = [Request(i, prompt, params) for i, prompt in enumerate((*PROMPTS, PROMPTS[0][:3]))]
    axes.clear()
    loops = [each.run(asked, chunks=9, stagger=1) for each in (apart, engine)]
    layers = len(engine.built.runner.module.layers)
    step = [*[(2, 2)] * (2 * layers - 1), (2, 3)]
    parts = [axes[i : i + len(step)] for i in range(0, len(axes), len(step))]
    assert step in parts
    assert all(part[-1][1] == 3 for part in parts), "the head takes rows"
    if family != "qwen3_5":  # in a step where prompts begin, only some of its layers accept [tokens, dim]
        assert all(part in (step, [(3, 3)] * len(step)) for part in parts)
    assert loops[0].tokens == loops[1].tokens
    for key, own in loops[0].logprobs.items():
        assert np.allclose([o.model for o in own], [o.model for o in loops[1].logprobs[key]], atol=2e-2)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_chunks_that_wait_on_the_way_say_what_mlx_lm_says(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with states beside them write these at the end of the chunk, and the next chunk goes on from there."""
    folder = tiny_models.make(tmp_path / "model", family, num_hidden_layers=4)
    engine = make_engine(folder, attention_backend="cuda", backends=[Fused("cuda", shim.maker())])
    runner = engine.built.runner
    runner.rectangles.common_offsets = runner.inputs.packed = True
    runner.pauses = Pauses(8)
    runner.one_at_a_time = False
    paused: list[int] = []
    arrive = Pacer.arrive
    monkeypatch.setattr(Pacer, "arrive", lambda self, x: (paused.append(self.pause.layers), arrive(self, x))[1])
    assert_agrees(engine.run(ask(), chunks=24, stagger=1), Oracle.load(folder), "with pauses")
    assert set(paused) == {1}


def test_a_layer_that_is_done_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """What all layers of a short chunk gather behind a long context is many times what a paused forward has at once."""
    layers, context, size = 24, 2048, 8
    made = {"num_hidden_layers": layers, "max_position_embeddings": 2 * context}
    folder = tiny_models.make(tmp_path / "model", "llama", **made)
    engine = make_engine(folder, num_blocks=context // size + 1, max_chunk_tokens=64)
    runner, info = engine.built.runner, engine.built.info
    runner.one_at_a_time, runner.pauses = False, Pauses(1024, positions=3 * context, layers=layers)
    row = Row(RowKind.PROMPT, 0, 0, 0, context - 16, (7,) * 16, [list(range(1, context // size + 1))], True)
    plan = StepPlan((row,), seatings=(Seating(0, SamplingParams(max_tokens=1, temperature=0.0), 0, 1, (0,)),))
    assert runner.launch_waits(plan)
    runner.wait(runner.launch(plan))  # constants are made once
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.wait(runner.launch(plan))
    assert mx.get_peak_memory() - before < context * info.kv_bytes_per_token / 2


def test_blocks_whose_output_is_gated_take_the_short_way(tmp_path: Path, calls: list[int]) -> None:
    """A part of each head is rotated, and the layers beside them keep states."""
    folder = tiny_models.make(tmp_path / "model", "qwen3_5")
    engine = make_engine(folder, attention_backend="cuda", backends=[Fused("cuda", shim.maker())])
    assert any(isinstance(m, FusedBlock) for m in engine.built.runner.module.modules())
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=3)
    asked = [Request(i, prompt, params) for i, prompt in enumerate(PROMPTS[::2])]
    calls.clear()
    assert_agrees(engine.run(asked), Oracle.load(folder), "gated")
    assert 1 in calls


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("a * c - b * s", "a * c + b * s"),
        ("(is_key ? new_keys : new_values)", "(is_key ? new_values : new_keys)"),  # which only prompts read
        ("kind == 1 ? k : v", "kind == 1 ? v : k"),  # which is for products that are computed apart, as with adapters
    ],
)
def test_blocks_run_their_own_code_where_the_short_way_is_wrong(
    tmp_path: Path, calls: list[int], right: str, wrong: str
) -> None:
    folder = tiny_models.make(tmp_path / "model", "llama")
    broken = Broken(shim.maker(), right, wrong)
    engine = make_engine(folder, attention_backend="cuda", backends=[Fused("cuda", broken)])
    assert not any(isinstance(m, FusedBlock) for m in engine.built.runner.module.modules())
    calls.clear()
    assert_agrees(engine.run(ask()), Oracle.load(folder), "blocks as they are")
    assert calls


def test_serving_goes_on_without_a_broken_kernel(tmp_path: Path, calls: list[int]) -> None:
    folder = tiny_models.make(tmp_path / "model", "llama")
    broken = Broken(shim.maker(), "k <= position", "k < position")
    engine = make_engine(folder, backends=[Fused("cuda", broken)])
    assert engine.built.info.attention_backend == "portable"
    assert engine.built.info.attention_reason.startswith("cuda is not used: wrong by ")
    calls.clear()
    assert_agrees(engine.run(ask()), Oracle.load(folder), "portable")
    assert not calls


@pytest.mark.parametrize("by_outputs", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "rwkv7"])
def test_states_that_kernels_write_say_what_mlx_lm_says(
    tmp_path: Path, family: str, by_outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inplace, "writing", lambda: Writing(Store(shim.maker()), by_outputs=by_outputs))
    folder = tiny_models.make(tmp_path / "model", family)
    engine = make_engine(folder, attention_backend="cuda", backends=[Fused("cuda", shim.maker())])
    engine.built.runner.rectangles.common_offsets = engine.built.runner.inputs.packed = True
    assert_agrees(engine.run(ask(), chunks=9, stagger=1), Oracle.load(folder), "states by kernels")
