"""The delta on the device: mixed batches against each adapter alone and against weights merged by hand."""

from __future__ import annotations

import io
import re
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import _get_classes

from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.config import LoraConfig
from mlx_tandem.model.ops.lora import routes
from mlx_tandem.model.ops.lora.kernel import GroupedDeltas
from mlx_tandem.model.ops.lora.routes import Layout
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.ops.products.few_rows import FewRows
from mlx_tandem.types import AdapterInfo

COMMON = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 128, "rope_theta": 1e4,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {},  # biases
    "phi3": {},  # fused q, k and v; fused gate and up
    "qwen3_moe": {**MOE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmoe": {**MOE, "intermediate_size": 64},  # flattens rows and positions before its router
}
KINDS = [(family, bits) for family in FAMILIES for bits in (0, 4)]
TOLERANCE = 1e-4


def build(family: str, bits: int = 0) -> Any:
    config = {**COMMON, **FAMILIES[family], "model_type": family}
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    g = np.random.default_rng(0)
    weights = []
    for k, v in tree_flatten(model.parameters()):
        matrix = mx.array(g.standard_normal(v.shape).astype(np.float32)) * v.shape[-1] ** -0.5
        weights.append((k, mx.ones_like(v) if v.ndim == 1 else matrix))
    model.load_weights(weights)
    if bits:
        # Not the router: choosing other experts for a rounding error would drown what is tested.
        nn.quantize(model, 64, bits, class_predicate=lambda p, m: hasattr(m, "to_quantized") and p[-5:] != ".gate")
    mx.eval(model.parameters())
    return model


def adapter(linears: dict[str, LinearShape], rank: int, seed: int, only: str = "") -> AdapterWeights:
    g = np.random.default_rng(seed)
    tensors = {}
    for path, s in linears.items():
        if re.search(only, path) and not path.endswith(".gate"):
            lead = (s.experts,) if s.experts else ()
            a = g.standard_normal((*lead, s.inputs, rank)) * s.inputs**-0.5
            b = g.standard_normal((*lead, rank, s.outputs)) * rank**-0.5
            tensors[path] = (a.astype(np.float32), 0.3 * b.astype(np.float32))
    return AdapterWeights(AdapterInfo(str(seed), rank, 1.0, "peft", (), 0, 0), tensors)


def merged(family: str, bits: int, weights: AdapterWeights) -> Any:
    """A model of its own with the adapter added to its (dequantised) weights."""
    model = build(family, bits)
    modules = dict(model.named_modules())
    for path, (a, b) in weights.tensors.items():
        module: Any = modules[path]
        w = module.weight
        if bits:
            w = mx.dequantize(w, module.scales, module.biases, module.group_size, module.bits)
        w = w + mx.array((a @ b).swapaxes(-1, -2))
        plain = nn.Linear(1, 1, bias=False) if w.ndim == 2 else SwitchLinear(1, 1, 1, bias=False)
        plain.weight = w
        if "bias" in module:
            plain.bias = module.bias
        parent, _, leaf = path.rpartition(".")
        setattr(modules[parent], leaf, plain)
    return model


def run(model: Any, state: LoraState, x: mx.array, slots: list[int], length: int = 1) -> mx.array:
    """A compiled step, as the runner's."""
    route = state.route(slots, length)

    def step(x: mx.array, arrays: list[mx.array], ids: list[mx.array]) -> mx.array:
        state.bind(arrays, ids[0] if ids else None, route.layout)
        out: mx.array = model(x)
        state.unbind()
        return out

    return mx.compile(step)(x, route.arrays, [] if route.ids is None else [mx.array(route.ids)])


def prompts(rows: int, length: int) -> mx.array:
    return mx.array(np.random.default_rng(rows * length).integers(0, 128, (rows, length)))


def far(a: mx.array, b: mx.array) -> float:
    difference = mx.abs(a - b).max().item()
    assert difference == difference, "NaN"
    return float(difference)


