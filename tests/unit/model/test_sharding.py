"""How a model is divided between ranks: what each has of every linear, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.config import ModelConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model.loader import LoadedModel, load_unread
from mlx_tandem.model.modules import kind_of, mix_in, unmix
from mlx_tandem.model.sharding import RankPlace, Summed, shard
from mlx_tandem.model.targets import find_targets
from tests import tiny_models


def load(folder: Path) -> LoadedModel:
    return load_unread(ModelConfig(str(folder)), lambda stage, fraction: None)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "gpt_oss", "qwen3_5", "deepseek_v3", "glm4_moe"])
def test_shares_of_an_adapter_make_up_the_whole_delta(family: str, tmp_path: Path) -> None:
    """Outputs that are divided are put together in their places, and parts of sums are added: with the cuts of both
    ranks, and with the weights that mlx-lm's code gives them."""
    folder = tiny_models.make(tmp_path / "model", family)
    whole = find_targets(load(folder).module)
    ranks = [find_targets(shard(load(folder), RankPlace(rank, 2)).module) for rank in range(2)]
    kinds = set()
    for path, target in whole.items():
        weight: Any = target.module["weight"]
        cuts = [rank[path].cut for rank in ranks]
        shares = [np.array(rank[path].module["weight"]) for rank in ranks]
        assert all(rank[path].whole == target.shape for rank in ranks)
        if cuts[0] is None:
            assert all(np.array_equal(share, np.array(weight)) for share in shares), path
            continue
        kinds.add("outputs" if cuts[0].outputs is not None else "inputs")
        a = np.array(weight).swapaxes(-1, -2)  # [inputs, outputs], as an A of full rank
        b = np.eye(target.shape.outputs, dtype=np.float32)
        for cut, share in zip(cuts, shares, strict=True):
            own_a, own_b = cut.of(a, b)  # type: ignore[union-attr]
            assert np.allclose(own_a @ own_b, share.swapaxes(-1, -2)), path
    assert kinds == {"outputs", "inputs"}


def test_a_model_is_not_changed_by_finding_its_cuts(tmp_path: Path) -> None:
    """The code of gpt_oss divides a bias by the number of ranks in place."""
    folder = tiny_models.make(tmp_path / "model", "gpt_oss")
    path = "model.layers.0.mlp.experts.down_proj"
    bias = [
        dict(model.module.named_modules())[path]["bias"]
        for model in (load(folder), shard(load(folder), RankPlace(0, 2)))
    ]
    assert np.allclose(np.array(bias[0]) / 2, np.array(bias[1]))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gemma2", {}, "the installed mlx-lm does not say how"),
        ("llama", {"num_key_value_heads": 1}, "its 1 heads of keys and values"),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3}, "its 3 query heads"),
        ("llama", {"intermediate_size": 97}, "it cannot be divided between 2 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = tiny_models.make(tmp_path / "model", family, **changes)
    with pytest.raises(ModelError, match=f"'{family}' is not served with --tensor-parallel-size over 1: {said}"):
        shard(load(folder), RankPlace(0, 2))


def test_what_changes_a_linear_stays_inside_of_its_sum(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", "llama")
    module = shard(load(folder), RankPlace(0, 2)).module
    linear: Any = dict(module.named_modules())["model.layers.0.self_attn.o_proj"]
    plain, x = kind_of(linear), mx.ones((1, 32))

    class Doubled:
        def __call__(self, x: mx.array) -> mx.array:
            y: mx.array = super().__call__(x)  # type: ignore[misc]
            return 2 * y

    before = linear(x)
    mix_in(linear, Doubled)
    assert type(linear).__bases__[0] is Summed and kind_of(linear).__bases__ == (Doubled, plain)
    assert np.allclose(np.array(linear(x)), 2 * np.array(before))
    unmix(linear)
    assert kind_of(linear) is plain
