"""The embeddings of images and the positions of their tokens: how they are kept and used in forwards.

Rotary positions have several axes in some families: a token of an image has a time, a line and a column. A token of
text has the same number on all axes. Behind an image this number differs from the token's index, because an image takes
only as many numbers as its longer side has placeholders. The groups of a video's frames have the same lines and
columns, and differ in their times. So each row says by how much its positions are shifted, and rows with images have
three positions for each token. Rows without images or shifts use the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_tandem.engine.plan import Row
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model.vision.encoder import AXES, Encoder
from mlx_tandem.model_folder import CONFIG
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
        backend.current().share_cores(every_core=True)  # as for a prompt of so many tokens
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


# --- Positions with several axes -------------------------------------------------------------------------------------


def positions_of(rows: Sequence[Row], count: int, length: int) -> npt.NDArray[np.int32]:
    """Return the positions [AXES, count, length] of the tokens of rows, padded with 0."""
    positions = np.zeros((AXES, count, length), np.int32)
    for i, row in enumerate(rows):
        own = positions[:, i]
        own[:] = row.start + row.shift + np.arange(length, dtype=np.int32)
        for shown in row.images:
            at, end = shown.at, shown.at + shown.count
            number = np.arange(shown.first, shown.first + shown.count, dtype=np.int32)
            begin = row.start + at - shown.first + shown.shift
            if shown.columns:
                own[:, at:end] = begin
                own[0, at:end] += shown.time
                own[1, at:end] += number // shown.columns
                own[2, at:end] += number % shown.columns
            own[:, end:] = row.start + shown.after + np.arange(end, length, dtype=np.int32)
    return positions


class AxisPositions:
    """The positions of the forward that is being traced, which the ropes of a model read.

    `axes` has the axis of each frequency of a head. The constructor raises ModelError if their number is not that of
    the ropes' frequencies.
    """

    def __init__(self, model: nn.Module, axes: Sequence[int]):
        self._axis_of = mx.array(np.array(axes, np.int32))
        self._given: mx.array | None = None
        self._moved: tuple[mx.array, mx.array] | None = None  # an offset, and that offset with the shifts
        self._made: dict[tuple[int, float, float], tuple[mx.array, mx.array]] = {}
        for module in model.modules():
            if isinstance(module, nn.RoPE):
                rope: Any = module
                if rope.dims != 2 * len(axes):
                    raise ModelError(
                        f"{CONFIG}: mrope_section must add up to {rope.dims // 2}, the frequencies of a head",
                        param="mrope_section",
                    )
                rope._axis_positions = self
                if not isinstance(rope, _AxisRope):
                    mix_in(rope, _AxisRope)

    def bind(self, given: mx.array | None) -> None:
        """Set the positions of the forward that follows.

        given: the shifts of rows [rows], or the positions of tokens [AXES, rows, length]; None: positions are indices.
        """
        self._given, self._moved = given, None
        self._made.clear()

    def turn(self, rope: Any, x: mx.array, offset: Any, plain: Callable[[mx.array, Any], mx.array]) -> mx.array:
        """Return queries or keys x [rows, heads, length, dim], rotated. plain: the rope's own code."""
        if self._given is None:
            return plain(x, offset)
        if self._given.ndim == 1:
            if self._moved is None or self._moved[0] is not offset:
                self._moved = offset, offset + self._given
            return plain(x, self._moved[1])
        cos, sin = self._angles(rope.dims, rope.base, rope.scale)
        half = rope.dims // 2
        a, b = x[..., :half].astype(mx.float32), x[..., half : rope.dims].astype(mx.float32)
        turned = [(a * cos - b * sin).astype(x.dtype), (a * sin + b * cos).astype(x.dtype)]
        return mx.concatenate([*turned, x[..., rope.dims :]], axis=-1)

    def _angles(self, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
        """Return cosines and sines [rows, 1, length, dims / 2] of the tokens' positions."""
        key = dims, base, scale
        if key not in self._made:
            assert self._given is not None
            half = dims // 2
            frequency = mx.exp(mx.array(-np.arange(half, dtype=np.float32)) * (np.log(base).item() / half))
            position = mx.moveaxis(self._given[self._axis_of], 0, -1)[:, None].astype(mx.float32) * scale
            self._made[key] = mx.cos(position * frequency), mx.sin(position * frequency)
        return self._made[key]


class _AxisRope:
    """The mix-in for a rope, which takes its positions from AxisPositions."""

    _axis_positions: AxisPositions

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Return x [rows, heads, length, dim], rotated."""
        return self._axis_positions.turn(self, x, offset, super().__call__)  # type: ignore[misc]
