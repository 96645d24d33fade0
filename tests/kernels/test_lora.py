"""Fused kernels for adapters on the CPU: against plain products, any rows, slots, ranks and widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_tandem.config import LoraConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.checking import Choice
from mlx_tandem.model.kernels.dialect import Kernel, Make, Source
from mlx_tandem.model.kernels.inplace import Store, Writing
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.lora.choice import UNLIMITED, choose
from mlx_tandem.model.ops.lora.kernel import GroupedDeltas, LoraKernels
from mlx_tandem.model.ops.lora.routes import TILE, cut_tiles
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.ops.products.merged import joined_product, merge
from mlx_tandem.model.targets import find_groups
from tests.engine.mlx_engine import assert_agrees
from tests.engine.test_equivalence import ask, serve_adapters
from tests.engine.test_lora import TOLERANCE, adapter, build, far, installed, merged, prompts, run
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

EXACT = {mx.float32: 5e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3}  # of the largest number
Shapes = st.sampled_from([(64, (8,)), (520, (16, 520, 40)), (1032, (1032,)), (8, (600, 8, 8))])


@pytest.fixture(scope="module")
def make() -> Make:
    return shim.maker()


class Work:
    """Random arrays; `slots` in any order, `length` tokens a row, one rank of the arrays and one of each slot."""

    def __init__(
        self,
        slots: Sequence[int],
        length: int,
        inputs: int,
        outputs: Sequence[int],
        ranks: Sequence[int],
        dtype: mx.Dtype,
    ):
        rng = np.random.default_rng(len(slots) * inputs)
        self.slots, self.length = np.array(slots), length
        wide = 8
        while wide < max(ranks):
            wide *= 2

        def numbers(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        a = [numbers(len(ranks) + 1, inputs, wide) * inputs**-0.5 for _ in outputs]
        b = [numbers(len(ranks) + 1, wide, n) * wide**-0.5 for n in outputs]
        for slot, rank in enumerate([0, *ranks]):  # what lies behind a slot's own rank is zero
            for one in a:
                one[slot, :, rank:] = 0
            for one in b:
                one[slot, rank:] = 0
        self.x = mx.array(numbers(len(slots), length, inputs)).astype(dtype)
        self.a, self.b = ([mx.array(one).astype(dtype) for one in side] for side in (a, b))
        self.y = [mx.array(numbers(len(slots), length, n)).astype(dtype) for n in outputs]

    def tiles(self) -> mx.array:
        return mx.array(cut_tiles(self.slots, self.length), mx.int32)

    def add(self, make: Make) -> list[mx.array]:
        return LoraKernels(make).add(self.x, self.tiles(), self.a, self.b, self.y)

    def error(self, got: Sequence[mx.array]) -> float:
        worst, which = 0.0, mx.array(self.slots)
        for m, one in enumerate(got):
            x, a, b, y, z = (array.astype(mx.float32) for array in (self.x, self.a[m], self.b[m], self.y[m], one))
            want = y + (x @ a[which]) @ b[which]
            assert one.dtype == self.x.dtype and one.shape == want.shape
            worst = max(worst, far(z, want) / mx.abs(want).max().item())
        return worst


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    Shapes,
    st.lists(st.sampled_from([1, 4, 8, 12, 16, 33, 96]), min_size=3, max_size=3),
    st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
@settings(max_examples=25)
def test_any_rows_slots_ranks_and_widths(
    make: Make, slots: list[int], length: int, shape: Any, ranks: list[int], dtype: mx.Dtype
) -> None:
    work = Work(slots, length, *shape, ranks, dtype)
    assert work.error(work.add(make)) < EXACT[dtype]


def test_more_inputs_than_sums_are_kept_for(make: Make) -> None:
    work = Work([1, 2], 1, 12296, (8,), [16, 4], mx.float32)
    assert work.error(work.add(make)) < EXACT[mx.float32]


def test_the_order_of_threads_does_not_matter(make: Make) -> None:
    work = Work([0, 1, 1, 2], 3, 1032, (264, 8), [16, 7], mx.float32)
    for order in shim.ORDERS:
        for got, want in zip(work.add(shim.maker(order)), work.add(make), strict=True):
            assert mx.array_equal(got, want)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_gets_the_same_bits_in_any_company(make: Make, dtype: mx.Dtype) -> None:
    slots = [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3]
    work = Work(slots, 1, 1032, (264, 8), [16, 16, 12], dtype)
    together = work.add(make)
    for row in (0, 1, 4, 9, 12):
        x, y = work.x[row : row + 1], [one[row : row + 1] for one in work.y]
        tiles = mx.array(cut_tiles(np.array(slots[row : row + 1]), 1), mx.int32)
        alone = LoraKernels(make).add(x, tiles, work.a, work.b, y)
        for m, z in enumerate(together):
            assert mx.array_equal(alone[m], z[row : row + 1])


def test_own_outputs_may_lie_side_by_side(make: Make) -> None:
    """With somebody else's between them."""
    work, kernels = Work([0, 1, 2], 2, 72, (264, 8, 16), [8, 8], mx.bfloat16), LoraKernels(make)
    want = work.add(make)
    other = mx.random.normal((3, 2, 24)).astype(mx.bfloat16)
    whole = mx.concatenate([work.y[0], other, *work.y[1:]], -1)
    places = (0, 288, 296, 312)
    given = work.x, work.tiles(), work.a, work.b
    for one, own in zip(kernels.add(*given, [whole], places), want, strict=True):
        assert mx.array_equal(one, own)
    whole = mx.concatenate(work.y, -1)
    for one, own in zip(kernels.add(*given, [whole]), want, strict=True):
        assert mx.array_equal(one, own)


