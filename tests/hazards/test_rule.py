"""The rule on graphs of a few operations, each with what is known of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.dialect import Source
from tests.hazards.graph import record
from tests.hazards.rule import faults

WRITER = Source("writer", ["array", "rows"], ["done"], "done[0] = 0;", writes=["array"])

State = dict[str, mx.array]
ROWS = mx.array([0] * 8, mx.int32)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[State], None]], list[str]]:
    """What is wrong with work on an array that kernels write."""

    def check(work: Callable[[State], None]) -> list[str]:
        calls.clear()
        state = {"array": mx.zeros((8, 4)), "order": mx.zeros((1,), mx.int32)}
        sources = {(WRITER.name, len(WRITER.inputs)): WRITER}
        return [str(fault) for fault in faults(record(work, state, sources, calls, monkeypatch), ["array"])]

    return check


calls: Counter[str] = Counter()


def write(array: mx.array, rows: mx.array) -> mx.array:
    calls[WRITER.name] += 1
    (done,) = dialect.maker("metal")(WRITER)([array, rows], {}, (1, 1, 1), 32, [((1,), mx.int32)])
    return done


Found = Callable[[Callable[[State], None]], list[str]]


def test_an_output_of_the_writer_orders_who_reads(found: Found) -> None:
    def work(s: State) -> None:
        mx.async_eval(s["array"][ROWS + write(s["array"], ROWS)])

    assert not found(work)


def test_the_array_alone_does_not(found: Found) -> None:
    def work(s: State) -> None:
        mx.async_eval(write(s["array"], ROWS), s["array"][ROWS])

    assert found(work) == ["read after write of array: writer in evaluation 0, then Gather in evaluation 0"]


def test_what_the_host_waits_for_is_done(found: Found) -> None:
    def work(s: State) -> None:
        mx.eval(write(s["array"], ROWS))
        mx.async_eval(s["array"][ROWS])

    assert not found(work)


def test_depends_orders_the_host_alone(found: Found) -> None:
    def work(s: State) -> None:
        rows = mx.depends([ROWS], [write(s["array"], ROWS)])[0]
        mx.async_eval(s["array"][rows])

    assert found(work) == ["read after write of array: writer in evaluation 0, then Gather in evaluation 0"]


def test_who_reads_is_not_safe_from_who_writes_next(found: Found) -> None:
    def work(s: State) -> None:
        read = s["array"][ROWS]
        mx.async_eval(read)
        mx.async_eval(write(s["array"], ROWS))

    assert found(work) == ["write after read of array: Gather in evaluation 0, then writer in evaluation 1"]

    def ordered(s: State) -> None:
        read = s["array"][ROWS]
        mx.async_eval(read)
        mx.async_eval(write(s["array"], ROWS + (read[0, :1] > read[0, :1]).astype(mx.int32)))

    assert not found(ordered)


def test_parts_of_a_concatenation_do_not_wait_for_each_other(found: Found) -> None:
    def work(s: State) -> None:
        new = mx.zeros((1, 4)) + write(s["array"], ROWS).astype(mx.float32)
        mx.async_eval(mx.concatenate([s["array"][:2], new]))

    assert found(work) == ["read after write of array: writer in evaluation 0, then Concatenate in evaluation 0"]


def test_mlx_writes_in_place_what_nobody_holds(found: Found) -> None:
    def work(s: State) -> None:
        array = s["array"]
        array[ROWS] = mx.ones((8, 4))
        mx.async_eval(array)

    assert not found(work)


def test_mlx_copies_what_an_operation_in_flight_holds(found: Found) -> None:
    def work(s: State) -> None:
        array = s["array"]
        mx.async_eval(array[ROWS])
        array[ROWS] = mx.ones((8, 4))
        mx.async_eval(array)

    assert found(work) == ["copy of array: Scatter in evaluation 1"]


def test_a_copy_does_not_wait_for_the_indices(found: Found) -> None:
    def work(s: State) -> None:
        array = s["array"]
        done = write(array, ROWS)
        array[ROWS + done] = mx.ones((8, 4))
        mx.async_eval(array)

    assert found(work) == [
        "copy of array: Scatter in evaluation 0",
        "read after write of array: writer in evaluation 0, then the copy by Scatter in evaluation 0",
    ]


def test_a_kernel_writes_a_copy_of_what_is_not_laid_out_line_by_line(found: Found) -> None:
    def work(s: State) -> None:
        mx.async_eval(write(s["array"].T, ROWS))

    assert found(work) == ["copy of array: writer in evaluation 0"]


def test_a_write_that_nothing_asks_for_never_happens(found: Found) -> None:
    def work(s: State) -> None:
        write(s["array"], ROWS)
        mx.async_eval(s["array"][ROWS])

    assert found(work) == ["lost write of 1 of 1 calls: writer"]
