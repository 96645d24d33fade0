"""Numbers that are copied once the host has written them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.model.inputs import Inputs, receive, specs
from mlx_tandem.model.kernels.exchange import Gate, Report
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")


def test_a_copy_has_the_numbers_that_were_sent() -> None:
    numbers = [np.arange(700, dtype=np.int32), np.array([0.5, -2.0], np.float32)]
    inputs = Inputs(packed=True)
    sent = inputs.reserve(numbers)
    inputs.fill(sent, numbers)
    received = receive(sent.arrays, specs(numbers), Gate(shim.maker()))
    for one, other in zip(received, numbers, strict=True):
        assert np.array_equal(np.array(one), other)
    assert inputs.came_in_time(sent)


def test_a_gate_that_was_not_opened_in_time_says_so() -> None:
    numbers = [np.arange(700, dtype=np.int32)]
    inputs = Inputs(packed=True)
    sent = inputs.reserve(numbers)
    inputs.write(sent, numbers)
    mx.eval(receive(sent.arrays, specs(numbers), Gate(shim.maker())))
    assert not inputs.came_in_time(sent)
    inputs.done(sent)
    again = inputs.reserve(numbers)
    assert again.buffer is sent.buffer and inputs.came_in_time(again)


@pytest.mark.parametrize("count", [1, 5, 96, 300])
def test_drawn_tokens_are_written_back_beside_the_numbers(count: int) -> None:
    numbers = [np.arange(200, dtype=np.int32)]
    inputs = Inputs(packed=True)
    sent = inputs.send(numbers, room=count)
    tokens = np.random.default_rng(1).integers(-1, 150_000, count).astype(np.int32)
    copy = Report(shim.maker())(mx.array(tokens), sent.arrays[0])
    assert np.array_equal(np.array(copy), tokens)
    assert sent.written_back == tokens.tolist()
    assert inputs.came_in_time(sent)
    (received,) = receive(sent.arrays, specs(numbers), Gate(shim.maker()))
    assert np.array_equal(np.array(received), numbers[0])
