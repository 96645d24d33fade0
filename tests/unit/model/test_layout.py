"""Linears whose weights were laid out anew for a CPU compute what they computed."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_tandem.model.loader import lay_out


def test_weights_keep_their_values_and_their_transposes_lie_row_by_row() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Embedding(4, 3))
    x = mx.random.normal((2, 3, 5))
    before = [np.array(layer.weight) for layer in module.layers]
    expected = module.layers[1](module.layers[0](x))
    lay_out(module)
    for layer, values in zip(module.layers, before, strict=True):
        assert np.array_equal(np.array(layer.weight), values)
    assert [np.asarray(layer.weight.T).flags.c_contiguous for layer in module.layers] == [True, True, False]
    assert np.allclose(np.array(module.layers[1](module.layers[0](x))), np.array(expected), atol=1e-6)


def test_other_types_stay_as_they_are() -> None:
    linear = nn.Linear(4, 6)
    linear.set_dtype(mx.bfloat16)
    before = linear.weight
    lay_out(linear)
    assert linear.weight is before