def installed(
    model: Any, slots: int = 4, kernels: GroupedDeltas | None = None
) -> tuple[LoraState, list[AdapterWeights]]:
    """Three adapters of different ranks and targets in slots 1, 2 and 4."""
    state = LoraState(model, LoraConfig(max_loras=slots), mx.float32, kernels)
    all_of_it = state.linears()
    made = [adapter(all_of_it, 4, 1), adapter(all_of_it, 12, 2, "q_proj|qkv|up"), adapter(all_of_it, 8, 3, "layers.1")]
    for slot, weights in zip((1, 2, 4), made, strict=True):
        state.install(slot, weights)
    return state, made


@pytest.mark.parametrize(("family", "bits"), KINDS)
def test_mixed_is_alone_is_merged(family: str, bits: int) -> None:
    model = build(family, bits)
    plain = {length: model(prompts(5, length)) for length in (1, 33)}
    state, made = installed(model)
    references = [merged(family, bits, weights) for weights in made]
    for length, before in plain.items():
        x = prompts(5, length)
        slots = [4, 0, 1, 2, 1]
        mixed = run(model, state, x, slots, length)
        for row, slot in enumerate(slots):
            alone = run(model, state, x[row : row + 1], [slot], length)[0]
            assert far(mixed[row], alone) < TOLERANCE
            want = references[(1, 2, 4).index(slot)](x[row : row + 1])[0] if slot else before[row]
            assert far(alone, want) < TOLERANCE, f"slot {slot}"
        assert far(mixed[2], before[2]) > 0.1  # it does do something
        same = run(model, state, x, [2] * 5, length)
        assert far(same[3], mixed[3]) < TOLERANCE
        assert mx.array_equal(run(model, state, x, [0] * 5), before)


@pytest.mark.parametrize("family", ["qwen3", "olmoe"])
@pytest.mark.parametrize("length", [1, 5])
def test_windows(family: str, length: int) -> None:
    model = build(family)
    state, _ = installed(model)
    for slots in ([0] * 3 + [1] * 9 + [2] * 17 + [4] * 3, ([1] * 8 + [4] * 8) * 2, [4] * 15 + [0] * 16):
        x = prompts(len(slots), length)
        assert state.route(slots).layout.kind == "windows"
        got = run(model, state, x, slots)
        for slot in set(slots):
            rows = mx.array([i for i, s in enumerate(slots) if s == slot])
            assert far(got[rows], run(model, state, x[rows], [slot] * rows.size)) < TOLERANCE


@given(st.lists(st.integers(0, 5), min_size=8, max_size=70))
@settings(max_examples=200)
def test_windows_cover_every_row(slots: list[int]) -> None:
    cut = routes.cut_windows(np.array(slots))
    if cut is not None:
        first, owner, back = cut
        assert len(first) == len(owner) <= len(slots) / 2
        assert first.min() >= 0 and first.max() + routes.WINDOW <= len(slots)
        for row, slot in enumerate(slots):
            window, within = divmod(int(back[row]), routes.WINDOW)
            assert owner[window] == slot and first[window] + within == row


def operations(step: Any, *arguments: Any) -> Counter[str]:
    out = step(*arguments)
    dot = io.StringIO()
    mx.export_to_dot(dot, out)
    return Counter(re.findall(r'\[label ?= ?"([A-Za-z]+)', dot.getvalue()))


@pytest.mark.parametrize(("family", "bits"), [("qwen3", 0), ("qwen3_moe", 4)])
def test_a_base_step_has_no_delta_operation(family: str, bits: int) -> None:
    model = build(family, bits)
    x = prompts(3, 2)
    untouched = operations(model, x)
    assert sum(untouched.values()) > 50
    state, _ = installed(model)

    def step(slots: list[int]) -> mx.array:
        route = state.route(slots)
        state.bind(route.arrays, None if route.ids is None else mx.array(route.ids), route.layout)
        out: mx.array = model(x)
        state.unbind()
        return out

    assert state.route([0, 0, 0]) == (Layout("base"), None, [])
    assert operations(step, [0, 0, 0]) == untouched
    dense = sum(1 for path in state.arrays()[::2] if path.ndim == 3)
    uniform, mixed = (operations(step, s) for s in ([2, 2, 2], [0, 1, 2]))
    assert uniform["AddMM"] - untouched["AddMM"] == dense
    assert mixed["GatherMM"] - untouched["GatherMM"] == len(state.arrays())
    if family == "qwen3":
        assert uniform["GatherMM"] == 0  # plain products


