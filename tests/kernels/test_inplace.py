"""Lines written in place."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.model.kernels.inplace import Order, Store
from mlx_tandem.model.ops.lora.slots import SlotWriter, Stack
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")


@pytest.mark.parametrize("order", shim.ORDERS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32])
@pytest.mark.parametrize(
    ("count", "width"),
    [
        *((1, 1), (41, 7), (5, 8), (3, 24)),  # lines of less than 16 bytes, of no whole number of them, and of few
        *((256, 16), (33, 128)),  # several lines of a block of threads, the last block with fewer
        *((1, 4096), (2, 4104), (3, 2051)),  # lines of more bytes than a block of threads writes
    ],
)
def test_lines_are_where_they_belong_and_the_array_where_it_was(
    dtype: mx.Dtype, count: int, width: int, order: shim.Order
) -> None:
    rng = np.random.default_rng(0)
    array = mx.array(rng.integers(0, 99, (count + 9, width))).astype(dtype)
    lines = mx.array(rng.integers(100, 199, (count, width))).astype(dtype)
    rows = rng.permutation(count + 9)[:count].astype(np.int32)
    expected = np.array(array.astype(mx.float32))
    expected[rows] = np.array(lines.astype(mx.float32))
    assert Store(shim.maker(order))(array, mx.array(rows), lines).tolist() == [0]
    assert (np.array(array.astype(mx.float32)) == expected).all()


@pytest.mark.parametrize("width", [7, 128])
def test_lines_for_one_row_leave_one_of_them_there(width: int) -> None:
    """All padding is written to the scratch line."""
    array, lines = mx.zeros((20, width), mx.bfloat16), mx.random.normal((30, width)).astype(mx.bfloat16)
    rows = mx.array([0] * 12 + list(range(2, 20)), mx.int32)
    mx.eval(array, lines)
    assert Store(shim.maker())(array, rows, lines).tolist() == [0]
    assert any(mx.array_equal(array[0], line) for line in lines[:12])
    assert mx.array_equal(array[2:], lines[12:]) and not array[1].any()


@pytest.fixture
def _uncompiled() -> Iterator[None]:
    """The shim computes at once; while a step is traced there are no numbers."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def stacks_of(rng: np.random.Generator, dtype: mx.Dtype) -> dict[str, Stack]:
    stacks = {path: Stack(LinearShape(24, outputs), 3, 8, dtype, None) for path, outputs in (("q", 16), ("k", 40))}
    for stack in stacks.values():
        for slot in range(4):
            a, b = (mx.array(rng.standard_normal(x.shape[1:])).astype(dtype) for x in (stack.a, stack.b))
            stack.a[slot], stack.b[slot] = a, b
    mx.eval([(stack.a, stack.b) for stack in stacks.values()])
    return stacks


def write(writer: SlotWriter, stacks: dict[str, Stack], slot: int, pairs: dict[str, tuple[mx.array, mx.array]]) -> bool:
    arrays = [x for stack in stacks.values() for x in (stack.a, stack.b)]
    return writer.write(arrays, slot, [x for path, stack in stacks.items() for x in stack.contents(pairs.get(path))])


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_slot_is_written_whole_and_nothing_else(dtype: mx.Dtype) -> None:
    """Of a smaller rank than the stacks have, of some of the linears; bits of the numbers will do."""
    rng = np.random.default_rng(1)
    stacks, twins = stacks_of(rng, dtype), stacks_of(np.random.default_rng(1), dtype)
    a, b = (mx.array(rng.standard_normal(shape)).astype(dtype) for shape in ((24, 4), (4, 40)))
    bits = mx.uint16 if dtype == mx.bfloat16 else mx.uint32
    pairs = {"k": (a.view(bits), b.view(bits))}
    writer = SlotWriter(Store(shim.maker()), Order())
    for slot in (2, 3):
        assert write(writer, stacks, slot, pairs)
        for path, twin in twins.items():
            twin.a[slot], twin.b[slot] = twin.contents(pairs.get(path))
    for path, twin in twins.items():
        assert mx.array_equal(stacks[path].a, twin.a) and mx.array_equal(stacks[path].b, twin.b)
    assert not np.array(stacks["q"].b[2].astype(mx.float32)).any()


@pytest.mark.usefixtures("_uncompiled")
def test_a_kernel_that_writes_wrongly_is_not_asked_again() -> None:
    asked = 0

    class Wrong(Store):
        def __call__(self, array: mx.array, rows: mx.array, lines: mx.array) -> mx.array:
            nonlocal asked
            asked += 1
            return super().__call__(array, rows, lines + 1)

    writer = SlotWriter(Wrong(shim.maker()), Order())
    stacks = stacks_of(np.random.default_rng(2), mx.float32)
    assert not write(writer, stacks, 1, {})
    before = asked
    assert not write(writer, stacks, 1, {}) and asked == before > 0
