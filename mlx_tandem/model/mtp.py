"""Heads for multi-token prediction: the part of some checkpoints that predicts the token after the next.

A head joins the model's last hidden state at a position with the embedding of the token after it, and passes both
through one layer of the model's own kind. The model's output head makes logits of the result, for the token after that
token. mlx-lm leaves the weights of heads out when it loads or converts a checkpoint, so they are read here. A family's
head is described by one `HeadFormat`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.utils import _get_classes

from mlx_tandem.errors import ModelError
from mlx_tandem.model_folder import text_settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """How a family's checkpoints name the weights of their first head.

    Attributes:
        prefix: The beginning of all names; `{layers}` stands for the number of the model's layers.
        token_norm, hidden_norm: The norms of the two inputs.
        join: The linear from both inputs to the layer's width.
        norm: The norm of the result.
        hidden_first: Whether the hidden state is the first of the two inputs of `join`.
        layer: The settings with which a model of one layer has a layer of the head's kind.
        inner: The beginning of the names of the layer's weights, behind `prefix`.
        zero_centred: Whether norms of an original checkpoint are stored less 1, which mlx-lm adds when it loads or
            converts one.
        mask_array: Whether the layer takes its mask as an array only, as layers with latent keys do.
    """

    prefix: str
    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    hidden_first: bool = False
    layer: Mapping[str, Any] = field(default_factory=dict)
    inner: str = ""
    zero_centred: bool = False
    mask_array: bool = False

    @property
    def own(self) -> Mapping[str, str]:
        """The names of the modules of `PredictionHead` by their names in checkpoints."""
        return {self.token_norm: "token_norm", self.hidden_norm: "hidden_norm", self.join: "join", self.norm: "norm"}


_NEXT_LAYER = HeadFormat(
    "model.layers.{layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", layer={"first_k_dense_replace": 0}
)

_LATENT = replace(_NEXT_LAYER, mask_array=True)

_HYBRID = HeadFormat(
    "mtp.",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    layer={"full_attention_interval": 1},
    inner="layers.0.",
    zero_centred=True,
)

FORMATS: Mapping[str, HeadFormat] = {
    "deepseek_v3": _LATENT,
    "glm4_moe": _NEXT_LAYER,
    "glm4_moe_lite": _LATENT,
    "mimo": HeadFormat(
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True
    ),
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID,
    "qwen3_next": _HYBRID,
}
"""The families whose heads can be used, by `model_type`."""

_SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of the model's own embedding and output head, with which the head is used instead."""


_FIRST = "model.layers.0."
"""The beginning of the names of the weights of a model's first layer."""

_CONVOLUTION = "conv1d.weight"
"""The end of the names of the weights of convolutions, which original checkpoints keep with their last axes swapped."""


