"""Greedy tokens by the kernel: those of numpy for any numbers, and taken only where it is right and faster."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.plan import NOT_A_NUMBER
from mlx_tandem.model.kernel_checks import argmax
from mlx_tandem.model.kernel_checks.argmax import choose, expected, invent, wrong
from mlx_tandem.model.kernel_checks.frame import Choice
from mlx_tandem.model.kernels.argmax import Argmax
from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.step.sampler import Greedy, by_argmax
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.mlx_engine import make_engine
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

DTYPES = [mx.bfloat16, mx.float16, mx.float32]
INFINITY = {mx.bfloat16: 0x7F80, mx.float16: 0x7C00, mx.float32: 0x7F800000}
VOCABULARY = 517  # of no whole words
WIDE = 20_011  # more than the threads read at once


@pytest.fixture(scope="module")
def make() -> Make:
    return shim.maker()


def check(greedy: Greedy, logits: mx.array) -> None:
    want = expected(np.array(logits.astype(mx.float32)))
    assert np.array(greedy(logits)).tolist() == want.tolist()
    assert np.array(by_argmax(logits)).tolist() == want.tolist()


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
        assert not wrong(greedy, [dtype], width)


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


# --- which of them draws ---------------------------------------------------------------------------------------------


def faster(greedy: Greedy, dtype: mx.Dtype, vocabulary: int) -> float:
    return 2e-5 if greedy is by_argmax else 1e-5


def slower(greedy: Greedy, dtype: mx.Dtype, vocabulary: int) -> float:
    return 1e-5 if greedy is by_argmax else 2e-5


def test_what_is_right_and_faster_is_taken(make: Make) -> None:
    made = choose(mx.bfloat16, VOCABULARY, [make], faster)
    assert isinstance(made.chosen, Argmax)
    assert made.reason == "the kernel is faster: 10 µs for 16 rows, MLX's operations take 20"


def test_what_is_slower_is_not(make: Make) -> None:
    for seconds in (slower, None):  # as the shim really is
        made = choose(mx.float16, VOCABULARY, [make], seconds)
        assert made.chosen is by_argmax and made.reason.startswith("the kernel is not used: slower: ")


def test_a_device_without_kernels_has_no_choice() -> None:
    assert choose(mx.float32, VOCABULARY, []).chosen is by_argmax
    assert choose(mx.float32, VOCABULARY).chosen is by_argmax


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
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_rejected_at_start(make: Make, fault: str) -> None:
    made = choose(mx.bfloat16, WIDE, [Broken(make, *FAULTS[fault])], faster)
    assert made.chosen is by_argmax and made.reason.startswith("the kernel is not used: ")


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_it_serves(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, penalty: float) -> None:
    """Greedy requests say what they say without it."""
    folder = tiny_models.make(tmp_path / "model", "llama")
    kernel, rows = Argmax(make), set()

    def counted(logits: mx.array) -> mx.array:
        rows.add(logits.shape[0])
        return kernel(logits)

    def answers() -> dict[tuple[int, int], list[int]]:
        params = SamplingParams(max_tokens=6, temperature=0.0, presence_penalty=penalty)
        return make_engine(folder).run([Request(i, tuple(range(3, 9 + i)), params) for i in range(4)]).tokens

    without = answers()
    monkeypatch.setattr(argmax, "choose", lambda dtype, vocabulary: Choice(counted, "asked for"))
    mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
    try:
        made = answers()
    finally:
        mx.enable_compile()
    assert made == without and rows >= {1, 4}
