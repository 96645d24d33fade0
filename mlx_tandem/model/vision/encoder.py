"""The encoder of a vision model: mlx-vlm's modules for images, without its language model.

A family's model in mlx-vlm computes the embeddings of a prompt, in which those of images replace those of placeholders.
Here it is given a prompt of placeholders only, and an embedding table of zeros in place of the language model. So it
returns the image's embeddings, projected and scaled as the family does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from safetensors.numpy import load

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.model.vision import library
from mlx_tandem.model_folder import VISION_FAMILIES, VisionFamily, text_settings
from mlx_tandem.types import Image

_PARTS = ("text", "vision", "projector")
"""The parts of a model that have a configuration of their own in config.json."""


AXES = 3
"""Time, line and column."""


def consecutive(sections: Sequence[int]) -> list[int]:
    """Return the axis of each frequency if those of the time come first, then those of lines, then those of columns.

    sections: the number of frequencies of each axis.
    """
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


def alternating(sections: Sequence[int]) -> list[int]:
    """Return the axis of each frequency if the axes take turns.

    Where lines or columns have no frequency left, the frequency belongs to the time. sections: as above.
    """
    turns = [n % AXES for n in range(sum(sections))]
    return [axis if n < AXES * sections[axis] else 0 for n, axis in enumerate(turns)]


ORDERS: Mapping[str, Callable[[Sequence[int]], list[int]]] = {"consecutive": consecutive, "alternating": alternating}
"""The functions that return the axis of each frequency, by the orders that `VisionFamily.axes` names."""


class _NoLanguageModel(nn.Module):
    """A stand-in for the language model, whose embeddings are zeros."""

    embed_scale = 1.0
    hidden_size_per_layer_input = 0

    def __init__(self, width: int, dtype: mx.Dtype):
        super().__init__()
        self._width, self._dtype = width, dtype

    @property
    def model(self) -> _NoLanguageModel:
        """The part that holds the embeddings, in families that nest it."""
        return self

    def embed_tokens(self, ids: mx.array) -> mx.array:
        """Return zeros [rows, length, width]."""
        return mx.zeros((*ids.shape, self._width), self._dtype)

    def get_rope_index(self, *_: object) -> tuple[None, None]:
        """Return no positions, since `positions_of` computes them."""
        return None, None


class Encoder:
    """The part of a model that turns images into embeddings.

    Attributes:
        module: The modules, with their weights.
        image_token: The id of placeholders of images in prompts.
        video_token: The id of placeholders of videos; -1 if the family or the folder has none.
        axes: The axis of each frequency, as in `AxisPositions`; empty if positions have one axis.
        depth: Number of first layers of the language model after which further embeddings are added at placeholders.
        width: The length of an embedding.
    """

    def __init__(self, module: Any, config: Any, dtype: mx.Dtype, family: VisionFamily):
        """Create it. `config`: mlx-vlm's configuration of the folder."""
        self.module: nn.Module = module
        axes = ORDERS[family.axes](_sections(config.text_config)) if family.axes else ()
        self.axes = axes
        self.image_token = _token(config, "image")
        self.video_token = _token(config, "video", -1) if family.videos else -1
        self.width: int = config.text_config.hidden_size
        self.depth = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        self._dtype = dtype
        # The factor by which mlx-lm's code multiplies the embeddings of images, although the family does not.
        self._scale = self.width**0.5 if family.unscaled else 1.0
        # Patches on each side of a square that becomes one token.
        self._merged: int = config.vision_config.spatial_merge_size if axes else 1
        self._channels: int = config.vision_config.in_channels if axes else 0
        self._frames: int = config.vision_config.temporal_patch_size if axes else 1

    def room(self, nbytes: int) -> int:
        """Return how many embeddings fit into so many bytes."""
        return nbytes // ((1 + self.depth) * self.width * self._dtype.size)

    def columns(self, image: Image) -> int:
        """Return how many columns the grid of an image's tokens has if positions have several axes, else 0.

        Raises InvalidRequest if the grid does not have `image.tokens` tokens.
        """
        if not self.axes:
            return 0
        try:
            arrays = load(image.arrays)
            name = "video_grid_thw" if "video_grid_thw" in arrays else "image_grid_thw"
            ((time, height, width),) = arrays[name].tolist()
        except Exception as e:
            raise InvalidRequest("the image has no image_grid_thw of its own", param="images") from e
        lines, columns = height // self._merged, width // self._merged
        if time != 1 or columns < 1 or lines * columns != image.tokens:
            raise InvalidRequest(f"the image's grid does not have {image.tokens} tokens", param="images")
        return int(columns)

    def __call__(self, arrays: bytes, tokens: int) -> mx.array:
        """Return the embeddings [tokens, (1 + depth) · width] of an image, which are not evaluated yet.

        The first `width` columns replace the embeddings of placeholders; the others are added after each of the first
        layers. arrays: as in `types.Image`. Raises InvalidRequest if the image does not fit the model.
        """
        model: Any = self.module
        try:
            given = {name: mx.array(array) for name, array in load(arrays).items()}
            if "pixel_values_videos" in given:  # A group of frames is computed like an image, but its frames differ.
                pixels, given["image_grid_thw"] = given.pop("pixel_values_videos"), given.pop("video_grid_thw")
            else:
                pixels = given.pop("pixel_values")
                if self.axes:
                    pixels = _every_frame(pixels, self._channels, self._frames)
            ids = mx.full((1, tokens), self.image_token, mx.int32)
            found = model.get_input_embeddings(ids, pixels, mask=mx.ones((1, tokens), mx.int32), **given)
            deeper = found.deepstack_visual_embeds
            parts = [found.inputs_embeds[0] / self._scale, *([] if deeper is None else deeper)]
            embeddings = mx.concatenate(parts, axis=-1).astype(self._dtype)
        except Exception as e:  # mlx-vlm trusts what the processor gave
            raise InvalidRequest(f"the image does not fit the model ({type(e).__name__}: {e})", param="images") from e
        if embeddings.shape != (tokens, (1 + self.depth) * self.width):
            raise InvalidRequest(f"the image does not fill its {tokens} placeholders", param="images")
        return embeddings


