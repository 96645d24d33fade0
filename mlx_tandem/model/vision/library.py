"""Families of vision models, what is used of mlx-vlm, and the language model in a vision model's folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from mlx_tandem.config import ModelConfig
from mlx_tandem.explain import installing
from mlx_tandem.model_folder import VISION_FAMILIES, text_settings


def has_images(settings: Mapping[str, Any]) -> bool:
    """Return whether a folder with these settings describes a part for images."""
    return bool(settings.get("vision_config"))


def refusal(config: ModelConfig, settings: Mapping[str, Any], *, installed: bool) -> str:
    """Return why the images of a folder with these settings are not served, in words; empty if they are."""
    family = settings["model_type"]
    if family not in VISION_FAMILIES:
        return f"images of model_type {family!r} are not served here"
    if way := text_settings(settings).get("use_bidirectional_attention"):
        return (
            f"tokens of an image attend to later ones in this model (use_bidirectional_attention is {way!r}), which is "
            "not served here"
        )
    if not installed:
        return f"images need the extra `vision`: {installing('vision')}"
    if config.random_weights:
        return "images are not served with random weights"
    return "" if config.images else "images are turned off (--no-images, or several ranks)"


PACKAGE = "mlx_vlm"

_PROCESSORS = ("processing", "processor", "image_processing", "image_processor")
"""First words of the names of modules that prepare images on the host, which is done in another process."""


def is_installed() -> bool:
    """Return whether mlx-vlm is there, without importing any of it."""
    return find_spec(PACKAGE) is not None


def family(name: str) -> Any:
    """Return the module of a family: its `Model`, its `ModelConfig` and the configurations of its parts.

    Raises ImportError.
    """
    if PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = _empty_package()
    finder = _WithoutProcessors()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(f"{PACKAGE}.models.{name}")
    finally:
        sys.meta_path.remove(finder)


def _empty_package() -> ModuleType:
    """Return the package without its own contents, so that its modules can be imported alone.

    What mlx-vlm imports in its `__init__` takes many seconds and packages that are not needed here.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("mlx-vlm is not installed")
    return module_from_spec(spec)  # with a spec, so that `find_spec` still answers for the package


class _Unused:
    """Stand-in for every name of a module that is left out."""


class _Nothing(ModuleType):
    """A module that has a stand-in under every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused


class _WithoutProcessors(MetaPathFinder, Loader):
    """Finds a `_Nothing` for the modules of families that are named like processors, which import transformers."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module that is left out, None for any other."""
        package, _, name = fullname.rpartition(".")
        if package.startswith(f"{PACKAGE}.models.") and name.startswith(_PROCESSORS):
            return spec_from_loader(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, since the module has no contents."""


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
