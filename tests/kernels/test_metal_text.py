"""Every kernel as Metal would compile it, on a machine without Metal.

Its text is checked by clang against declarations of Metal's standard library, its size against what Apple's GPUs have.
That it computes what it should is tested elsewhere.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.model.cache.kvformat import LayerShape, RowFormat
from mlx_tandem.model.cache.pools import KVArrays
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.dialect import Source
from mlx_tandem.model.kernels.inplace import Store
from mlx_tandem.model.ops.attention.division import start
from mlx_tandem.model.ops.attention.paged import EVERYTHING, PagedAttention, unreadable_rows
from mlx_tandem.model.ops.attention.rotary import Norms, Rotary
from mlx_tandem.model.ops.delta_net import DeltaNetInputs, GatedNorm, Mixer, Product
from mlx_tandem.model.ops.gated_delta import GatedDelta, RuleInputs
from mlx_tandem.model.ops.lora.kernel import MOST_MEMBERS, LoraKernels
from mlx_tandem.model.ops.sampling.draw import GumbelMax, Limits, Masks, Noise, TruncatedDraw
from tests.kernels.metal.compiler import MOST_BUFFERS, problems
from tests.kernels.metal.text import Call, Recorder, call_of

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
BLOCK = 16
SAMPLED = 5
"""One form of a kernel in so many is compiled. The compiled forms have each value of each choice several times."""


def attention(recorder: Recorder) -> None:
    """Each type, head size, group, number of bits, one query and several, with and without what is optional."""
    sizes = ((64, 1), (80, 2), (128, 4), (256, 8))
    forms = list(product(FLOATS, sizes, (0, 8, 4), (1, 5), (False, True), (False, True)))
    for dtype, (dim, group), bits, length, windowed, weighed in forms[::SAMPLED]:
        form = RowFormat(2, dim, dtype, bits, 32)
        if unreadable_rows(form):
            continue
        pool = KVArrays([LayerShape(form, form)], 8, BLOCK).layers[0]
        sinks = mx.zeros((2 * group,), dtype) if weighed else None
        for splits in (1, 2):
            PagedAttention(recorder.make, form, BLOCK, start("metal", form))(
                mx.zeros((3, 2 * group, length, dim), dtype),
                pool,
                mx.zeros((3, 4), mx.int32),
                mx.zeros((3,), mx.int32),
                0.1,
                window=20 if windowed else EVERYTHING,
                sinks=sinks,
                cap=30.0 if weighed else 0.0,
                splits=splits,
            )


def rotary(recorder: Recorder) -> None:
    """Also where a part of a head is rotated, and the queries' product has gates."""
    forms = list(product(FLOATS, (64, 80, 128), (0, 8, 4), (False, True), (False, True), (False, True), (False, True)))
    for dtype, dim, bits, joined, normed, fetched, gated in forms[::SAMPLED]:
        form, half = RowFormat(2, dim, dtype, bits, 32), 8 if gated else dim // 2
        if bits and unreadable_rows(form):
            continue
        heads = 8 if gated else 4  # of the queries, with their gates
        parts = [mx.zeros((3, 2, n * dim), dtype) for n in ((heads + 4,) if joined else (heads, 2, 2))]
        Rotary(recorder.make, form, BLOCK)(
            parts,
            mx.zeros((2, 3, 2, half)),
            mx.zeros((3, 2), mx.int32),
            KVArrays([LayerShape(form, form)], 8, BLOCK).layers[0],
            norms=Norms(mx.zeros((2, dim), dtype), 1e-5) if normed else None,
            fetched=fetched,
            gated=gated,
        )


def lora(recorder: Recorder) -> None:
    """Every number of members, in all forms of their outputs."""
    for dtype, members, rank in product(FLOATS, (1, 2, MOST_MEMBERS), (8, 16)):
        kernels = LoraKernels(recorder.make)
        a = [mx.zeros((3, 64, rank), dtype) for _ in range(members)]
        b = [mx.zeros((3, rank, 40), dtype) for _ in range(members)]
        x, tiles = mx.zeros((6, 64), dtype), mx.zeros((4, 3), mx.int32)
        kernels.add(x, tiles, a, b, [mx.zeros((6, 40), dtype) for _ in range(members)])
        whole = mx.zeros((6, 40 * members), dtype)
        kernels.add(x, tiles, a, b, [whole], tuple(range(0, 40 * members + 1, 40)))
        kernels.add_joined(x, tiles, a, b, whole)


