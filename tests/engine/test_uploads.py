"""Adapters made ready on another thread are written as if they had not been."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.model.ops.lora import slots
from mlx_tandem.model.ops.lora.slots import Uploads, bfloat16_bits
from mlx_tandem.types import AdapterInfo


def weights(digest: str, seed: int = 0) -> AdapterWeights:
    g = np.random.default_rng(seed)
    pair = g.normal(size=(24, 4)).astype(np.float32), g.normal(size=(4, 40)).astype(np.float32)
    return AdapterWeights(AdapterInfo(digest, 4, 1.0, "peft", (), 0, 0), {"layers.0.q": pair})


@given(
    arrays.arrays(
        np.float32,
        st.integers(1, 64),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127),
    )
)
def test_rounding_is_the_device_s(x: np.ndarray) -> None:
    assert mx.array_equal(mx.array(bfloat16_bits(x)).view(mx.bfloat16), mx.array(x).astype(mx.bfloat16))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_was_prepared_is_what_would_have_been_made(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    monkeypatch.setattr(slots, "WORTH_BYTES", 0)
    made = Uploads(dtype).take(weights("d"))
    other = Uploads(dtype)
    thread = threading.Thread(target=other.prepare, args=(weights("d"),))
    thread.start()
    thread.join()
    monkeypatch.setattr(other, "_made", None)  # nothing is left to do
    taken = other.take(weights("d"))
    for path, pair in weights("d").tensors.items():
        for x, a, b in zip(pair, made[path], taken[path], strict=True):
            assert mx.array_equal(a.view(dtype), mx.array(x).astype(dtype))
            assert mx.array_equal(a, b)


def test_few_are_kept_and_each_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "WORTH_BYTES", 0)
    kept = Uploads(mx.float32)
    for i in range(slots.KEPT + 2):
        kept.prepare(weights(f"d{i}", i))
    assert list(kept._ready) == [f"d{i}" for i in range(2, slots.KEPT + 2)]
    for i in range(slots.KEPT + 2):
        a = kept.take(weights(f"d{i}", i))["layers.0.q"][0]
        assert mx.array_equal(a, mx.array(weights("", i).tensors["layers.0.q"][0]))
    assert not kept._ready


def test_small_ones_are_not_worth_a_thread() -> None:
    small = Uploads(mx.float32)
    small.prepare(weights("d"))
    assert not small._ready
