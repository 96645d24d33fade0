"""The embeddings of images: how they are kept on the device and used in forwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_tandem.engine.plan import Row
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model.vision.encoder import Encoder
from mlx_tandem.model.vision.positions import AxisPositions, positions_of
from mlx_tandem.types import Image

ROOM_BYTES = 128 << 20
"""Most bytes of embeddings that are kept. An image of 4,096 tokens takes 32 MiB in a 16-bit model of width 4,096."""


class Embeddings:
    """The embeddings of the images that the scheduler keeps, by the images' digests; without `encoder`, none."""

    def __init__(self, encoder: Encoder | None):
        self._encoder = encoder
        self._of: dict[bytes, mx.array] = {}

    def encode(self, image: Image) -> None:
        """Compute the embeddings of an image, wait until they are computed, and keep them.

        Raises InvalidRequest if the image does not fit the model, and RuntimeError if MLX fails.
        """
        assert self._encoder is not None, "a server without an encoder refuses images"
        embeddings = self._encoder(image.arrays, image.tokens)
        mx.eval(embeddings)
        self._of[image.digest] = embeddings

    def drop(self, digests: Iterable[bytes]) -> None:
        """Drop the embeddings of these images. An image that could not be encoded has none."""
        for digest in digests:
            self._of.pop(digest, None)

    def clear(self) -> None:
        """Drop all embeddings."""
        self._of.clear()

    def of(self, rows: Sequence[Row], count: int, length: int) -> list[mx.array]:
        """Return what `ShownImages.bind` takes for a forward of these rows, padded to `count` rows of `length` tokens.

        Call it only if a row shows an image or has shifted positions.
        """
        if not any(row.images for row in rows):
            return [mx.array(np.array([row.shift for row in rows] + [0] * (count - len(rows)), np.int32))]
        digests = list(dict.fromkeys(shown.image for row in rows for shown in row.images))
        begins, end = {}, 0
        for digest in digests:
            begins[digest] = end
            end += len(self._of[digest])
        index = np.full((count, length), -1, np.int32)
        for i, row in enumerate(rows):
            for shown in row.images:
                first = begins[shown.image] + shown.first
                index[i, shown.at : shown.at + shown.count] = np.arange(first, first + shown.count)
        source = mx.concatenate([self._of[digest] for digest in digests])
        given = [source[mx.array(np.maximum(index, 0))], mx.array(index >= 0)]
        if self._encoder is not None and self._encoder.axes:
            given.append(mx.array(positions_of(rows, count, length)))
        return given


class ShownImages:
    """The images of the forward that is being traced. The model's embedding of tokens returns theirs at placeholders.

    If the encoder also makes embeddings for the first layers, these layers add them to their outputs.
    """

    def __init__(self, model: nn.Module, encoder: Encoder):
        """Change the model's embedding of tokens, and its ropes and first layers if the encoder needs that."""
        self._given: Sequence[mx.array] = ()
        self._positions = AxisPositions(model, encoder.axes) if encoder.axes else None
        owner: Any = model
        for number in range(encoder.depth):
            layer: Any = owner.layers[number]
            layer._shown_images, layer._number = self, number
            if not isinstance(layer, _ImageLayer):
                mix_in(layer, _ImageLayer)
        for _, module in model.named_modules():
            embedding: Any = module.get("embed_tokens") if isinstance(module, dict) else None
            if embedding is not None:
                self._mix(embedding, _ImageEmbedding)
                if (deeper := module.get("embed_tokens_per_layer")) is not None:
                    self._mix(deeper, _PlainEmbedding)
                return

    def _mix(self, embedding: Any, kind: type) -> None:
        """Mix `kind` into an embedding of tokens, which then reads these images."""
        embedding._shown_images = self
        if not isinstance(embedding, kind):
            mix_in(embedding, kind)

    def bind(self, given: Sequence[mx.array]) -> None:
        """Set what the forward that follows shows.

        given: nothing, or the embeddings [rows, length, …] and a mask [rows, length] of the tokens that they replace.
        If positions differ from indices, the array that `AxisPositions.bind` takes comes last.
        """
        self._given = given[:2] if len(given) > 1 else ()
        if self._positions is not None:
            self._positions.bind(given[-1] if len(given) % 2 else None)

    def put(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens [rows, length, width], with those of images at their placeholders."""
        if not self._given:
            return tokens
        images, where = self._given
        return mx.where(where[..., None], images[..., : tokens.shape[-1]].astype(tokens.dtype), tokens)

    def hide(self, ids: mx.array) -> mx.array:
        """Return the ids of tokens [rows, length], with 0 at placeholders."""
        return mx.where(self._given[1], 0, ids) if self._given else ids

    def add(self, number: int, hidden: mx.array) -> mx.array:
        """Return the output [rows, length, width] or [tokens, width] of layer `number` with what images add to it."""
        if not self._given:
            return hidden
        images, where = self._given
        width = hidden.shape[-1]
        own = images[..., (1 + number) * width : (2 + number) * width].astype(hidden.dtype).reshape(hidden.shape)
        return mx.where(where.reshape(hidden.shape[:-1])[..., None], hidden + own, hidden)


class _ImageLayer:
    """The mix-in for a layer after which images are added."""

    _shown_images: ShownImages
    _number: int

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """Return the layer's output with what images add to it."""
        return self._shown_images.add(self._number, super().__call__(*args, **kwargs))  # type: ignore[misc]


class _ImageEmbedding:
    """The mix-in for a model's embedding of tokens."""

    _shown_images: ShownImages

    def __call__(self, x: mx.array) -> mx.array:
        """Return the embeddings of tokens x [rows, length], with those of images at their placeholders."""
        return self._shown_images.put(super().__call__(x))  # type: ignore[misc]


class _PlainEmbedding:
    """The mix-in for the embedding of tokens that each layer of Gemma 4 reads, which has no embeddings of images.

    It takes placeholders for padding, whose id is 0.
    """

    _shown_images: ShownImages

    def __call__(self, x: mx.array) -> mx.array:
        """Return the embeddings of tokens x [rows, length]."""
        embeddings: mx.array = super().__call__(self._shown_images.hide(x))  # type: ignore[misc]
        return embeddings