def sampling(recorder: Recorder) -> None:
    kernels, truncated = GumbelMax(recorder.make), TruncatedDraw(recorder.make)
    noise = Noise(mx.zeros((5, 2), mx.uint32), mx.zeros((5,), mx.int32), mx.zeros((5, 1)))
    masks = Masks(mx.zeros((5,), mx.int32), mx.zeros((257, 128), mx.uint32))
    for dtype in FLOATS:
        for how in ((None, None), (noise, None), (noise, masks)):
            kernels(mx.zeros((5, 4096), dtype), *how)
        for own in (None, masks):
            limits = Limits(mx.zeros((5, 1)), mx.zeros((5, 1), mx.int32), mx.zeros((5, 1)))
            truncated(mx.zeros((5, 4096), dtype), noise, limits, own)


def store(recorder: Recorder) -> None:
    for dtype in (*FLOATS, mx.uint32, mx.uint8):
        Store(recorder.make)(mx.zeros((40, 64), dtype), mx.zeros((12,), mx.int32), mx.zeros((12, 64), dtype))


def recurrent(recorder: Recorder) -> None:
    """Layers with and without a share of the state for each column; products apart, and as parts of one array."""
    rule, inputs_of, norm = GatedDelta(recorder.make), DeltaNetInputs(recorder.make), GatedNorm(recorder.make)
    rows, heads, lines = 3, 4, mx.zeros((3,), mx.int32)
    for dtype, dim, by_column, length in product(FLOATS, (32, 128), (False, True), (1, 5)):
        keys, values = (mx.zeros((rows, length, n, dim), dtype) for n in (2, heads))
        decay = mx.zeros((rows, length, heads, *([dim] if by_column else [])))
        given = RuleInputs(keys, keys, values, decay, mx.zeros((rows, length, heads), dtype))
        rule(given, mx.zeros((rows, heads, dim, dim)))
        rule.in_place(given, mx.zeros((9, heads * dim * dim)), lines, lines)
    for dtype, dim, taps, merged in product(FLOATS, (32, 128), (2, 4), (False, True)):
        channels = (2 * 2 + heads) * dim
        few = mx.zeros((heads,), dtype)
        mixer = Mixer(
            mx.zeros((channels, taps, 1), dtype), mx.zeros((heads,)), few, mx.zeros((dim,), dtype), 1e-6, 2, heads, dim
        )
        whole = mx.zeros((rows, 2, channels + 2 * heads + heads * dim), dtype)
        ends = channels, channels + heads, channels + 2 * heads
        parts = [Product(whole, at) for at in (0, *ends)]
        if not merged:
            parts = [Product(mx.zeros((rows, 2, n), dtype)) for n in (channels, heads, heads, heads * dim)]
        qkv, a, b, z = parts
        inputs_of(mixer, (qkv, a, b), mx.zeros((9, (taps - 1) * channels), dtype), lines, lines)
        norm(mixer, mx.zeros((rows, 2, heads, dim), dtype), z)


KERNELS = (attention, rotary, lora, sampling, store, recurrent)


@cache
def first_words() -> set[str]:
    """Return the first words of the names of all kernels whose texts are checked here."""
    recorder = Recorder()
    for kernels in KERNELS:
        kernels(recorder)
    return {call.name.partition("_")[0] for call in recorder.calls.values()}


@pytest.mark.programs
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_form_compiles_and_fits(kernels: Any) -> None:
    recorder = Recorder()
    kernels(recorder)
    assert recorder.calls
    found = {call.name: issues for call in recorder.calls.values() if (issues := problems(call))}
    assert not found


def test_the_members_of_one_call_are_as_many_as_metal_has_buffers_for() -> None:
    recorder = Recorder()
    lora(recorder)
    assert max(call.buffers for call in recorder.calls.values()) <= MOST_BUFFERS


def planted(body: str, functions: str = "", threads: int = 64, inputs: int = 1) -> list[str]:
    names = [f"x{i}" for i in range(inputs)]
    arrays = [mx.zeros((64,)) for _ in names]
    source = Source("planted", names, ["y"], body, functions)
    return problems(call_of(source, arrays, {"T": mx.float16}, threads, [((64,), mx.float32)]))


WELL = "SHARED(float, s, 64); s[THREAD] = x0[THREAD]; BARRIER(); y[THREAD] = float(T(s[63 - THREAD]));"


def test_what_is_right_is_taken() -> None:
    assert planted(WELL) == []