@pytest.mark.parametrize("outputs", [(264, 8, 16), (16, 520), (40,)])
def test_the_sums_of_all_members_may_be_one_array(make: Make, outputs: tuple[int, ...]) -> None:
    """They have the bits of the sums that are an array each."""
    work = Work([0, 1, 1, 2], 3, 1032, outputs, [16, 7], mx.bfloat16)
    want = mx.concatenate(work.add(make), -1)
    for order in shim.ORDERS:
        kernels = LoraKernels(shim.maker(order))
        got = kernels.add_joined(work.x, work.tiles(), work.a, work.b, mx.concatenate(work.y, -1))
        assert mx.array_equal(got, want)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=70), st.integers(1, 20))
@settings(max_examples=200)
def test_tiles_cover_every_token_once(slots: list[int], length: int) -> None:
    tiles = cut_tiles(np.array(slots), length)
    covered = [(token, slot) for first, count, slot in tiles.tolist() for token in range(first, first + count)]
    assert sorted(covered) == [(row * length + i, slot) for row, slot in enumerate(slots) for i in range(length)]
    assert tiles[:, 1].max() <= TILE
    least = -(-len(slots) * length // TILE)
    assert np.log2(len(tiles) / least) % 1 == 0  # few numbers of tiles, so that few steps are traced
    assert (tiles[:, 1] > 0).sum() * 2 > len(tiles) or len(tiles) == least


# --- in models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """The shim computes at once; while a step is traced there are no numbers."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def fused(model: Any, make: Make) -> GroupedDeltas:
    groups = find_groups(model)
    return GroupedDeltas(LoraKernels(make), groups, same=UNLIMITED, mixed=UNLIMITED)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("family", "bits"), [("qwen3", 0), ("qwen2", 4), ("phi3", 0), ("qwen3_moe", 0), ("olmoe", 4)])
def test_fused_is_merged(make: Make, family: str, bits: int) -> None:
    model = build(family, bits)
    kernels = fused(model, make)
    state, made = installed(model, kernels=kernels)
    assert state.backend == "fused"
    slots = [0, 1, 1, 2, 4]
    references = {0: build(family, bits)}
    references |= {slot: merged(family, bits, weights) for slot, weights in zip((1, 2, 4), made, strict=True)}
    for length in (3, 5):
        x = prompts(5, length)
        got = run(model, state, x, slots, length)
        for row, slot in enumerate(slots):
            assert far(got[row], references[slot](x[row : row + 1])[0]) < TOLERANCE, f"slot {slot}"
        same = run(model, state, x, [2] * 5, length)
        assert far(same[3], got[3]) < TOLERANCE
    kind = "uniform" if family in ("qwen3_moe", "olmoe") else "tiles"
    assert state.route([2] * 5, 5).layout.kind == kind
    assert [state.route(slots, length).layout.tokens for length in (3, 5)] == [15, 25]


class Counting:
    def __init__(self, make: Make):
        self.calls: list[str] = []
        self._make = make

    def __call__(self, source: Source) -> Kernel:
        kernel = self._make(source)

        def call(*given: Any) -> list[mx.array]:
            self.calls.append(source.name)
            return kernel(*given)

        return call


