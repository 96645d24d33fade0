"""Folders whose part for images has a number that nobody expects: the part is read, or refused by name.

Where it is read, an image is encoded, or refused as one that does not fit the model.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest

from mlx_tandem.config import ModelConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.model.loader import load_unread
from mlx_tandem.model.vision import library
from mlx_tandem.model_folder import CONFIG
from tests import tiny_vision
from tests.fuzz import values

pytestmark = pytest.mark.skipif(not library.is_installed(), reason="mlx-vlm is not installed")

CASES = 25


@pytest.mark.parametrize("family", ["pixtral", "gemma3", "gemma4", "qwen2_5_vl", "qwen3_5"])
def test_any_number_of_a_part_for_images_is_read_or_refused(family: str, tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model", family)
    config, image = json.loads((folder / CONFIG).read_text()), tiny_vision.image(family, 1)
    refused = 0
    for seed in range(CASES):
        rng = Random(f"{family} {seed}")
        tower = dict(config["vision_config"])
        field = rng.choice([name for name, value in tower.items() if not isinstance(value, str)])
        tower[field] = rng.choice((*values.NUMBERS, *values.PLAIN, "text", [], {}))
        (folder / CONFIG).write_text(json.dumps(config | {"vision_config": tower}))
        loaded = load_unread(ModelConfig(str(folder)), lambda stage, fraction: None)
        assert loaded.vision is not None, f"seed {seed}"
        if loaded.encoder is None:
            refused += 1
            assert loaded.vision.refusal
            continue
        with contextlib.suppress(InvalidRequest):
            mx.eval(loaded.encoder(image.arrays, image.tokens))
    assert CASES // 4 < refused < CASES
