"""Model folders with a head for multi-token prediction, and what such a head predicts by mlx-lm's own modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from tests import tiny_models

EPS = 1e-6


@dataclass(frozen=True)
class Names:
    """Where a family keeps its head: the beginning of the names, the two norms in the order in which their results are
    joined, the joining linear, and the last norm."""

    prefix: str
    norms: tuple[str, str]
    hidden_first: bool
    join: str
    last: str
    block: str  # the class of a layer
    changes: Mapping[str, Any] = field(default_factory=dict)


_LATE = ("model.layers.{layers}.", ("enorm", "hnorm"), False, "eh_proj", "shared_head.norm")
_EXPERTS = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}

NAMES = {
    "mimo": Names(
        "model.mtp_layers.0.",
        ("hidden_layernorm", "token_layernorm"),
        True,
        "input_proj",
        "final_layernorm",
        "TransformerBlock",
    ),
    "glm4_moe": Names(*_LATE, "DecoderLayer", _EXPERTS | {"rope_scaling": None, "use_qk_norm": True}),
    "glm4_moe_lite": Names(*_LATE, "Glm4MoeLiteDecoderLayer"),
    # mlx-lm takes the layer of this number for the head.
    "deepseek_v3": Names(*_LATE, "DeepseekV3DecoderLayer", {"num_hidden_layers": 61}),
}


def settings(family: str) -> dict[str, Any]:
    """The contents of a config.json."""
    return tiny_models.settings(family, **NAMES[family].changes)


def prefix(family: str) -> str:
    """The beginning of the names of a head's weights."""
    return NAMES[family].prefix.format(layers=settings(family)["num_hidden_layers"])


def make(folder: Path, family: str, *, seed: int = 1, **changes: Any) -> Path:
    """Write a folder with a head whose weights are random."""
    names = NAMES[family]
    tiny_models.make(folder, family, seed=seed, **names.changes, **changes)
    file = folder / "model.safetensors"
    stored: Any = mx.load(str(file))
    mx.save_safetensors(str(file), stored | _weights(family, seed), {"format": "mlx"})
    return folder


def _weights(family: str, seed: int) -> dict[str, mx.array]:
    """A head's weights by the names that checkpoints give them, in which each expert has its own."""
    names, rng, given = NAMES[family], np.random.default_rng(1000 + seed), settings(family)
    parameters: Any = tree_flatten(_layer(family).parameters())
    width, own = given["hidden_size"], {}
    for name, p in parameters:
        drawn = tiny_models._draw(rng, name, p)
        if ".switch_mlp." in name:
            before, after = name.split("switch_mlp.")
            own |= {f"{before}experts.{e}.{after}": drawn[e] for e in range(len(drawn))}
        elif "embed_q" not in name and "unembed_out" not in name:
            own[name] = drawn
    if "qk_nope_head_dim" in given:  # mlx-lm divides this linear into those two
        rows = given["num_attention_heads"] * (given["qk_nope_head_dim"] + given["v_head_dim"])
        own["self_attn.kv_b_proj.weight"] = _matrix(rng, rows, given["kv_lora_rank"])
    for norm in (*names.norms, names.last):
        own[f"{norm}.weight"] = tiny_models._draw(rng, norm, mx.zeros(width))
    own[f"{names.join}.weight"] = _matrix(rng, width, 2 * width)
    own["embed_tokens.weight"] = mx.zeros((3, 3))  # a copy that nobody reads
    return {prefix(family) + name: array for name, array in own.items()}


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> mx.array:
    return tiny_models._draw(rng, "matrix", mx.zeros((rows, columns)))


def _layer(family: str) -> Any:
    """A layer of the head's kind, which has experts where some layers of the family have."""
    module, names = tiny_models.module_of(family), NAMES[family]
    args = module.ModelArgs.from_dict(settings(family))
    return getattr(module, names.block)(*((args,) if family == "mimo" else (args, 1)))


class Expected:
    """What the head of a folder predicts, computed over a whole sequence at once."""

    def __init__(self, folder: Path, family: str):
        self._names = NAMES[family]
        self._model: Any
        self._model, _ = load_model(folder)
        stored: Any = mx.load(str(folder / "model.safetensors"))
        own = {name.removeprefix(prefix(family)): a for name, a in stored.items() if name.startswith(prefix(family))}
        self._own = {
            name: own.pop(f"{name}.weight") for name in (*self._names.norms, self._names.join, self._names.last)
        }
        del own["embed_tokens.weight"]
        self._layer = _layer(family)
        module, first = tiny_models.module_of(family), "model.layers.0."
        one = module.Model(module.ModelArgs.from_dict(settings(family) | {"num_hidden_layers": 1}))
        inner = one.sanitize({first + name: a for name, a in own.items()})
        self._layer.load_weights([(name.removeprefix(first), a) for name, a in inner.items()])

    def after(self, tokens: Sequence[int], allowed: Sequence[int] = range(tiny_models.VOCAB)) -> int:
        """The likeliest of the allowed tokens after these, of which there are two or more."""
        given = mx.array([tokens])
        inner = self._model.model
        hidden, following = inner(given)[:, :-1], inner.embed_tokens(given)[:, 1:]
        both = (hidden, following) if self._names.hidden_first else (following, hidden)
        joined = mx.concatenate(
            [mx.fast.rms_norm(x, self._own[n], EPS) for x, n in zip(both, self._names.norms, strict=True)],
            -1,
        )
        h = joined @ self._own[self._names.join].T
        h = self._layer(h, mx.tril(mx.ones((len(tokens) - 1,) * 2, mx.bool_)), None)
        h = mx.fast.rms_norm(h, self._own[self._names.last], EPS)
        logits = self._model.lm_head(h) if "lm_head" in self._model else inner.embed_tokens.as_linear(h)
        return int(allowed[int(logits[0, -1, mx.array(list(allowed))].argmax().item())])
