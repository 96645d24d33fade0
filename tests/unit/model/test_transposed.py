"""Linears that multiply by a transposed view compute what they computed before, by one operation."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_tandem.model.modules import clone
from mlx_tandem.model.ops.products.merged import TransposedLinear, merge, use_views
from mlx_tandem.model.targets import find_groups

WIDTH = 16


class Block(nn.Module):
    """Two linears with a common input, which can be merged, and one behind them."""

    def __init__(self, *, bias: bool):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=bias), nn.Linear(WIDTH, 24, bias=bias)
        self.down = nn.Linear(24, WIDTH, bias=bias)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        out: mx.array = self.down(self.gate(x) * self.up(x))
        return out


def operations(y: mx.array) -> int:
    graph = io.StringIO()
    mx.export_to_dot(graph, y)
    return graph.getvalue().count("rectangle")


@pytest.mark.parametrize("bias", [False, True])
def test_a_model_computes_what_it_computed(bias: bool) -> None:
    mx.random.seed(1)
    model: Any = Block(bias=bias)
    tokens = mx.array([[1], [5]])
    want = model(tokens)
    names = set(model.parameters())
    twin: Any = clone(model)
    merged = merge(find_groups(model))
    assert len(merged) == 1
    (served,) = use_views(model, merged)
    assert mx.array_equal(model(tokens), want).item()
    assert mx.array_equal(twin(tokens), want).item()
    assert set(model.parameters()) == names, "a view is no parameter"
    assert isinstance(model.down, TransposedLinear)
    assert isinstance(served.linear, TransposedLinear)
    assert model.gate._merged is served
    assert not isinstance(twin.down, TransposedLinear)
    assert not isinstance(merged[0].linear, TransposedLinear), "clones that were made before keep it"


def test_a_product_of_tokens_is_one_operation() -> None:
    model: Any = Block(bias=False)
    x = mx.zeros((3, 24))
    mx.eval(x, model.parameters())
    before = operations(model.down(x))
    use_views(model, [])
    assert (before, operations(model.down(x))) == (2, 1)


def test_a_replaced_weight_is_used() -> None:
    model: Any = Block(bias=True)
    use_views(model, [])
    model.down.weight = model.down.weight * 2
    x = mx.random.normal((3, 24))
    assert mx.allclose(model.down(x), mx.addmm(model.down.bias, x, model.down.weight.T)).item()


def test_quantised_linears_are_left_alone() -> None:
    model: Any = nn.Sequential(nn.QuantizedLinear(64, 32))
    use_views(model, [])
    assert type(model.layers[0]) is nn.QuantizedLinear