def test_products_are_told_which_steps_have_adapters() -> None:
    """In whatever order a step is bound and unbound."""
    model = build("qwen3")
    few = Told()
    state = LoraState(model, LoraConfig(max_loras=4), mx.float32, few=few)
    state.install(2, adapter(state.linears(), 4, 1))
    seen = []
    for slots in ([0, 0], [2, 2], [0, 0], [0, 2]):
        route = state.route(slots)
        state.bind(route.arrays, None if route.ids is None else mx.array(route.ids), route.layout)
        seen.append(few.adapted)
    state.unbind()
    assert [*seen, few.adapted] == [False, True, False, True, False]


class Told(FewRows):
    """Which of a step's kinds it was told of last."""

    def __init__(self) -> None:
        self.adapted = False

    def begin(self) -> None:
        self.adapted = True

    def end(self) -> None:
        self.adapted = False


def test_a_compiled_step_sees_what_is_installed_later() -> None:
    model = build("qwen3")
    state, _ = installed(model)
    x = prompts(2, 3)
    routes = {}
    for slots in ((1, 2), (1, 1)):
        layout = state.route(slots, 3).layout

        def step(x: mx.array, arrays: list[mx.array], ids: mx.array, layout: Layout = layout) -> mx.array:
            state.bind(arrays, ids, layout)
            out: mx.array = model(x)
            state.unbind()
            return out

        routes[slots] = (mx.compile(step), step)
    for weights in (None, adapter(state.linears(), 12, 9), adapter(state.linears(), 3, 10, "o_proj")):
        if weights is not None:
            assert not state.grows(weights)
            state.install(1, weights)
        for slots, (compiled, step) in routes.items():
            route = state.route(slots, 3)
            ids = mx.array(route.ids)
            got = compiled(x, route.arrays, ids)
            assert far(got, step(x, route.arrays, ids)) < TOLERANCE
            if weights is not None:
                want = merged("qwen3", 0, weights)(x[:1])
                assert far(got[:1], want) < TOLERANCE


class InPlace:
    """Writes slots where they lie, as the kernel on CUDA does."""

    keeps_arrays = True

    def write(self, arrays: list[mx.array], slot: int, contents: list[mx.array]) -> bool:
        for x, own in zip(arrays, contents, strict=True):
            np.asarray(x)[slot] = np.asarray(own)
        return True


def test_a_step_that_captures_the_arrays_reads_what_is_written_later() -> None:
    model = build("qwen3")
    state = LoraState(model, LoraConfig(max_loras=2, max_lora_rank=8, backend="gather"), mx.float32)
    state._writer = InPlace()  # type: ignore[assignment]
    x, slots = prompts(2, 3), [1, 2]
    state.install(2, adapter(state.linears(), 8, 5))
    route = state.route(slots, 3)
    assert route.arrays == []

    def step(x: mx.array, ids: mx.array) -> mx.array:
        state.bind(route.arrays, ids, route.layout)
        out: mx.array = model(x)
        state.unbind()
        return out

    compiled = mx.compile(step)
    compiled(x, mx.array(route.ids))
    for seed in (6, 7):
        weights = adapter(state.linears(), 8, seed)
        assert not state.grows(weights)
        state.install(1, weights)
        assert far(compiled(x, mx.array(route.ids))[0], merged("qwen3", 0, weights)(x[:1])[0]) < TOLERANCE


