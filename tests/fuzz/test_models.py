"""Model folders: each is loaded and gives numbers, or is refused by its file and field before anything serves."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from mlx_tandem.config import ModelConfig
from mlx_tandem.model import loader, probe
from tests.fuzz import models
from tests.fuzz.judge import Tally, judge, named

CASES = 350


def read(folder: Path) -> None:
    """Load a model and look at it as an engine does at its start."""
    model = loader.load(ModelConfig(str(folder)), lambda stage, fraction: None)
    found = probe.examine(model)
    assert found.vocab_size == 64 and len(found.layers) <= 1024
    assert all(type(token) is int and token >= 0 for token in model.eos_token_ids)
    assert model.max_model_len > 0 and model.heads > 0


@pytest.mark.parametrize("part", range(4))
def test_a_model_is_loaded_or_refused_by_its_file_and_field(part: int, tmp_path: Path) -> None:
    tally = Tally()
    for seed in range(part * CASES, (part + 1) * CASES):
        rng = Random(f"model {seed}")
        case = models.broken(rng)
        with named("model", seed, case):
            folder = case.write(tmp_path / "model")
            judge(tally, case, models.FILES, lambda folder=folder: read(folder))
    assert tally.cases == CASES
    assert tally.accepted > CASES / 10, tally.refused
    rare = ("*.safetensors", models.SHARDS[1])
    assert all(tally.refused[name] > 0 for name in models.FILES if name not in rare), tally.refused


def test_what_nobody_has_broken_is_loaded(tmp_path: Path) -> None:
    for seed in range(20):
        case, _, family = models.valid(Random(f"valid {seed}"))
        with named(f"valid {family}", seed, case):
            read(case.write(tmp_path / "model"))
