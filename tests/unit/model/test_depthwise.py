"""Convolutions by shifts equal MLX's own."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.model import recurrent
from mlx_tandem.model.recurrent import DepthwiseBySum


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from([mx.float32, mx.bfloat16]),
)
def test_it_is_mlx_s_convolution(
    channels: int, width: int, rows: int, length: int, bias: bool, dtype: mx.Dtype
) -> None:
    conv = nn.Conv1d(channels, channels, width, groups=channels, bias=bias)
    conv.weight = mx.random.normal(conv.weight.shape)
    if bias:
        conv.bias = mx.random.normal(conv.bias.shape)
    conv.set_dtype(dtype)
    x = mx.random.normal((rows, length + width - 1, channels)).astype(dtype)
    want = conv(x)
    recurrent.speed_up_convolutions(conv)
    assert isinstance(conv, DepthwiseBySum) and conv(x).dtype == want.dtype
    assert mx.allclose(conv(x), want, rtol=1e-5 if dtype == mx.float32 else 2e-2, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"groups": 1}, {"padding": 3}, {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"out_channels": 8}]
)
def test_others_are_left_alone(changes: dict[str, int]) -> None:
    plain = {"in_channels": 4, "out_channels": 4, "kernel_size": 4, "groups": 4}
    conv = nn.Conv1d(**plain | changes)
    recurrent.speed_up_convolutions(conv)
    assert not isinstance(conv, DepthwiseBySum)
