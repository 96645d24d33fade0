"""The paged KV cache as mlx-lm's own model modules see it: one cache object a layer, arrays of the whole pool.

A layer's keys live in one array [kv_heads · blocks · block_size, head_dim], head-major: the run of one head's block is
contiguous, which a gather reads ten times faster on a CPU than token-major. The layer's own code calls
`update_and_fetch`, which writes into the pool and returns the keys and values of the rows' block tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_tandem.model.attention import portable


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches: heads and widths of keys and of values (they differ in latent attention)."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: mx.Dtype

    def bytes_per_token(self) -> int:
        return (self.key_heads * self.key_dim + self.value_heads * self.value_dim) * self.dtype.size


Masks = dict[tuple[int, int | None], mx.array]
"""Made by the first layer that asks, for (length, window); shared by all layers of one forward."""


@dataclass(slots=True)
class StepView:
    """What all layers share in one forward of a rectangle of rows [rows, length].

    offset: [rows] int32, the position of each row's first token; slots: [rows, length] int32, where in a head's run
    each token goes; tables: [rows, blocks] int32; view: or instead of tables, the (first, last) block of the one row,
    whose blocks are contiguous, so that its keys are read in place.
    """

    offset: mx.array
    slots: mx.array
    tables: mx.array | None
    view: tuple[int, int] | None
    block_size: int
    mask_axes: int  # axes of a mask between rows and queries: 1, or 2 for families that group queries by KV head

    def positions(self) -> int:
        """How many key positions the layers return."""
        if self.view is not None:
            return (self.view[1] - self.view[0]) * self.block_size
        assert self.tables is not None
        return self.tables.shape[1] * self.block_size

    def mask(self, length: int, window: int | None) -> mx.array:
        """[rows, 1 (, 1), length, positions] bool: each query sees what is not after it (nor before its window)."""
        key = mx.arange(self.positions())
        query = self.offset[:, None, None] + mx.arange(length)[None, :, None]
        mask = key <= query
        if window is not None:
            mask = mask & (key > query - window)
        return mx.expand_dims(mask, tuple(range(1, 1 + self.mask_axes)))


class PagedCache:
    """One layer's share of the pool, bound anew for each forward: arrays are arguments of the step, never captured."""

    def __init__(self, shape: LayerShape, num_blocks: int):
        self.shape = shape
        self._stride = num_blocks
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.view: StepView | None = None
        self.attend_calls = 0
        self._masks: Masks = {}

    def bind(self, keys: mx.array, values: mx.array, view: StepView, masks: Masks) -> None:
        self.keys, self.values, self.view, self._masks = keys, values, view, masks

    def release(self) -> tuple[mx.array, mx.array]:
        """The pool after the forward. The cache keeps no reference: the next write must find itself alone."""
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        self.keys = self.values = self.view = None
        return keys, values

    # what mlx-lm's modules call

    @property
    def offset(self) -> mx.array:
        assert self.view is not None
        return self.view.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        assert self.view is not None
        key = (N, window_size)
        if key not in self._masks:
            self._masks[key] = self.view.mask(N, window_size)
        return self._masks[key]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [rows, heads, length, dim] and return [rows, heads, positions, dim] of all that the rows may see."""
        s = self.shape
        self.keys, k = self._update(self.keys, keys, s.key_heads, s.key_dim)
        self.values, v = self._update(self.values, values, s.value_heads, s.value_dim)
        return k, v

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Where the hook sends the layer's attention."""
        self.attend_calls += 1
        return portable.attend(queries, keys, values, scale, mask, sinks)

    def _update(self, pool: mx.array | None, new: mx.array, heads: int, dim: int) -> tuple[mx.array, mx.array]:
        v = self.view
        assert v is not None
        assert pool is not None
        head = mx.arange(heads, dtype=mx.int32)[:, None] * (self._stride * v.block_size)
        pool[(v.slots[:, None] + head).reshape(-1)] = new.reshape(-1, dim)
        if v.view is not None:
            first, last = v.view
            span = slice(first * v.block_size, last * v.block_size)
            return pool, pool.reshape(heads, -1, dim)[None, :, span]
        assert v.tables is not None
        rows, blocks = v.tables.shape
        runs = v.tables[:, None] + mx.arange(heads, dtype=mx.int32)[:, None] * self._stride
        gathered = pool.reshape(heads * self._stride, v.block_size * dim)[runs]
        return pool, gathered.reshape(rows, heads, blocks * v.block_size, dim)


class ProbeCache:
    """Stands in for a cache in a forward that is never evaluated, to learn what a layer writes."""

    offset = 0

    def __init__(self) -> None:
        self.shape: LayerShape | None = None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str | None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        k, v = keys.shape, values.shape
        self.shape = LayerShape(k[1], k[3], v[1], v[3], keys.dtype)
        return keys, values
