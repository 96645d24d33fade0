"""Tokens drawn by the kernels: those of numpy for any numbers, and taken only where they are right and faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem.engine.plan import NOT_A_NUMBER
from mlx_tandem.model.kernels.checking import Choice
from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.ops.sampling import choice as check_of_sampling
from mlx_tandem.model.ops.sampling.choice import (
    Seconds,
    choose,
    difference,
    difference_truncated,
    expected,
    invent,
    wrong,
)
from mlx_tandem.model.ops.sampling.draw import Argmax, GumbelMax, Limits, Masks, Noise, TruncatedDraw
from mlx_tandem.model.ops.sampling.sampler import MLX_PICKERS, Pickers, pick_with_mlx
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.mlx_engine import make_engine
from tests.kernels import shim
from tests.kernels.broken import Broken
from tests.unit.model.draws import LOGITS, OUTPUT, PROMPT, TRUNCATIONS, Case, assert_follows, draw

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

DTYPES = [mx.bfloat16, mx.float16, mx.float32]
INFINITY = {mx.bfloat16: 0x7F80, mx.float16: 0x7C00, mx.float32: 0x7F800000}
VOCABULARY = 517  # of no whole words
WIDE = 20_011  # more than the threads read at once


@pytest.fixture(scope="module")
def make() -> Make:
    return shim.maker()


def check(greedy: Argmax, logits: mx.array) -> None:
    want = expected(np.array(logits.astype(mx.float32)))
    assert np.array(greedy(logits)).tolist() == want.tolist()
    assert np.array(pick_with_mlx(logits)).tolist() == want.tolist()


@st.composite
def numbers(draw: st.DrawFn) -> mx.array:
    """Any bits at all, few values many times over, and among them some of what is not finite and both zeros."""
    dtype = draw(st.sampled_from(DTYPES))
    rows = draw(st.integers(1, 9))
    width = draw(st.integers(1, 40) | st.sampled_from([512, 4096, 4099, 8 * 2048 + 5]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    word = np.uint32 if dtype == mx.float32 else np.uint16
    bits = rng.integers(0, 1 << 8 * np.dtype(word).itemsize, (rows, width), dtype=word)
    sign, infinity = 1 << (8 * np.dtype(word).itemsize - 1), INFINITY[dtype]
    if draw(st.booleans()):  # finite ones only
        bits = np.where(bits & infinity == infinity, bits ^ word(infinity), bits)
    if draw(st.booleans()):  # of few kinds
        bits = rng.choice(bits[0], bits.shape)
    if draw(st.booleans()):  # of one sign
        bits = bits | word(sign)
    special = [infinity, infinity | sign, infinity + 1, infinity + 1 | sign, sign - 1, 2 * sign - 1, 0, sign]
    for number in draw(st.lists(st.sampled_from(special), max_size=4)):
        bits[rng.integers(rows), rng.integers(width)] = number
    return mx.array(bits).view(dtype)


@given(logits=numbers(), order=st.sampled_from(shim.ORDERS))
@settings(max_examples=150)
def test_it_equals_numpy(logits: mx.array, order: shim.Order) -> None:
    check(Argmax(shim.maker(order)), logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", shim.ORDERS)
def test_rows_of_every_kind(dtype: mx.Dtype, order: shim.Order) -> None:
    greedy = Argmax(shim.maker(order))
    for width in (VOCABULARY, WIDE):
        logits = mx.array(invent(np.random.default_rng(1), width)).astype(dtype)
        check(greedy, logits)
        check(greedy, logits[3:4])
        assert not wrong(GumbelMax(shim.maker(order)), [dtype], width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_is_found_wherever_it_is(make: Make, dtype: mx.Dtype) -> None:
    """Alone, and with the same number at every place behind it."""
    for width, step in ((67, 1), (WIDE, 211)):
        places = np.arange(0, width, step)
        alone = np.where(np.arange(width) == places[:, None], -1.0, -2.0)
        for rows in (alone, np.maximum.accumulate(alone, 1)):
            assert Argmax(make)(mx.array(rows).astype(dtype)).tolist() == places.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_seen_wherever_it_is(make: Make, dtype: mx.Dtype) -> None:
    width, infinity = 67, INFINITY[dtype]
    word = np.uint32 if dtype == mx.float32 else np.uint16
    sign = 1 << (8 * np.dtype(word).itemsize - 1)
    for number in (infinity, infinity + 1, infinity + 1 | sign):
        bits = np.where(np.eye(width, dtype=bool), word(number), word(1))
        assert Argmax(make)(mx.array(bits).view(dtype)).tolist() == [NOT_A_NUMBER] * width
    bits = np.full((2, width), infinity | sign, word)
    bits[1, 40] -= 1  # the lowest finite number
    assert Argmax(make)(mx.array(bits).view(dtype)).tolist() == [NOT_A_NUMBER, 40]


@st.composite
def draws(draw: st.DrawFn) -> tuple[mx.array, Noise | None, Masks | None]:
    """Logits of any kind, temperatures of any size, and masks of any density, each row with its own.

    `places` may have any further elements behind those of the rows.
    """
    logits = draw(numbers())
    rows, width = logits.shape
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    noise = None
    if draw(st.booleans()):
        temperature = rng.choice(np.array([0.0, 1e-3, 0.7, 1.0, 30.0, 1e6], np.float32), (rows, 1))
        key = rng.integers(1 << 32, size=(rows, 2), dtype=np.uint32)
        position = rng.integers(1 << 31, size=rows).astype(np.int32)
        noise = Noise(mx.array(key), mx.array(position), mx.array(temperature))
    if noise is not None and not draw(st.booleans()):
        return logits, noise, None
    share = draw(st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]))
    allowed = rng.random((5, -(-width // 32) * 32)) < share
    table = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    places = rng.integers(5, size=rows), rng.integers(-(1 << 31), 1 << 31, size=draw(st.integers(0, 9)))
    return logits, noise, Masks(mx.array(np.concatenate(places).astype(np.int32)), mx.array(table))


@given(drawn=draws(), order=st.sampled_from(shim.ORDERS))
@settings(max_examples=200)
def test_draws_are_those_of_numpy(drawn: tuple[mx.array, Noise | None, Masks | None], order: shim.Order) -> None:
    assert not difference(GumbelMax(shim.maker(order)), *drawn)
    assert not difference(pick_with_mlx, *drawn)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_tokens_follow_their_distribution(make: Make, dtype: mx.Dtype) -> None:
    """Logits that float types hold exactly, drawn by many seeds, all rows at once."""
    rows = 2048
    logits = np.array([2.0, 0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.0, 1.5, 3.0], np.float32)
    rng = np.random.default_rng(3)
    noise = Noise(
        mx.array(rng.integers(1 << 32, size=(rows, 2), dtype=np.uint32)),
        mx.arange(rows, dtype=mx.int32),
        mx.full((rows, 1), 0.8),
    )
    masks = Masks(mx.zeros((rows,), mx.int32), mx.array([[0b1101111111]], mx.uint32))
    allowed = np.array([0b1101111111 >> i & 1 for i in range(10)])
    batch = mx.broadcast_to(mx.array(logits), (rows, 10)).astype(dtype)
    for own, kept in ((None, np.ones(10)), (masks, allowed)):
        weight = np.exp(logits.astype(np.float64) / 0.8) * kept
        assert_follows(np.array(GumbelMax(make)(batch, noise, own)).tolist(), weight / weight.sum())


@st.composite
def truncations(draw: st.DrawFn) -> tuple[mx.array, Noise, Limits, Masks | None]:
    """Draws of any kind, each row with its own truncations, mild and strict ones and none."""
    logits, noise, masks = draw(draws())
    rows, width = logits.shape
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):  # logits of a usual size, so that several tokens are likely
        logits = mx.array(rng.normal(0, 3, (rows, width)).astype(np.float32)).astype(logits.dtype)
    if noise is None:
        heat = mx.array(rng.choice(np.array([0.0, 0.5, 1.0, 3.0], np.float32), (rows, 1)))
        key = mx.array(rng.integers(1 << 32, size=(rows, 2), dtype=np.uint32))
        noise = Noise(key, mx.arange(rows, dtype=mx.int32), heat)
    limits = Limits(
        mx.array(rng.choice(np.array([1.0, 0.99, 0.8, 0.3, 1e-6], np.float32), (rows, 1))),
        mx.array(np.minimum(rng.choice(np.array([width, 1, 2, 7, 50], np.int32), (rows, 1)), width)),
        mx.array(rng.choice(np.array([0.0, 0.02, 0.4, 1.0], np.float32), (rows, 1))),
    )
    return logits, noise, limits, masks


@given(drawn=truncations(), order=st.sampled_from(shim.ORDERS))
@settings(max_examples=150)
def test_truncated_draws_are_those_of_numpy(
    drawn: tuple[mx.array, Noise, Limits, Masks | None], order: shim.Order
) -> None:
    assert not difference_truncated(TruncatedDraw(shim.maker(order)), *drawn)


@pytest.mark.parametrize("name", [name for name in TRUNCATIONS if "xtc" not in name])
def test_the_kernels_draw_what_mlx_draws(make: Make, name: str) -> None:
    """With the same noise, whatever a row asks for: the same tokens, but for rounding."""
    cases = [Case(structs.replace(TRUNCATIONS[name], seed=seed), PROMPT, OUTPUT, position=9) for seed in range(60)]
    kernels = Pickers(GumbelMax(make), TruncatedDraw(make))
    ours, theirs = (np.array(draw(LOGITS, cases, pickers=each).tokens) for each in (kernels, MLX_PICKERS))
    assert (ours != theirs).sum() <= 1


# --- which of them draws ---------------------------------------------------------------------------------------------


def faster(pickers: Pickers, dtype: mx.Dtype, vocabulary: int) -> Seconds:
    return Seconds(2e-5, 4e-5, 9e-4) if pickers is MLX_PICKERS else Seconds(1e-5, 3e-5, 6e-5)


def slower(pickers: Pickers, dtype: mx.Dtype, vocabulary: int) -> Seconds:
    return Seconds(2e-5, 3e-5, 9e-4) if pickers is MLX_PICKERS else Seconds(1e-5, 4e-5, 6e-5)


def slower_truncations(pickers: Pickers, dtype: mx.Dtype, vocabulary: int) -> Seconds:
    return faster(pickers, dtype, vocabulary)._replace(truncated=1e-3 if pickers is MLX_PICKERS else 2e-3)


def test_what_is_right_and_faster_is_taken(make: Make) -> None:
    made = choose(mx.bfloat16, VOCABULARY, [make], faster)
    assert isinstance(made.chosen.plain, GumbelMax) and isinstance(made.chosen.truncated, TruncatedDraw)
    assert made.reason == (
        "the kernels are faster: 10 µs for 16 greedy rows, MLX's operations take 20; 30 and 40 with noise; "
        "60 and 900 with truncations"
    )


def test_what_is_slower_is_not(make: Make) -> None:
    for seconds in (slower, None):  # as the shim really is
        made = choose(mx.float16, VOCABULARY, [make], seconds)
        assert made.chosen is MLX_PICKERS and made.reason.startswith("the kernels are not used: slower: ")


def test_the_kernel_for_truncations_is_chosen_by_itself(make: Make) -> None:
    for maker, seconds, why in (
        (make, slower_truncations, "slower: 2000 and 1000 µs"),
        (Broken(make, "height(x) > drawn ?", "height(x) >= drawn ?"), faster, "token "),
    ):
        made = choose(mx.bfloat16, VOCABULARY, [maker], seconds)
        assert isinstance(made.chosen.plain, GumbelMax) and made.chosen.truncated is None
        assert f"; the kernel for truncated draws is not used: {why}" in made.reason


def test_a_device_without_kernels_has_no_choice() -> None:
    assert choose(mx.float32, VOCABULARY, []).chosen is MLX_PICKERS
    assert choose(mx.float32, VOCABULARY).chosen is MLX_PICKERS


FAULTS = {
    "a tie goes to the last": ("max(a, b) > peak.height)", "max(a, b) >= peak.height)"),
    "the word's last": ("int i = EACH - 1; i >= 0; i--", "int i = 0; i < EACH; i++"),
    "numbers of a word left out": ("highest(read[i].w, T())", "highest(read[i].z, T())"),
    "words left out": ("min(word + i * THREADS, words - 1));", "min(word + i, words - 1));"),
    "every row the first": ("logits + begin", "logits"),
    "not the end": ("THREAD < width - EACH * words", "THREAD < head"),
    "infinity is a number": ("peak.height < ENDLESS", "peak.height <= ENDLESS"),
    "infinity and more are numbers": ("&& peak.height < ENDLESS", ""),
    "-infinity is a number": ("peak.height > 0u && ", ""),
    "one warp's": ("peaks[LANE]", "peaks[0]"),
    "without the last warp's": ("LANE < THREADS / 32", "LANE < THREADS / 32 - 1"),
    "does not compile": ("BARRIER();", "BARRIER(;"),
    "noise of the first row": ("key[2 * GROUP_X]", "key[0]"),
    "half of the key": ("key[2 * GROUP_X + 1]", "key[2 * GROUP_X]"),
    "noise of another position": ("hashed_position + 0x7f4a7c15u", "hashed_position + 0x7f4a7c16u"),
    "noise of another token": ("(token + e))", "(token + e + 1))"),
    "one temperature": ("temperature[GROUP_X] * gumbel", "temperature[0] * gumbel"),
    "a bound that is too low": ("return 127.00002f", "return 124.0f"),
    "no series for small numbers": ("u < 1e-3f ? series", "false ? series"),
    "the first mask for all": ("table + (size_t)places[GROUP_X] * table_shape[1]", "table"),
    "bits of the wrong end": ("allowed[i] >> e & 1u", "allowed[i] >> (EACH - 1 - e) & 1u"),
    "no bits of the next word": ("min(((token) >> 5) + 1, last)", "min((token) >> 5, last)"),
    "masks of all tokens at the end": ("if (ALLOWED(token) & 1u) CONSIDER", "CONSIDER"),
    "a sum that no warp reaches": ("SHUFFLE_XOR(reached, lanes)", "(reached + (1u << 22))"),
}


TRUNCATED_FAULTS = {
    "one top-k for all": ("most_tokens = top_k[GROUP_X]", "most_tokens = top_k[0]"),
    "one token too many": ("all >= (uint)most_tokens", "all > (uint)most_tokens"),
    "words counted twice": ("from + i * THREADS < words ? ALLOWED(at) : 0u", "ALLOWED(at)"),
    "warps left out of a count": ("w < THREADS / 32; w++) all", "w < 1; w++) all"),
    "no top-k": ("cut = max(cut, kth);", ""),
    "no min-p": ("min_p[GROUP_X] > 0.0f", "false"),
    "no top-p": ("top_p[GROUP_X] < 1.0f", "false"),
    "a share of everything": ("height(x) >= cut ? PROBABILITY(x)", "height(x) >= 1u ? PROBABILITY(x)"),
    "no second draw": ("cut = drawn + 1u;", "break;"),
    "cold": ("1.4426950408889634f / heat", "1.4426950408889634f"),
    "one warp's mass": ("sum += sums[w]", "sum += 0"),
    "a sum that nothing has": ("gumbel(unit(peak.at, first, second))", "gumbel(unit(peak.at + 1, first, second))"),
}


@pytest.mark.parametrize("fault", TRUNCATED_FAULTS)
def test_a_broken_kernel_for_truncations_is_rejected_at_start(make: Make, fault: str) -> None:
    made = choose(mx.bfloat16, VOCABULARY, [Broken(make, *TRUNCATED_FAULTS[fault])], faster)
    assert made.chosen.truncated is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_rejected_at_start(make: Make, fault: str) -> None:
    made = choose(mx.bfloat16, WIDE, [Broken(make, *FAULTS[fault])], faster)
    assert made.chosen is MLX_PICKERS and made.reason.startswith("the kernels are not used: ")


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("temperature", "penalty"), [(0.0, 0.0), (0.0, 0.7), (0.9, 0.0), (0.9, 0.7)])
def test_it_serves(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, temperature: float, penalty: float, truncated: bool
) -> None:
    """Answers with the kernels equal those without."""
    folder = tiny_models.make(tmp_path / "model", "llama")
    plain, among, rows = GumbelMax(make), TruncatedDraw(make), set()

    def counted(logits: mx.array, noise: Noise | None, masks: Masks | None) -> mx.array:
        rows.add((logits.shape[0], noise is not None))
        return plain(logits, noise, masks)

    def counted_among(logits: mx.array, noise: Noise, limits: Limits, masks: Masks | None) -> mx.array:
        rows.add((logits.shape[0], True))
        return among(logits, noise, limits, masks)

    def answers() -> dict[tuple[int, int], list[int]]:
        limits: dict[str, Any] = {"top_k": 9, "top_p": 0.8, "min_p": 0.01} if truncated else {}
        params = SamplingParams(max_tokens=6, temperature=temperature, presence_penalty=penalty, seed=5, **limits)
        return make_engine(folder).run([Request(i, tuple(range(3, 9 + i)), params) for i in range(4)]).tokens

    without = answers()
    pickers = Pickers(counted, counted_among)
    monkeypatch.setattr(check_of_sampling, "choose", lambda dtype, vocabulary: Choice(pickers, "asked for"))
    mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
    try:
        made = answers()
    finally:
        mx.enable_compile()
    assert made == without and rows >= {(1, temperature > 0), (4, temperature > 0)}
