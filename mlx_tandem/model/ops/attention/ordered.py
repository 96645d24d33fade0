"""Attention whose order of sums follows from a query's own position.

Without a kernel, keys are cut into blocks at fixed positions. A query's scores in a block, and its sum over the values
of a block, are products in tiles of queries. The sums of the blocks are added in the order of the blocks, and blocks
that a query does not see add zeros. So no bit depends on the number of queries or on the number of keys.

On a GPU the kernel that reads the pool computes each query as a row of its own, with a constant number of splits. Its
order of sums for a row then follows from the row's own position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_tandem.model import backend
from mlx_tandem.model.ops.attention import portable
from mlx_tandem.model.ops.attention.paged import EVERYTHING, PagedAttention
from mlx_tandem.model.ops.products.ordered import matmul, sizes_of, with_gradient_of

KEYS = 64
"""Keys of a block. A layer that sees a window has blocks of the size of the pool's, since its keys begin at a block of
the pool.
"""

SPLITS = 4
"""Splits of a row's keys on a GPU."""

QUERIES = 512
"""Most queries that one launch of the kernel computes, and most queries of a whole sequence that are computed at a
time. It bounds the memory of their splits or scores, which are in memory together."""

CHECKED = 300
"""Tokens of the sequence that is checked at start, enough to be read in several splits."""

TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 2e-2}
"""Largest error by type, relative to the norm of the result. A wrong mask or head is off by a tenth and more."""

_HIDDEN = -1e30