class PredictionHead(nn.Module):
    """A head over a model's hidden states, with the model's own embedding and output head.

    Args:
        model: The text model that the head belongs to. It is not part of this module's tree.
        layer: The head's layer.
        width: Numbers of a hidden state.
        eps: The norms' epsilon.
        form: The format of the head's family.
    """

    def __init__(self, model: nn.Module, layer: nn.Module, width: int, eps: float, form: HeadFormat):
        super().__init__()
        object.__setattr__(self, "_model", model)
        self.layer: Any = layer
        self.token_norm, self.hidden_norm, self.norm = (nn.RMSNorm(width, eps=eps) for _ in range(3))
        self.join = nn.Linear(2 * width, width, bias=False)
        self.width = width
        self._form = form

    def __call__(self, hidden: mx.array, following: mx.array, cache: Any) -> mx.array:
        """Return hidden states [rows, length, dim], which `logits` takes.

        hidden: [rows, length, dim], the model's last hidden states; following: [rows, length] int32, the token after
        each position, or a negative number where it is not known.
        """
        embedded = self._model.model.embed_tokens(mx.maximum(following, 0))
        token = self.token_norm(mx.where(following[..., None] < 0, 0, embedded))
        both = [self.hidden_norm(hidden), token] if self._form.hidden_first else [token, self.hidden_norm(hidden)]
        mask = create_attention_mask(hidden, cache, return_array=self._form.mask_array)
        h = self.join(mx.concatenate(both, axis=-1))
        found: mx.array = self.norm(self.layer(h, mask, cache))
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits [rows, length, vocabulary] of hidden states that a call returned."""
        own = self._model
        found: mx.array = own.lm_head(hidden) if "lm_head" in own else own.model.embed_tokens.as_linear(hidden)
        return found


def load_head(
    module: nn.Module, settings: Mapping[str, Any], stored: Mapping[str, mx.array], dtype: mx.Dtype, folder: str
) -> PredictionHead:
    """Return the first head of a checkpoint, with its weights unread.

    Args:
        module: The checkpoint's model.
        settings: The contents of its config.json.
        stored: All of its weights by their names in the checkpoint, unread.
        dtype: The type that the model computes in.
        folder: The checkpoint's folder, for errors.

    Raises:
        ModelError: The checkpoint has no heads, or those of its family are not known.
    """
    family = str(settings["model_type"])
    form = FORMATS.get(family)
    if form is None:
        known = ", ".join(sorted(FORMATS))
        raise ModelError(
            f"{folder}: --spec-decode mtp is not supported for the model_type {family!r}; it is for {known}",
            param="method",
        )
    text = text_settings(settings)
    prefix = form.prefix.format(layers=int(text["num_hidden_layers"]))
    own = {name.removeprefix(prefix): array for name, array in stored.items() if name.startswith(prefix)}
    if not own:
        raise ModelError(
            f"{folder} has no heads for --spec-decode mtp: none of its weights is named {prefix}…; converted "
            "checkpoints lack the heads that the original has",
            param="method",
        )
    model_class, args_class = _get_classes(dict(settings))
    one_layer = {**text, **form.layer, "num_hidden_layers": 1}
    one: Any = model_class(
        args_class.from_dict({**settings, "text_config": one_layer} if text is not settings else one_layer)
    )
    is_original = any(name.endswith(_CONVOLUTION) and a.shape[-1] != 1 for name, a in stored.items())
    is_original = is_original or any(".experts." in name for name in own)  # a converted model has them in one array
    parts, inner = _sorted(own, form, less=float(form.zero_centred and is_original))
    # By this convolution mlx-lm sees that norms are stored less 1.
    mark = {f"{_FIRST}linear_attn.{_CONVOLUTION}": mx.zeros((1, 1, 2))} if form.zero_centred and is_original else {}
    inner = one.sanitize({_FIRST + name: array for name, array in inner.items()} | mark)
    eps = next(float(text[name]) for name in ("rms_norm_eps", "layernorm_epsilon") if name in text)
    width = int(text["hidden_size"])
    own_text: Any = getattr(module, "language_model", module)
    head = PredictionHead(own_text, one.layers[0], width, eps, form)
    names = ((name.partition(_FIRST)[2], array) for name, array in inner.items())
    parts |= {f"layer.{name}": array for name, array in names if name and not name.endswith(_CONVOLUTION)}
    if quantization := settings.get("quantization"):
        nn.quantize(
            head,
            int(quantization["group_size"]),
            int(quantization["bits"]),
            class_predicate=lambda path, m: hasattr(m, "to_quantized") and f"{path}.scales" in parts,
        )
    keep = getattr(module, "cast_predicate", lambda _: True)
    cast = [
        (name, a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) and keep(name) else a)
        for name, a in parts.items()
    ]
    head.load_weights(cast)
    head.eval()
    size = sum(a.nbytes for _, a in cast)
    log.info("the weights of the head for multi-token prediction are kept: %s*, %.1f MB", prefix, size / 1e6)
    return head


def _sorted(
    own: Mapping[str, mx.array], form: HeadFormat, *, less: float
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return a head's weights by their names in `PredictionHead`, and those of its layer by their names there.

    less: what is added to the weights of the head's own norms, because the folder stores them less by that.
    """
    parts: dict[str, mx.array] = {}
    inner: dict[str, mx.array] = {}
    for name, array in own.items():
        part, _, leaf = name.rpartition(".")
        if part in form.own:
            parts[f"{form.own[part]}.{leaf}"] = array + less if less and array.ndim == 1 else array
        elif name.startswith(form.inner) and not name.startswith(_SHARED):
            inner[name.removeprefix(form.inner)] = array
    return parts, inner
