"""Passes cut into micro-batches."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.learning import Batch, Datum, LossConfig
from mlx_tandem.training.device.cutting import Cutter, rounded

LENGTHS = st.lists(st.lists(st.integers(2, 60), max_size=20), min_size=1, max_size=3)


def batches_of(lengths: list[list[int]]) -> list[Batch]:
    return [
        Batch(f"t{b}", tuple(Datum((7,) * n, 1, (1.0,) * (n - 1)) for n in own), LossConfig())
        for b, own in enumerate(lengths)
    ]


@settings(max_examples=150)
@given(LENGTHS, st.integers(20, 300), st.booleans(), st.booleans(), st.integers(0, 3))
def test_all_of_a_pass_is_in_it_once_and_fits(
    lengths: list[list[int]], most: int, mixed: bool, few_shapes: bool, beyond: int
) -> None:
    """The rows of a trainer together, and no position that the model does not have."""
    longest = max((n for own in lengths for n in own), default=1) + beyond
    cutter = Cutter(most, mixed, few_shapes, longest)
    cut = cutter.cut(batches_of(lengths))
    assert sorted((i.batch, i.index) for part in cut for i in part) == [
        (b, i) for b, own in enumerate(lengths) for i in range(len(own))
    ]
    for part in cut:
        owners = [item.batch for item in part]
        assert owners == sorted(owners) and (mixed or len(set(owners)) == 1)
        rows, length = cutter.shape(part)
        assert rows >= len(part) and max(item.length for item in part) <= length <= longest
        assert rows * length <= most or (rows, length) == (1, part[0].length)


@settings(max_examples=100)
@given(LENGTHS, st.integers(20, 300), st.booleans())
def test_there_are_as_few_as_hold_it(lengths: list[list[int]], most: int, mixed: bool) -> None:
    greedy = 0
    for own in [[n for each in lengths for n in each]] if mixed else lengths:
        left = sorted(own, reverse=True)
        while left:
            greedy += 1
            del left[: max(most // left[0], 1)]
    assert len(Cutter(most, mixed).cut(batches_of(lengths))) == greedy


@pytest.mark.parametrize("few_shapes", [False, True])
def test_they_are_even(few_shapes: bool) -> None:
    cut = Cutter(2048, True, few_shapes).cut(batches_of([[56] * 40]))
    assert [len(part) for part in cut] == [20, 20]


def test_little_of_what_is_computed_is_padding() -> None:
    """At a CPU's size of micro-batches, with examples whose lengths differ as those of chats do."""
    rng, real, computed = Random(0), 0, 0
    for _ in range(200):
        lengths = [min(max(int(rng.lognormvariate(5, 0.8)), 8), 1024) for _ in range(8)]
        cutter = Cutter(512, True)
        real += sum(lengths)
        computed += sum(rows * length for rows, length in map(cutter.shape, cutter.cut(batches_of([lengths]))))
    assert real > 0.92 * computed


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(17, 128), min_size=20, max_size=120), min_size=20, max_size=20))
def test_many_passes_have_few_shapes(passes: list[list[int]]) -> None:
    """Whatever is learnt from: three octaves of lengths."""
    cutter = Cutter(2048, True, few_shapes=True)
    shapes = {cutter.shape(part) for lengths in passes for part in cutter.cut(batches_of([lengths]))}
    assert len({length for _, length in shapes}) <= 24
    assert all(rows == rounded(rows) and length == rounded(length) for rows, length in shapes)


@given(st.integers(1, 100_000))
def test_eight_numbers_to_an_octave(n: int) -> None:
    assert n <= rounded(n) <= max(1.125 * n, n + 1)
    assert rounded(rounded(n)) == rounded(n)
    assert len({rounded(k) for k in range(65, 129)}) == 8
