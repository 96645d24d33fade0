"""Adapter folders of both formats with something wrong in them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

from mlx_tandem.adapters.formats import CONFIG, WEIGHTS, Format, LinearShape
from tests.fuzz import tensors, values
from tests.fuzz.folders import Case, Change
from tests.fuzz.tensors import Tensors, tensor

HIDDEN = 12
"""Numbers of a hidden state, which a score head has."""

FILES = (CONFIG, *WEIGHTS.values(), "adapter_model.bin", "adapter_model.pt", "adapters.npz")


def valid(rng: Random, linears: Mapping[str, LinearShape], hidden: int = HIDDEN) -> tuple[Case, Tensors]:
    """A folder that is right for hidden states of so many numbers, and its tensors."""
    kind: Format = rng.choice(("mlx-lm", "peft"))
    rank = rng.choice((1, 2, 4, 8))
    chosen = rng.sample(sorted(linears), rng.randint(1, min(3, len(linears))))
    dtype = rng.choice(("F32", "F32", "F16", "BF16"))
    numbers = np.random.default_rng(rng.getrandbits(32))
    found: Tensors = {}
    for path in chosen:
        shape = linears[path]
        experts = (shape.experts,) if shape.experts else ()
        a = numbers.standard_normal((*experts, rank, shape.inputs)) * 0.1
        b = numbers.standard_normal((*experts, shape.outputs, rank)) * 0.1
        if kind == "peft":
            found[f"base_model.model.{path}.lora_A.weight"] = tensor(a, dtype)
            found[f"base_model.model.{path}.lora_B.weight"] = tensor(b, dtype)
        else:
            found[f"{path}.lora_a"] = tensor(a if experts else a.swapaxes(-1, -2), dtype)
            found[f"{path}.lora_b"] = tensor(b if experts else b.swapaxes(-1, -2), dtype)
    config = _peft(rng, rank) if kind == "peft" else _mlx_lm(rng, rank)
    if kind == "peft" and rng.random() < 0.3:  # a reward model
        found["base_model.model.score.weight"] = tensor(numbers.standard_normal((1, hidden)), dtype)
        saved = rng.choice((["score"], ["classifier", "score"], None))
        config |= {"task_type": "SEQ_CLS", "modules_to_save": saved}
    return Case({CONFIG: json.dumps(config).encode(), WEIGHTS[kind]: tensors.written(found)}), found


def _peft(rng: Random, rank: int) -> dict[str, Any]:
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"]}
    more: dict[str, Any] = {
        "bias": "none",
        "use_rslora": rng.random() < 0.5,
        "rank_pattern": {"no_such_proj": 1, "down_proj": rank},
        "alpha_pattern": {"q_proj": 3, "^model.x": 4.5},
        "modules_to_save": None,
        "layers_to_transform": None,
        "init_lora_weights": True,
        "base_model_name_or_path": "org/name",
        "use_dora": False,
        "lora_dropout": 0.05,
        "task_type": "CAUSAL_LM",
    }
    return config | {key: value for key, value in more.items() if rng.random() < 0.6}


def _mlx_lm(rng: Random, rank: int) -> dict[str, Any]:
    parameters = {"rank": rank, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config: dict[str, Any] = {"fine_tune_type": "lora", "lora_parameters": parameters}
    more = {"num_layers": -1, "model": "x", "lr_schedule": {"name": "cosine", "arguments": [1e-5, 10]}, "seed": 0}
    return config | {key: value for key, value in more.items() if rng.random() < 0.6}


def broken(rng: Random, linears: Mapping[str, LinearShape], hidden: int = HIDDEN) -> Case:
    """A folder with one thing wrong, or a few."""
    case, found = valid(rng, linears, hidden)
    weights = next(name for name in case.files if name != CONFIG)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        what = rng.random()
        if what < 0.4 and isinstance(case.files[CONFIG], bytes):
            _change_config(rng, case)
        elif what < 0.45:
            case.spoil(rng, CONFIG)
        elif what < 0.7:
            found, names = tensors.changed(rng, found) if found else (found, ())
            case.put(weights, tensors.written(found), *names)
        elif what < 0.87 and found:
            case.put(weights, tensors.spoiled(rng, found))
        elif what < 0.93:
            case.spoil(rng, weights)
        elif what < 0.98:
            case.replace(rng, rng.choice((CONFIG, weights)))
        else:
            _add(rng, case, weights)
    return case


def _change_config(rng: Random, case: Case) -> None:
    try:
        config = case.json(CONFIG)
    except (ValueError, RecursionError):
        return
    if not isinstance(config, dict):
        return
    if rng.random() < 0.05:  # the same key twice
        name = rng.choice(sorted(config)) if config else "r"
        text = json.dumps(config)
        case.put(CONFIG, f"{{{json.dumps(name)}: 1, {text[1:]}".encode(), name)
        return
    config, names = values.changed(rng, copy.deepcopy(config))
    case.put(CONFIG, config, *names)


def _add(rng: Random, case: Case, weights: str) -> None:
    """Files that are not the ones that are read, beside them or in their place."""
    other = rng.choice([name for name in FILES if name not in (CONFIG, weights)])
    case.files[other] = rng.choice((b"", b"\x80\x04pickle", case.files[weights]))
    case.changes.append(Change(other))
    if rng.random() < 0.5:
        case.files[weights] = "nothing"