@pytest.mark.usefixtures("uncompiled")
def test_two_kernels_for_each_input(make: Make) -> None:
    model, counting = build("qwen3"), Counting(make)
    state = LoraState(model, LoraConfig(max_loras=2), mx.float32, fused(model, counting))
    state.install(1, adapter(state.linears(), 8, 1, "[qv]_proj"))
    run(model, state, prompts(3, 1), [0, 1, 1])
    assert counting.calls == ["lora_shrink_2", "lora_expand_2_apart"] * 2  # a layer; k has no adapter
    counting.calls.clear()
    state.install(2, adapter(state.linears(), 8, 2))
    run(model, state, prompts(3, 1), [1, 1, 1])
    assert counting.calls == [name for n in (3, 1, 2, 1) for name in (f"lora_shrink_{n}", f"lora_expand_{n}_apart")] * 2
    counting.calls.clear()
    assert mx.array_equal(run(model, state, prompts(3, 1), [0, 0, 0]), build("qwen3")(prompts(3, 1)))
    assert counting.calls == []


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("only", "joined"), [("", [3, 2]), ("[qv]_proj|up", [2, 1])])
@pytest.mark.parametrize("bits", [0, 4])
def test_sums_are_added_to_one_product_of_all_members(make: Make, bits: int, only: str, joined: list[int]) -> None:
    model, counting = build("qwen3", bits), Counting(make)
    merge(find_groups(model))
    state = LoraState(model, LoraConfig(max_loras=1), mx.float32, fused(model, counting))
    weights = adapter(state.linears(), 8, 1, only)
    state.install(1, weights)
    x = prompts(3, 2)
    got = run(model, state, x, [0, 1, 1], 2)
    assert [name for name in counting.calls if "joined" in name] == [f"lora_expand_{n}_joined" for n in joined] * 2
    assert far(got[1:], merged("qwen3", bits, weights)(x[1:])) < TOLERANCE
    assert far(got[:1], build("qwen3", bits)(x[:1])) < TOLERANCE


def joined_and_apart(
    model: Any, state: LoraState, linears: Sequence[nn.Module], x: mx.array
) -> tuple[mx.array | None, mx.array]:
    """Return the joined product of merged linears for three rows with adapters, and the linears' own outputs."""
    route = state.route([0, 1, 1], x.shape[1])
    state.bind(route.arrays, mx.array(route.ids), route.layout)
    joined = joined_product(linears, x)
    apart = mx.concatenate([linear(x) for linear in linears], -1)
    state.unbind()
    return joined, apart


@pytest.mark.parametrize("bits", [0, 4])
def test_all_members_of_a_merged_linear_give_one_array(make: Make, bits: int) -> None:
    """It has the bits of their own outputs."""
    model, counting = build("qwen3", bits), Counting(make)
    merge(find_groups(model))
    state = LoraState(model, LoraConfig(max_loras=1), mx.float32, fused(model, counting))
    state.install(1, adapter(state.linears(), 8, 1))
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    groups: list[list[nn.Module]] = [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [mlp.gate_proj, mlp.up_proj],
    ]
    for linears in groups:
        counting.calls.clear()
        joined, apart = joined_and_apart(model, state, linears, mx.random.normal((3, 2, 64)))
        n = len(linears)
        forms = [("shrink", ""), ("expand", "_whole"), ("shrink", ""), ("expand", "_joined")]
        assert counting.calls == [f"lora_{name}_{n}{form}" for name, form in forms]
        assert joined is not None and mx.array_equal(joined, apart)
        base = joined_product(linears, x := mx.random.normal((3, 2, 64)))
        assert base is not None and mx.array_equal(base, mx.concatenate([linear(x) for linear in linears], -1))