@dataclass(frozen=True)
class OrderedAttention:
    """Attention for layers of one shape.

    Attributes:
        keys: The number of keys of a block, a multiple of `block_size`.
        block_size: Positions of a block of the pool.
        sizes: The sizes of tiles for scores and for sums of values.
        kernel: The kernel that reads the pool; None: MLX's own operations compute everything.
        plain: The kernel that reads whole sequences, whose numbers are never quantised.
    """

    keys: int
    block_size: int
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((1,), (1,))
    kernel: PagedAttention | None = None
    plain: PagedAttention | None = None

    @staticmethod
    def by_kernels(kernel: PagedAttention, plain: PagedAttention, block_size: int) -> OrderedAttention:
        """Return the attention by these kernels."""
        return OrderedAttention(block_size, block_size, kernel=kernel, plain=plain)

    @staticmethod
    def of(dim: int, dtype: mx.Dtype, block_size: int, window: int | None) -> OrderedAttention:
        """Return the attention for heads of `dim` numbers by MLX's own operations.

        Raise ModelError where this device has no tiles for it.
        """
        keys = block_size if window is not None or KEYS % block_size else KEYS
        blocks = [mx.random.normal(shape, dtype, key=mx.random.key(0)) for shape in ((dim, keys), (keys, dim))]
        sizes = [sizes_of(partial(_by_matrix, own), len(own), dtype, "the products of attention") for own in blocks]
        return OrderedAttention(keys, block_size, (sizes[0], sizes[1]))

    def gathered(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array) -> mx.array:
        """Return attention [rows, heads, length, dim] over keys and values [rows, kv heads, positions, dim].

        mask: bool [rows or 1, 1, length, positions]. The keys begin at a multiple of `keys`; in layers that see a
        window, at a multiple of `block_size`.
        """
        rows, heads, length, dim = queries.shape
        kv_heads, positions = keys.shape[1], keys.shape[2]
        group, size = heads // kv_heads, self.keys
        blocks = -(-positions // size)
        missing = blocks * size - positions
        if missing:
            keys, values = (mx.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)]) for x in (keys, values))
            mask = mx.pad(mask, [(0, 0), (0, 0), (0, 0), (0, missing)])
        # The queries that share a KV head are the rows of one product: [rows, kv heads, blocks, length · group, dim].
        q = (queries * scale).reshape(rows, kv_heads, group, length, dim).swapaxes(2, 3)
        q = q.reshape(rows, kv_heads, 1, length * group, dim)
        k, v = (x.reshape(rows, kv_heads, blocks, size, -1) for x in (keys, values))
        scores = matmul(q, k.swapaxes(-1, -2), self.sizes[0]).astype(mx.float32)
        seen = mask.reshape(-1, 1, length, 1, blocks, size)
        seen = mx.broadcast_to(seen, (seen.shape[0], 1, length, group, blocks, size))
        seen = seen.reshape(-1, 1, length * group, blocks, size).swapaxes(2, 3)
        scores = mx.where(seen, scores, _HIDDEN)
        most = scores.max(-1, keepdims=True).max(2, keepdims=True)
        weights = mx.where(seen, backend.current().exp(scores - most), 0.0)
        total = weights.sum(-1, keepdims=True).sum(2)
        sums = matmul(weights.astype(v.dtype), v, self.sizes[1]).astype(mx.float32).sum(2)
        out = (sums / total).astype(queries.dtype).reshape(rows, kv_heads, length, group, -1)
        return out.swapaxes(2, 3).reshape(rows, heads, length, -1)

    def paged(
        self, queries: mx.array, pool: Sequence[mx.array], tables: mx.array, offsets: mx.array, scale: float
    ) -> mx.array:
        """Return attention [rows, heads, length, dim] over keys and values in the pool, by the kernel.

        tables: int32 [rows, width]; offsets: int32 [rows], the position of each row's first query.
        """
        assert self.kernel is not None
        return _query_by_query(self.kernel, queries, pool, tables, offsets, scale)

    def whole(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int | None) -> mx.array:
        """Return attention [rows, heads, length, dim] of whole sequences, with a gradient.

        keys, values: [rows, kv heads, length, dim]. window: how many positions a query sees; None: all before it.
        """
        at = mx.arange(queries.shape[2])
        mask = at <= at[:, None]
        if window is not None:
            mask = mask & (at > at[:, None] - window)
        computed = (
            partial(self._whole_from_pool, scale=scale)
            if self.kernel is not None
            else partial(self._whole_in_blocks, scale=scale, mask=mask)
        )

        def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            found = portable.in_blocks(q, k, v, scale, mask, None)
            if found is None:
                found = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
            return found

        out: mx.array = with_gradient_of(computed, plain)(queries, keys, values)
        return out

    def problem(self, heads: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> str:
        """Return words that say how wrong the attention of a whole sequence is; empty if it is right."""
        shapes = ((1, heads, CHECKED, dim), (1, kv_heads, CHECKED, dim), (1, kv_heads, CHECKED, dim))
        q, k, v = (mx.random.normal(shape, key=mx.random.key(n)).astype(dtype) for n, shape in enumerate(shapes))
        found = np.array(self.whole(q, k, v, dim**-0.5, None).astype(mx.float32))
        # Computed by NumPy, since a GPU may round the inputs of its products.
        own, keys, values = (np.array(x.astype(mx.float32))[0] for x in (q, k, v))
        keys, values = (np.repeat(x, heads // kv_heads, axis=0) for x in (keys, values))
        scores = own @ keys.swapaxes(1, 2) * dim**-0.5 + np.triu(np.full((CHECKED, CHECKED), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        right = weights / weights.sum(-1, keepdims=True) @ values
        error = float(np.linalg.norm(found[0] - right) / np.linalg.norm(right))
        return "" if error <= TOLERANCE[dtype] else f"wrong by {error:.1e}"

    def _whole_in_blocks(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
    ) -> mx.array:
        """Return the attention of whole sequences, QUERIES queries at a time, which bounds the memory of the scores."""
        length = queries.shape[2]
        parts = []
        for start in range(0, length, QUERIES):
            stop = min(start + QUERIES, length)
            own = queries[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop]
            parts.append(self.gathered(*own, scale, mask[None, None, start:stop, :stop]))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _whole_from_pool(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Return the attention of whole sequences by the kernel, which reads them as it reads the pool."""
        rows, _, length, dim = keys.shape
        blocks = -(-length // self.block_size)
        missing = blocks * self.block_size - length
        pool = [
            mx.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)]).swapaxes(0, 1).reshape(-1, dim) for x in (keys, values)
        ]
        tables = mx.arange(rows * blocks, dtype=mx.int32).reshape(rows, blocks)
        assert self.plain is not None
        return _query_by_query(self.plain, queries, pool, tables, mx.zeros((rows,), mx.int32), scale)


def _query_by_query(
    kernel: PagedAttention,
    queries: mx.array,
    pool: Sequence[mx.array],
    tables: mx.array,
    offsets: mx.array,
    scale: float,
) -> mx.array:
    """Return attention [rows, heads, length, dim] by a kernel that is given each query as a row of its own."""
    rows, heads, length, dim = queries.shape
    single = queries.swapaxes(1, 2).reshape(rows * length, heads, 1, dim)
    if length > 1:
        offsets = (offsets[:, None] + mx.arange(length, dtype=mx.int32)).reshape(-1)
        tables = mx.repeat(tables, length, axis=0)
    parts = [
        kernel(
            single[at : at + QUERIES],
            pool,
            tables[at : at + QUERIES],
            offsets[at : at + QUERIES],
            scale,
            window=EVERYTHING,
            splits=SPLITS,
        )
        for at in range(0, rows * length, QUERIES)
    ]
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return out.reshape(rows, length, heads, dim).swapaxes(1, 2)


def _by_matrix(weights: mx.array, x: mx.array, sizes: Sequence[int]) -> mx.array:
    return matmul(x, weights, sizes)


class WholeCache:
    """The cache of one layer in a forward of whole sequences, which keeps nothing."""

    def __init__(self, attention: OrderedAttention, offset: mx.array, window: int | None):
        self._attention = attention
        self.offset = offset
        self._window = window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str:
        """Return the mask's name. The mask itself is made where attention is computed."""
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values as they are."""
        return keys, values

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: object, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention of a layer. The hook on MLX's attention function calls this."""
        return self._attention.whole(queries, keys, values, scale, self._window)
