"""The language models of vision families that mlx-lm does not know by their own names."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from mlx_tandem.model_folder import text_settings

_PREFIXES = ("model.language_model.", "language_model.", "model.text_model.", "text_model.")
"""Beginnings of the names of the language model's weights in folders of Hugging Face's and mlx-vlm's layout."""


class TextArgs:
    """The settings of the language model of a vision model's folder."""

    def __init__(self, settings: dict[str, Any]):
        tied = settings.get("tie_word_embeddings", False)
        self.text = {"tie_word_embeddings": tied, **text_settings(settings)}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> TextArgs:
        """Return the arguments of a model of the folder with these settings."""
        return cls(settings)


class TextModel(nn.Module):
    """A language model of mlx-lm under the name `language_model`, as mlx-lm's own vision families have it."""

    def __init__(self, args: TextArgs):
        super().__init__()
        model_class, args_class = _get_classes(args.text)
        self.language_model: Any = model_class(args_class.from_dict(args.text))

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Return the logits [rows, length, vocabulary]."""
        logits: mx.array = self.language_model(inputs, cache=cache)
        return logits

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the language model's weights under this module's names."""
        own = {name: w for key, w in weights.items() if (name := _own_name(key)) is not None}
        return {f"language_model.{name}": w for name, w in self.language_model.sanitize(own).items()}

    @property
    def layers(self) -> Any:
        """The layers of the language model."""
        return self.language_model.layers


def _own_name(key: str) -> str | None:
    """Return the name that the language model's class has for a weight of the folder; None if it is not its own."""
    if key.startswith("lm_head."):
        return key
    prefix = next((p for p in _PREFIXES if key.startswith(p)), None)
    if prefix is None:
        return None
    name = key.removeprefix(prefix)
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"
