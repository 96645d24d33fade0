"""Model folders with something wrong in their settings or weights."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_type_hints

from safetensors import safe_open

from mlx_tandem import limits
from tests import tiny_families, tiny_models
from tests.fuzz import tensors, values
from tests.fuzz.folders import Case
from tests.fuzz.tensors import Tensor, Tensors

CONFIG, WEIGHTS, INDEX, DEFAULTS = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "generation_config.json",
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = (CONFIG, WEIGHTS, INDEX, DEFAULTS, *SHARDS, "*.safetensors")
FAMILIES = ("qwen3", "llama", "mixtral", "gemma2", "gpt2")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "head_dim": 8, "n_embd": 32}


@cache
def _made(family: str) -> tuple[dict[str, Any], Tensors]:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.make(Path(folder), family, **SMALL)
        found: Tensors = {}
        with safe_open(path / WEIGHTS, framework="numpy") as f:
            for name in f.keys():  # noqa: SIM118  it is no mapping
                array = f.get_tensor(name)
                found[name] = Tensor("F32", array.shape, array.tobytes())
        return json.loads((path / CONFIG).read_text()), found


@cache
def _typed(family: str) -> frozenset[str]:
    """Settings of which somebody knows what type they have."""
    return frozenset(get_type_hints(tiny_families.module_of(family).ModelArgs)) | limits.MODEL.keys()


def valid(rng: Random) -> tuple[Case, Tensors, str]:
    """A folder that is right, its tensors, and the family."""
    family = rng.choice(FAMILIES)
    config, found = _made(family)
    files: dict[str, Any] = {CONFIG: json.dumps(config).encode()}
    if rng.random() < 0.3:
        half = len(found) // 2
        parts = (dict(list(found.items())[:half]), dict(list(found.items())[half:]))
        files |= {name: tensors.written(part) for name, part in zip(SHARDS, parts, strict=True)}
        places = {name: shard for shard, part in zip(SHARDS, parts, strict=True) for name in part}
        files[INDEX] = json.dumps({"metadata": {"total_size": 1}, "weight_map": places}).encode()
    else:
        files[WEIGHTS] = tensors.written(found)
    files[DEFAULTS] = json.dumps({"eos_token_id": rng.choice((2, [1, 2], None)), "temperature": 0.5}).encode()
    return Case(files), found, family


def broken(rng: Random) -> Case:
    """A folder with one thing wrong, or a few."""
    case, found, family = valid(rng)
    weights = WEIGHTS if WEIGHTS in case.files else SHARDS[0]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        what = rng.random()
        if what < 0.45:
            _change(rng, case, CONFIG, family)
        elif what < 0.5:
            case.spoil(rng, CONFIG)
        elif what < 0.62 and INDEX in case.files:
            _change(rng, case, INDEX, family)
        elif what < 0.67:
            _change(rng, case, DEFAULTS, family)
        elif what < 0.79 and weights == WEIGHTS:
            found, _ = tensors.changed(rng, found)
            case.put(WEIGHTS, tensors.written(found))
        elif what < 0.88 and weights == WEIGHTS:
            case.put(WEIGHTS, tensors.spoiled(rng, found))
        elif what < 0.94:
            case.spoil(rng, weights)
        else:
            case.replace(rng, rng.choice([name for name in case.files if name != DEFAULTS]))
    return case


def _change(rng: Random, case: Case, name: str, family: str) -> None:
    try:
        old = case.json(name)
    except (ValueError, RecursionError, AssertionError):
        return
    if not isinstance(old, dict):
        return
    if name == INDEX and rng.random() < 0.5:
        file = rng.choice(("../model.safetensors", "/etc/passwd", "model-9.safetensors", "", ".", None, 3, SHARDS[1]))
        case.put(INDEX, {"weight_map": {"a": file}})
        return
    numbers = [key for key in limits.MODEL if key in old]
    if name == CONFIG and numbers and rng.random() < 0.3:
        field = rng.choice(numbers)
        new = old | {field: rng.choice(values.NUMBERS)}
    else:
        new, (field, *_) = values.changed(rng, old)
    case.put(name, new, *([field] if name == CONFIG and _is_typed(old, new, field, family) else []))


def _is_typed(old: dict[str, Any], new: dict[str, Any], field: str, family: str) -> bool:
    """Whether a setting is of another type than it was, and somebody knows which it should be."""
    if field not in old or field not in new or field not in _typed(family):
        return False
    was, now = (float if type(tree[field]) is int else type(tree[field]) for tree in (old, new))
    return was is not now and old[field] is not None