@pytest.mark.parametrize(
    ("mistake", "options", "said"),
    [
        ("auto p = (thread float*)x0; y[THREAD] = p[0];", {}, "mismatching address spaces"),
        ("threadgroup float* s = y; s[0] = 1.0f;", {}, "cannot initialize"),
        ("const float* p = x0; y[THREAD] = p[0];", {}, "p names no address space"),
        ("y[THREAD] = *(const float*)x0;", {}, "names no address space"),
        ("float own[2]; const float* p = own; y[THREAD] = p[0];", {}, "names no address space"),
        ("threadgroup_barrier();", {}, "no matching function"),
        ("threadgroup_barrier(mem_flags::mem_shared);", {}, "no member named 'mem_shared'"),
        ("double wide = x0[0]; y[0] = wide;", {}, "double"),
        ("y[THREAD] = x0[THREAD] * 0.5;", {}, "double"),
        ("y[THREAD] = __expf(x0[THREAD]);", {}, "undeclared identifier"),
        ("y[THREAD] = FLOAT_BIT(3u);", {}, "undeclared identifier"),
        ("auto half_of = [&](float v) { return v / 2; }; y[THREAD] = half_of(x0[THREAD]);", {}, "a lambda"),
        ("y[THREAD] = x0[THREAD] > 0.0f ? INFINITY : 0.0f;", {}, "INFINITY"),
        ("y[THREAD] = min(1, 2u);", {}, "ambiguous"),
        ("y[THREAD] = simd_shuffle_xor((long)THREAD, (ushort)1);", {}, "ambiguous"),
        ("y[THREAD] = as_type<half>(x0[THREAD]);", {}, "one size"),
        ("size_t i = THREAD; y[i / (size_t)x0[0]] = 0.0f;", {}, "/ of 64-bit integers"),
        ("y[(size_t)THREAD % THREADS] = 0.0f;", {}, "% of 64-bit integers"),
        ("size_t i = THREAD; i /= 3; y[i] = 0.0f;", {}, "/= of 64-bit integers"),
        ("long i = THREAD; i %= 3; y[i] = 0.0f;", {}, "%= of 64-bit integers"),
        (
            "y[THREAD] = part(x0[0], (size_t)THREAD);",
            {"functions": "template <class A> DEVICE float part(A a, size_t i) { return float(a + A(i / 3)); }"},
            "/ of 64-bit integers",
        ),
        ("SHARED(float, s, 8193); s[THREAD] = 0.0f; y[THREAD] = s[0];", {}, "32772 bytes of threadgroup memory"),
        (f"{WELL} // 2 \u00b5s", {}, "not ASCII"),
        (WELL, {"threads": 1056}, "1056 threads"),
        (WELL, {"threads": 40}, "40 threads"),
        (WELL, {"inputs": 31}, "32 buffers"),
        (
            "y[THREAD] = helper();",
            {"functions": "DEVICE float helper() { SHARED(float, s, 4); return s[0]; }"},
            "local",
        ),
    ],
)
def test_planted_mistakes_are_refused(mistake: str, options: dict[str, Any], said: str) -> None:
    found = planted(mistake, **options)
    assert any(said in one for one in found), found


@pytest.mark.parametrize("target", ["cuda", "metal"])
def test_a_text_that_is_not_ascii_is_refused_before_it_is_compiled(target: Any) -> None:
    """MLX makes a string of it for Metal that would be null."""
    for text in ({"body": "y[0] = x[0]; // \u00d7"}, {"body": "y[0] = x[0];", "functions": "// \u00d7"}):
        with pytest.raises(ValueError, match="the kernel planted is not ASCII"):
            dialect.maker(target)(Source("planted", ["x"], ["y"], **text))


def test_an_input_of_few_elements_is_in_the_constant_address_space() -> None:
    source = Source("few", ["x"], ["y"], "const device float* p = x; y[0] = p[0];")

    def found(elements: int) -> list[str]:
        return problems(call_of(source, [mx.zeros((elements,))], {}, 32, [((1,), mx.float32)]))

    assert found(8) == []
    assert any("address space" in one or "cannot initialize" in one for one in found(7))


def test_a_kernel_s_attributes_are_arguments() -> None:
    call = call_of(
        Source("one", ["x"], ["y"], WELL.replace("x0", "x")), [mx.zeros((64,))], {}, 64, [((64,), mx.float32)]
    )
    assert isinstance(call, Call)
    assert "uint3 thread_position_in_threadgroup" in call.text
    assert call.buffers == 2
