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

from tests import tiny_families, tiny_models

EPS = 1e-6

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")

_LESS_ONE = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
"""The norms that mlx-lm adds 1 to."""


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
    inner: str = ""  # the beginning of the names of the layer's weights, behind the prefix


_LATE = ("model.layers.{layers}.", ("enorm", "hnorm"), False, "eh_proj", "shared_head.norm")
_HYBRID = ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden"), False, "fc", "norm")
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
    "qwen3_next": Names(*_HYBRID, "Qwen3NextDecoderLayer", inner="layers.0."),
    "qwen3_5": Names(*_HYBRID, "DecoderLayer", inner="layers.0."),
    "qwen3_5_moe": Names(*_HYBRID, "DecoderLayer", inner="layers.0."),
}


def settings(family: str) -> dict[str, Any]:
    """The contents of a config.json."""
    return tiny_families.settings(family, **NAMES[family].changes)


def prefix(family: str) -> str:
    """The beginning of the names of a head's weights."""
    return NAMES[family].prefix.format(layers=settings(family)["num_hidden_layers"])


def make(folder: Path, family: str, *, seed: int = 1, **changes: Any) -> Path:
    """Write a folder with a head whose weights are random."""
    names = NAMES[family]
    tiny_models.make(folder, family, seed=seed, **names.changes, **changes)
    file = folder / "model.safetensors"
    stored: Any = mx.load(str(file))
    if family in HYBRIDS:
        stored = _original(family, stored)
    mx.save_safetensors(str(file), stored | _weights(family, seed), {"format": "mlx"})
    return folder


def _original(family: str, stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The weights of a hybrid as its authors store them: norms less 1, convolutions with two axes swapped, and each
    expert by itself, or gates and inputs of all experts in one array."""
    found: dict[str, mx.array] = {}
    for name, array in stored.items():
        before, _, after = name.partition("switch_mlp.")
        if name.endswith("conv1d.weight"):
            found[name] = array.moveaxis(1, 2)
        elif name.endswith(_LESS_ONE):
            found[name] = array - 1
        elif after and family == "qwen3_next":
            found |= {f"{before}experts.{e}.{after}": array[e] for e in range(len(array))}
        elif after.startswith("gate_proj"):
            both = [array, stored[f"{before}switch_mlp.up_proj.weight"]]
            found[f"{before}experts.gate_up_proj"] = mx.concatenate(both, axis=-2)
        elif after.startswith("down_proj"):
            found[f"{before}experts.down_proj"] = array
        elif not after:
            found[name] = array
    return found


def converted(folder: Path, original: Path) -> Path:
    """Write the folder of a dense hybrid as a converter that keeps the head does."""
    folder.mkdir()
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    stored: Any = mx.load(str(original / "model.safetensors"))
    found = {
        name: a.moveaxis(1, 2) if name.endswith("conv1d.weight") else a + _is_less(name) for name, a in stored.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), found, {"format": "mlx"})
    return folder


def _is_less(name: str) -> int:
    """What a hybrid's weight is stored less of in an original checkpoint."""
    return int(name.endswith(_LESS_ONE) or (name.startswith("mtp.") and "norm" in name))


def _weights(family: str, seed: int) -> dict[str, mx.array]:
    """A head's weights by the names that checkpoints give them, in which each expert has its own."""
    names, rng, given = NAMES[family], np.random.default_rng(1000 + seed), settings(family)
    parameters: Any = tree_flatten(_layer(family).parameters())
    width, own, fused = given["hidden_size"], {}, {}
    for name, p in parameters:
        drawn = tiny_models._draw(rng, name, p) - _less(family, p)
        if ".switch_mlp." in name and family == "qwen3_5_moe":
            fused[name.split(".")[-2]] = drawn
        elif ".switch_mlp." in name:
            before, after = name.split("switch_mlp.")
            own |= {f"{before}experts.{e}.{after}": drawn[e] for e in range(len(drawn))}
        elif "embed_q" not in name and "unembed_out" not in name:
            own[name] = drawn
    if "qk_nope_head_dim" in given:  # mlx-lm divides this linear into those two
        rows = given["num_attention_heads"] * (given["qk_nope_head_dim"] + given["v_head_dim"])
        own["self_attn.kv_b_proj.weight"] = _matrix(rng, rows, given["kv_lora_rank"])
    own = {names.inner + name: array for name, array in own.items()}
    if fused:
        both = mx.concatenate([fused["gate_proj"], fused["up_proj"]], axis=-2)
        own |= {f"{names.inner}mlp.experts.gate_up_proj": both}
        own |= {f"{names.inner}mlp.experts.down_proj": fused["down_proj"]}
    for norm in (*names.norms, names.last):
        own[f"{norm}.weight"] = tiny_models._draw(rng, norm, mx.zeros(width)) - _less(family, mx.zeros(width))
    own[f"{names.join}.weight"] = _matrix(rng, width, 2 * width)
    own["embed_tokens.weight"] = mx.zeros((3, 3))  # a copy that nobody reads
    return {prefix(family) + name: array for name, array in own.items()}


def _less(family: str, p: mx.array) -> float:
    """What a head's weight is stored less of."""
    return float(family in HYBRIDS and p.ndim == 1)


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> mx.array:
    return tiny_models._draw(rng, "matrix", mx.zeros((rows, columns)))


def _layer(family: str) -> Any:
    """A layer of the head's kind, which has experts where some layers of the family have."""
    module, names = tiny_families.module_of(family), NAMES[family]
    args = module.ModelArgs.from_dict(settings(family))
    if family.startswith("qwen3_5"):
        module = tiny_families.module_of("qwen3_5")
        args = module.TextModelArgs.from_dict(args.text_config)
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
        self._own = {name: a + _less(family, a) for name, a in self._own.items()}
        del own["embed_tokens.weight"]
        self._layer = _layer(family)
        module, first = tiny_families.module_of(family), "model.layers.0."
        one = module.Model(module.ModelArgs.from_dict(settings(family) | {"num_hidden_layers": 1}))
        mark = {f"{first}conv1d.weight": mx.zeros((1, 1, 2))} if _less(family, mx.zeros(1)) else {}
        inner = one.sanitize({first + name.removeprefix(self._names.inner): a for name, a in own.items()} | mark)
        named = [(name.partition(first)[2], a) for name, a in inner.items()]
        self._layer.load_weights([(name, a) for name, a in named if name != "conv1d.weight"])

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
        text = getattr(self._model, "language_model", self._model)
        logits = text.lm_head(h) if "lm_head" in text else inner.embed_tokens.as_linear(h)
        return int(allowed[int(logits[0, -1, mx.array(list(allowed))].argmax().item())])