def _every_frame(patches: mx.array, channels: int, frames: int) -> mx.array:
    """Return patches [patches, channels · frames · pixels] that have the only frame of the given ones in all frames."""
    one = patches.reshape(len(patches), channels, 1, -1)
    return mx.repeat(one, frames, axis=2).reshape(len(patches), -1)


def load_encoder(settings: Mapping[str, Any], stored: dict[str, mx.array], dtype: mx.Dtype) -> Encoder:
    """Return the encoder of a folder, whose weights are not read yet.

    Args:
        settings: The contents of config.json.
        stored: All weights of the folder by their names there.
        dtype: The type that the language model computes in.

    Raises whatever mlx-vlm raises about a folder that does not fit.
    """
    family = library.family(settings["model_type"])
    config = _config(family, settings)
    module = family.Model(config)
    own = _own_weights(family, module, config, stored)
    module.language_model = _NoLanguageModel(config.text_config.hidden_size, dtype)
    _quantise(module, settings, own)
    module.load_weights(list(own.items()))
    module.update(
        tree_map_with_path(
            lambda _, p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p, module.parameters()
        )
    )
    module.eval()
    return Encoder(module, config, dtype, VISION_FAMILIES[settings["model_type"]])


def _sections(text: Any) -> list[int]:
    """Return how many frequencies of the language model's ropes belong to each axis of positions."""
    rope = getattr(text, "rope_scaling", None) or getattr(text, "rope_parameters", None)
    sections: Any = (rope or {}).get("mrope_section")
    if not isinstance(sections, list) or len(sections) != AXES:
        raise ValueError(f"mrope_section of the language model's ropes must have {AXES} numbers")
    return sections


def _config(family: Any, settings: Mapping[str, Any]) -> Any:
    """Return mlx-vlm's configuration of a folder."""
    given = {name: value for name, value in settings.items() if name != "audio_config"}  # sound is not served
    text = given["text_config"] = text_settings(settings)
    if "image_token_id" in given:
        given.setdefault("image_token_index", given["image_token_id"])
    # gemma3 scales its embeddings by hidden_size, and mlx-vlm's default is right for one size of the model only.
    given.setdefault("hidden_size", text.get("hidden_size"))
    config = family.ModelConfig.from_dict(dict(given))  # some families change what they are given
    for part in _PARTS:
        name = f"{part}_config"
        if hasattr(config, name) and given.get(name) is not None:
            setattr(config, name, getattr(family, f"{part.title()}Config").from_dict(given[name]))
    return config


def _token(config: Any, kind: str, missing: int | None = None) -> int:
    """Return the id of placeholders of a kind, "image" or "video", or `missing` if the configuration has none.

    Raises ValueError if the id is not that of a token, or if it is missing and `missing` is None.
    """
    token = getattr(config, f"{kind}_token_index", None)
    token = getattr(config, f"{kind}_token_id", None) if token is None else token
    token = missing if token is None else token
    if type(token) is not int or (token < 0 and token != missing):
        raise ValueError(f"{kind}_token_index is missing")
    return token


def _own_weights(family: Any, module: nn.Module, config: Any, stored: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return a folder's weights without the language model's, with the names and shapes of mlx-vlm's modules."""
    for part in (module, family.VisionModel(config.vision_config)):
        if hasattr(part, "sanitize"):
            stored = part.sanitize(stored)
    parts = {name for name in module if name != "language_model"}
    # Newer folders have all parts below a module `model`, which not every family's `sanitize` takes away.
    names = {name: name if name.partition(".")[0] in parts else name.removeprefix("model.") for name in stored}
    return {names[name]: w for name, w in stored.items() if names[name].partition(".")[0] in parts}


def _quantise(module: nn.Module, settings: Mapping[str, Any], own: dict[str, mx.array]) -> None:
    """Quantise the modules whose weights are quantised in the folder."""
    if how := settings.get("quantization"):

        def is_packed(path: str, m: nn.Module) -> bool | dict[str, Any]:
            if f"{path}.scales" not in own:
                return False
            special = how.get(path)
            return special if isinstance(special, dict) else hasattr(m, "to_quantized")

        nn.quantize(
            module,
            group_size=how["group_size"],
            bits=how["bits"],
            mode=how.get("mode", "affine"),
            class_predicate=is_packed,
        )