def test_there_is_no_joined_product_where_the_kernels_do_not_compute_all_members(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build("qwen3"), mx.random.normal((3, 1, 64))
    groups, attention = find_groups(model), model.layers[0].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert joined_product(linears, x) is None, "they are not merged"
    merge(groups)
    state = LoraState(model, LoraConfig(max_loras=2), mx.float32, fused(model, make))
    state.install(1, adapter(state.linears(), 8, 1, "[qv]_proj"))
    assert joined_and_apart(model, state, linears, x)[0] is None, "one has no adapter"
    state.install(2, adapter(state.linears(), 8, 2))
    assert joined_and_apart(model, state, linears, x)[0] is not None
    assert joined_and_apart(model, state, linears[:2], x)[0] is None, "others were merged"
    other, _ = joined_and_apart(model, state, linears, x.astype(mx.bfloat16))
    assert other is None, "the adapters have another type"
    route = state.route([0, 1, 1])
    state.bind(route.arrays, mx.array(route.ids), route.layout)
    assert joined_product(linears, x[:2]) is None, "the tiles have other tokens"
    with state.narrowed(mx.array([0, 1])):
        assert joined_product(linears, x[:2]) is None, "there are no tiles"
    state.unbind()
    monkeypatch.setattr("mlx_tandem.model.ops.products.merged.Merged.joins", lambda self, x: False)
    assert joined_and_apart(model, state, linears, x)[0] is None, "apart they are faster"


def test_members_called_otherwise_than_at_start_are_right(make: Make) -> None:
    model, counting = build("qwen3"), Counting(make)
    state = LoraState(model, LoraConfig(max_loras=1), mx.float32, fused(model, counting))
    state.install(1, adapter(state.linears(), 8, 1))
    attention = model.layers[0].self_attn
    x, other, many = (mx.random.normal((2, length, 64)) for length in (1, 1, 3))
    route = state.route([0, 1])

    def call(*calls: tuple[Any, mx.array]) -> list[mx.array]:
        state.bind(route.arrays, mx.array(route.ids), route.layout)
        out = [linear(given) for linear, given in calls]
        state.unbind()
        return out

    calls = [(attention.q_proj, x), (attention.k_proj, other), (attention.q_proj, other), (attention.v_proj, many)]
    got = call(*calls)
    assert counting.calls[::2] == ["lora_shrink_3", "lora_shrink_1", "lora_shrink_3"]  # and plain products for many
    for one, own in zip(got, calls, strict=True):
        assert far(one, call(own)[0]) < TOLERANCE
        linear, given = own
        delta = one - linear.plain(given)
        assert far(delta[0], mx.zeros_like(delta[0])) < TOLERANCE < mx.abs(delta[1]).max().item() / 10


@pytest.mark.usefixtures("uncompiled")
def test_the_engine_serves_with_them(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forced(model: nn.Module, config: LoraConfig, dtype: mx.Dtype) -> Choice:
        return choose(model, replace(config, backend="fused"), dtype, [make])

    monkeypatch.setattr("mlx_tandem.model.ops.lora.choice.choose", forced)
    served = serve_adapters(tmp_path, bits=None, family="llama", max_loras=4)
    info = served.engine.built.info
    assert (info.lora_backend, info.lora_reason) == ("fused", "asked for")
    loop = served.engine.run([ask(i, name, max_tokens=4) for i, name in enumerate([*served.names, None])])
    assert_agrees(loop, served.oracles, "fused kernels")


@pytest.mark.usefixtures("uncompiled")
def test_attention_blocks_read_the_sums_of_all_members_as_one_array(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers have the bits that they have if each linear's sums are an array."""
    monkeypatch.setattr(inplace, "writing", lambda: Writing(Store(shim.maker())))
    counting = Counting(make)

    def forced(model: nn.Module, config: LoraConfig, dtype: mx.Dtype) -> Choice:
        return choose(model, replace(config, backend="fused"), dtype, [counting])

    monkeypatch.setattr("mlx_tandem.model.ops.lora.choice.choose", forced)
    options: dict[str, Any] = {"attention_backend": "cuda", "backends": [Fused("cuda", make)]}
    served = serve_adapters(tmp_path, bits=None, family="llama", max_loras=4, **options)
    asked = [ask(i, name, max_tokens=4) for i, name in enumerate([*served.names, None])]
    counting.calls.clear()
    loop = served.engine.run(asked)
    assert "lora_expand_3_whole" in counting.calls
    assert_agrees(loop, served.oracles, "joined sums")
    monkeypatch.setattr(GroupedDeltas, "joined", lambda *args: None)
    counting.calls.clear()
    apart = served.engine.run(asked)
    assert "lora_expand_3_joined" in counting.calls and "lora_expand_3_whole" not in counting.calls
    assert (apart.tokens, apart.logprobs) == (loop.tokens, loop.logprobs)


# --- the choice at start --------------------------------------------------------------------------------------------


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(1032, 24, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.down(mx.zeros((*tokens.shape, 1032)))


FAULTS = {
    "a row too few": ("if (i < count) {", "if (i + 1 < count) {"),
    "another slot": ("(size_t)slot * K * R", "(size_t)(slot - 1) * K * R"),
    "no sum over the inputs' parts": ("s < parts", "s < 1"),
    "does not compile": ("BARRIER();", "BARRIER(;"),
}


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 24, bias=False), nn.Linear(64, 16, bias=False)

    def __call__(self, tokens: mx.array) -> list[mx.array]:
        x = mx.zeros((*tokens.shape, 64))
        return [self.gate_proj(x), self.up_proj(x)]


FORMS = {"whole": ("z + before", "z"), "joined": ("Y_STRIDE(m) (places[2])", "Y_STRIDE(m) (N + 8)")}
"""A fault of each form in which only merged linears are computed."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_merged", [False, True])
def test_forms_of_merged_linears_are_checked_at_start(make: Make, is_merged: bool, form: str) -> None:
    model, wrong = TwoLinears(), Broken(make, *FORMS[form])
    if is_merged:
        assert merge(find_groups(model))
    reason = choose(model, LoraConfig(), mx.float32, [wrong]).reason
    assert ("wrong" in reason) == is_merged


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("bits", [0, 4])
def test_the_kernels_that_serve_are_the_ones_that_are_checked_at_start(make: Make, bits: int) -> None:
    """Whichever linears adapters change, and with few tokens and many, for which packed linears are faster apart."""
    used: set[str] = set()
    for only in ("", "[qv]_proj|gate", "q_proj|down", "[qk]_proj|up"):
        model, counting = build("qwen3", bits), Counting(make)
        for whole in merge(find_groups(model)):
            for member in whole.members:
                own: Any = member
                own._dequantise_from = 8
        kernels = choose(model, LoraConfig(backend="fused"), mx.float32, [counting]).chosen
        checked = set(counting.calls)
        counting.calls.clear()
        state = LoraState(model, LoraConfig(max_loras=1), mx.float32, kernels)
        state.install(1, adapter(state.linears(), 16, 1, only))
        for length in (1, 4):
            run(model, state, prompts(3, length), [0, 1, 1], length)
        used |= set(counting.calls)
        assert used <= checked
    assert {name for name in checked - used if not name.endswith("_whole")} == set(), "only blocks ask for the whole"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_rejected_at_start(make: Make, fault: str) -> None:
    model, wrong = OneLinear(), Broken(make, *FAULTS[fault])
    choice = choose(model, LoraConfig(), mx.float32, [wrong])
    assert choice.chosen is None and choice.reason.startswith("fused kernels are not used: ")
    with pytest.raises(ModelError):
        choose(model, LoraConfig(backend="fused"), mx.float32, [wrong])


def test_right_kernels_are_taken_when_asked_for_or_faster(make: Make) -> None:
    model = OneLinear()
    asked = choose(model, LoraConfig(backend="fused"), mx.float32, [make]).chosen
    assert asked is not None and asked.same == asked.mixed == UNLIMITED
    slow = choose(model, LoraConfig(), mx.float32, [make])
    assert slow.chosen is None and "slower" in slow.reason  # as the shim is
    for backend in ("gather", "windows"):
        assert choose(model, LoraConfig(backend=backend), mx.float32, [make]).chosen is None  # type: ignore[arg-type]
    with pytest.raises(ModelError):
        choose(model, LoraConfig(backend="fused"), mx.float32, [])


def test_kernels_are_taken_as_far_as_they_are_faster(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(kernels: Any, shape: Any, forms: Any, dtype: Any, tokens: int, slots: int) -> tuple[float, float]:
        return tokens, 20 if slots == 1 else 100

    monkeypatch.setattr("mlx_tandem.model.ops.lora.choice._times", times)
    model = OneLinear()
    choice = choose(model, LoraConfig(), mx.float32, [make])
    assert choice.chosen is not None and (choice.chosen.same, choice.chosen.mixed) == (16, 64)
    assert choice.reason == "faster, for one adapter up to 16 tokens a step, for several up to 64 tokens"
    state = LoraState(model, LoraConfig(max_loras=2), mx.float32, choice.chosen)
    state.install(1, adapter(state.linears(), 8, 1))
    kinds = [state.route(*row).layout.kind for row in (([1] * 4, 4), ([1] * 4, 5), ([0, 1], 32), ([0, 1], 33))]
    assert kinds == ["tiles", "uniform", "tiles", "rows"]
    monkeypatch.setattr("mlx_tandem.model.ops.lora.choice._times", lambda *of: (1.0, 2.0))
    everything = choose(model, LoraConfig(), mx.float32, [make])
    assert everything.chosen is not None and everything.chosen.same == UNLIMITED
    assert "any number of tokens" in everything.reason
