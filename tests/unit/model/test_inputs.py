"""Numbers on their way from the host to a forward."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.model.inputs import KEPT, Inputs, Staging, constant, receive, specs
from mlx_tandem.model.kernels.exchange import RESERVED

SHAPES = st.lists(st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 5), st.integers(1, 7))), min_size=2)


@given(SHAPES, st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=100)
def test_what_is_sent_is_received(shapes: list[tuple[int, ...]], seed: int, packed: bool) -> None:
    rng = np.random.default_rng(seed)
    kinds = [(np.int32, np.uint32, np.float32)[i] for i in rng.integers(0, 3, len(shapes))]
    numbers = [rng.integers(0, 2**32, s, np.uint32).view(kind) for s, kind in zip(shapes, kinds, strict=True)]
    sent = Inputs(packed).send(numbers).arrays
    assert len(sent) == (1 if packed else len(numbers))
    for got, want in zip(receive(sent, specs(numbers)), numbers, strict=True):
        assert np.array(got).dtype == want.dtype
        assert np.array(got).tobytes() == want.tobytes()


def test_a_part_is_contiguous_and_where_kernels_can_load_it() -> None:
    numbers = [np.arange(n, dtype=np.int32) for n in (3, 5, 1)]
    first, second, third = receive(Inputs(True).send(numbers).arrays, specs(numbers))
    mx.eval(first, second, third)
    at = [np.asarray(a).ctypes.data for a in (first, second, third)]
    assert (at[1] - at[0], at[2] - at[0]) == (16, 48)


@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=30))
@settings(max_examples=50)
def test_a_buffer_is_used_again_once_it_was_read_and_not_before(steps: list[tuple[int, bool]]) -> None:
    """Steps of so many numbers, each of which is launched at once or when the next is; what was read is kept."""
    inputs, waiting, read = Inputs(True), [], 0
    made = set()
    for i, (size, late) in enumerate(steps):
        numbers = [np.full(size, i, np.int32), np.full(2, -i, np.int32)]
        waiting.append((i, numbers, inputs.send(numbers)))
        made.add(id(waiting[-1][2].buffer.array))
        while len(waiting) > late:
            k, known, sent = waiting.pop(0)
            first, second = (np.array(a) for a in receive(sent.arrays, specs(known)))
            assert (first == k).all() and (second == -k).all() and first.size == known[0].size
            inputs.done(sent)
            read += 1
    assert read >= len(steps) - 1
    totals = [-(-size // 4) * 4 + 4 + RESERVED for size, _ in steps]
    classes = {max(256, 1 << (total - 1).bit_length()) for total in totals}
    assert len(made) <= 2 * len(classes)


def test_the_driver_is_asked_to_leave_each_buffer_with_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, int, int, int]] = []

    class Driver:
        def cuMemAdvise(self, pointer: Any, size: Any, advice: int, place: int) -> int:
            asked.append((pointer.value, size.value, advice, place))
            return 1  # an error changes nothing

    monkeypatch.setattr("mlx_tandem.model.inputs._driver", Driver)
    buffers = Staging()
    first = buffers.take(700)
    at = first.numbers.ctypes.data, 4096
    assert asked == [(*at, 3, -1), (*at, 5, 0)]
    buffers.give_back(first)
    assert buffers.take(513).array is first.array
    assert len(asked) == 2
    monkeypatch.setattr("mlx_tandem.model.inputs._driver", lambda: None)
    assert buffers.take(5).numbers.size == 256


def test_what_never_changes_is_made_once_for_the_device() -> None:
    inputs = Inputs(False)
    kept, fresh = constant(np.zeros(3, np.int32)), np.zeros(3, np.int32)
    again = [inputs.send([kept, fresh]).arrays for _ in range(2)]
    assert again[0][0] is again[1][0]
    assert again[0][1] is not again[1][1]
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1
    for i in range(3 * KEPT):
        (sent,) = inputs.send([constant(np.full(2, i, np.int32))]).arrays
        assert sent.tolist() == [i, i], "an array that is gone is not mistaken for another in its place"
        assert len(inputs._kept) <= KEPT