def test_growth_keeps_what_is_there() -> None:
    model = build("qwen3")
    state = LoraState(model, LoraConfig(max_loras=3, max_lora_rank=64), mx.float32)
    names = [k for k, _ in tree_flatten(model.parameters())]
    weights = model.layers[0].self_attn.q_proj.weight
    assert state.arrays() == [] and state.route([1, 2]).layout.kind == "base"
    steps = [  # (slot, rank, targets, rebuilt)
        (1, 4, "q_proj", True), (2, 8, "q_proj", False), (2, 3, "q_proj", False), (3, 8, "[qv]_proj", True),
        (1, 20, "q_proj", True), (3, 32, "q_proj", False), (2, 5, "", True), (2, 5, "o_proj", False),
    ]  # fmt: skip
    now: dict[int, AdapterWeights] = {}
    x = prompts(3, 4)
    for i, (slot, rank, only, rebuilt) in enumerate(steps):
        now[slot] = adapter(state.linears(), rank, 20 + i, only)
        assert state.grows(now[slot]) == rebuilt
        state.install(slot, now[slot])
        got = run(model, state, x, [1, 2, 3], 4)
        for s, installed_now in now.items():
            assert far(got[s - 1], merged("qwen3", 0, installed_now)(x[s - 1 : s])[0]) < TOLERANCE
    assert state.rank == 32 and {a.shape[-1] for a in state.arrays()[::2]} == {32}
    state.clear(2)
    assert far(run(model, state, x, [1, 2, 3], 4)[1], build("qwen3")(x[1:2])[0]) < TOLERANCE
    assert [k for k, _ in tree_flatten(model.parameters())] == names
    assert model.layers[0].self_attn.q_proj.weight is weights
    assert isinstance(model.layers[0].self_attn.q_proj, nn.Linear)
    assert sum(a.nbytes for a in state.arrays()) == state.nbytes


def test_limits() -> None:
    state = LoraState(build("qwen3"), LoraConfig(max_loras=2, max_lora_rank=8), mx.float32)
    for slot in (-1, 0, 3):
        with pytest.raises(ValueError):
            state.install(slot, adapter(state.linears(), 4, 1))
        with pytest.raises(ValueError):
            state.clear(slot)
    with pytest.raises(ValueError):
        state.install(1, adapter(state.linears(), 9, 1))


def test_what_can_be_adapted() -> None:
    dense, quantised = (LoraState(build("qwen3_moe", bits), LoraConfig(), mx.float32).linears() for bits in (0, 4))
    assert dense == quantised
    assert dense["model.layers.1.self_attn.k_proj"] == LinearShape(64, 64)
    assert dense["model.layers.0.mlp.switch_mlp.down_proj"] == LinearShape(64, 64, experts=8)
    assert dense["model.layers.0.mlp.gate"] == LinearShape(64, 8)
    assert not any("lm_head" in path or "embed" in path for path in dense)
    assert next(iter(dense)) == "model.layers.0.self_attn.q_proj"


def test_an_install_writes_in_place() -> None:
    model = build("qwen3")
    state = LoraState(model, LoraConfig(max_loras=64, max_lora_rank=64), mx.float32)
    everything = adapter(state.linears(), 64, 1)
    state.install(1, everything)
    x = prompts(2, 1)
    mx.eval(run(model, state, x, [1, 1]), run(model, state, x, [0, 1]))  # routes hold views
    stack, largest = state.nbytes, max(a.nbytes for a in state.arrays())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    state.install(2, everything)
    assert mx.get_peak_memory() - before < largest / 2 < stack / 10  # the adapter itself, and of no stack a copy
    assert state.nbytes == stack


def test_half_precision_model() -> None:
    model = build("qwen3", 4)
    model.set_dtype(mx.bfloat16)
    state = LoraState(model, LoraConfig(max_loras=2), mx.bfloat16)
    state.install(1, adapter(state.linears(), 8, 1))
    x = prompts(3, 2)
    mixed, alone = run(model, state, x, [0, 1, 0], 2), run(model, state, x, [1, 1, 1], 2)
    assert mixed.dtype == mx.bfloat16
    assert far(mixed[1].astype(mx.float32), alone[1].astype(mx.float32)) < 0.25
    if mx.default_device().type == mx.DeviceType.cpu:
        assert state.arrays()[0].dtype == mx.float32  # the only type of gather_mm there


def test_a_step_of_one_adapter_reads_its_slot_where_it_is() -> None:
    """A copy of every array for each number of rows would be as large as many adapters."""
    state, _ = installed(build("qwen3"))
    before = mx.get_active_memory()
    routes = [state.route([2] * rows) for rows in range(1, 9)]
    assert all(route.layout.kind == "uniform" for route in routes)
    assert mx.get_active_memory() - before < sum(x[2].nbytes for x in state.arrays())
