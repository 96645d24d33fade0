"""Adapter folders, some thousands of them: each is read, or refused by its file and field."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from mlx_tandem.adapters import formats
from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.errors import InvalidRequest
from tests.fuzz import adapters, folders
from tests.fuzz.judge import Tally, check, judge, named

LINEARS = {
    **{f"model.layers.{i}.self_attn.q_proj": LinearShape(12, 16) for i in range(2)},
    **{f"model.layers.{i}.mlp.down_proj": LinearShape(20, 12) for i in range(2)},
    "model.layers.1.mlp.switch_mlp.up_proj": LinearShape(12, 20, experts=4),
}
CASES = 2750


def read(folder: Path, rng: Random, root: Path) -> None:
    weights = formats.read(
        folder,
        LINEARS,
        max_rank=8,
        base_layers=2,
        follow_links=rng.random() < 0.5,
        root=root if rng.random() < 0.5 else None,
        hidden_size=adapters.HIDDEN,
    )
    assert weights.info.rank <= 8
    assert weights.score_head is None or (weights.score_head.shape == (12,) and np.isfinite(weights.score_head).all())
    assert all(path in LINEARS for path in weights.tensors)


@pytest.mark.promise("B5")
@pytest.mark.parametrize("part", range(4))
def test_an_adapter_is_read_or_refused_by_its_file_and_field(part: int, tmp_path: Path) -> None:
    tally = Tally()
    for seed in range(part * CASES, (part + 1) * CASES):
        rng = Random(f"adapter {seed}")
        case = adapters.broken(rng, LINEARS)
        with named("adapter", seed, case):
            folder = case.write(tmp_path / "adapter")
            judge(tally, case, adapters.FILES, lambda folder=folder, rng=rng: read(folder, rng, tmp_path))
    assert tally.cases == CASES
    assert tally.accepted > CASES / 20, tally.refused
    assert all(tally.refused[name] > CASES / 10 for name in adapters.FILES[:3]), tally.refused


def test_what_nobody_has_broken_is_read(tmp_path: Path) -> None:
    for seed in range(100):
        rng = Random(f"valid {seed}")
        case, _ = adapters.valid(rng, LINEARS)
        with named("valid adapter", seed, case):
            read(case.write(tmp_path / "adapter"), rng, tmp_path)


@pytest.mark.parametrize("place", ["missing", "file", "pipe", "loop", "outside", "nul", "long", "surrogate"])
def test_a_folder_that_is_none(place: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    case, _ = adapters.valid(Random(0), LINEARS)
    if place in folders.THINGS:
        path = folders.Case({"adapter": place}).write(tmp_path / "root") / "adapter"
    elif place == "file":
        path.write_text("")
    elif place == "nul":
        path = Path(f"{path}\0")
    elif place == "long":
        path = tmp_path / ("x" * 5000)
    elif place == "surrogate":
        path = tmp_path / "\ud800"
    for root in (None, tmp_path if place != "outside" else tmp_path / "root"):
        with pytest.raises(InvalidRequest) as e:
            formats.read(path, LINEARS, max_rank=8, base_layers=2, root=root)
        check(e.value.message, e.value.param, case, ["path"])
