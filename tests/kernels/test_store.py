"""Lines written in place."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.model.kernels.store import Store
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32])
def test_lines_are_where_they_belong_and_the_array_where_it_was(tmp_path: Path, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    array = mx.array(rng.integers(0, 99, (50, 7))).astype(dtype)
    lines = mx.array(rng.integers(0, 99, (41, 7))).astype(dtype)
    rows = rng.permutation(50)[:41].astype(np.int32)
    expected = np.array(array.astype(mx.float32))
    expected[rows] = np.array(lines.astype(mx.float32))
    assert Store(shim.maker(tmp_path))(array, mx.array(rows), lines).tolist() == [0]
    assert (np.array(array.astype(mx.float32)) == expected).all()
