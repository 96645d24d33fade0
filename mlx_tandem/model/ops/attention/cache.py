"""The paged KV cache as mlx-lm's model modules see it: one cache object for each layer, over the arrays of the pool.

A layer's keys lie in arrays [kv_heads · blocks · block_size, width], head-major. The lines of one head's block are
contiguous, so that a gather on a CPU reads them ten times faster than token-major ones. The layer's code calls
`update_and_fetch`, which writes into the pool and returns the keys and values of the rows' block tables. `kvformat.py`
describes a row of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_tandem.kv.pool import first_block
from mlx_tandem.model import backend
from mlx_tandem.model.cache.kvformat import Asks, LayerShape, RowFormat
from mlx_tandem.model.inputs import arange
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import after, write, zero_of
from mlx_tandem.model.ops.attention.grouped import GroupedAttention
from mlx_tandem.model.ops.attention.ordered import OrderedAttention
from mlx_tandem.model.ops.attention.paged import EVERYTHING, MOST_QUERIES, PagedAttention
from mlx_tandem.model.ops.attention.rotary import Norms, Rotary
from mlx_tandem.model.shapes import EXACT_ROWS


class Rotation(NamedTuple):
    """The rotation of heads by their position."""

    dims: int
    base: float
    scale: float


class LayerKernels(NamedTuple):
    """The fused kernels for layers of one shape."""

    attention: PagedAttention
    rotary: Rotary
    grouped: GroupedAttention | None = None
    """The kernel for adjacent rows of one sequence, for layers without window and sinks. If it is None or does not
    apply, `attention` answers each row by itself."""


class PoolLayout(NamedTuple):
    """The properties of a pool that are the same in every forward."""

    num_blocks: int
    block_size: int
    """Positions of a block."""

    mask_axes: int
    """Axes of a mask between rows and queries: 1, or 2 for families that group queries by KV head."""

    kept: int | None = None
    """The longest window of a pool whose layers all see a window; else None. Tables, keys, values and masks then begin
    with the block of the first position that a row's first token sees, which is block
    max(offset + 1 - kept, 0) // block_size of its sequence.
    """


class Pacer(Protocol):
    """The object that pauses a forward while it is built (`step/pauses.py`)."""

    def arrive(self, x: mx.array) -> None:
        """Count a layer, given an array that the layer has computed, and pause if a pause is due."""


class StepView:
    """The inputs that all layers of one pool share in one forward of rows [rows, length].

    Indices and masks are made by the first layer that asks for them and shared by the others.

    Attributes:
        offset: [rows] int32, the position of each row's first token.
        slot_mapping: [rows, length] int32, the line within a head's part of an array that each token is written to.
        tables: [rows, blocks] int32.
        in_place: Instead of tables, the range (first, end) of the contiguous blocks of a single row, whose keys are
            read where they lie; else None.
        common_offset: The position at which all rows begin, where they begin at one; else None. The keys are then only
            those before it, read from the pool, and the new ones as they were computed. The mask is "causal", for which
            fused attention is fastest.
        kept, block_size: As in `PoolLayout`.
        turns_by_index: Whether each token's position is its index, so that a kernel may apply the rotary embedding.
        each: The number of adjacent rows that belong to one sequence: its tokens, then padding. The sequence's keys and
            values are read once for all of them, by `GroupedAttention`, or by one gather where no kernel reads the
            pool. With the kernel the last sequence may have fewer rows.

    pacer: pauses while the forward is built, shared by the views of all pools; None: no pauses. A forward that is
    traced cannot pause.
    """

    def __init__(
        self,
        offset: mx.array,
        slot_mapping: mx.array,
        tables: mx.array,
        pool: PoolLayout,
        in_place: tuple[int, int] | None = None,
        common_offset: int | None = None,
        pacer: Pacer | None = None,
    ):
        self.offset = offset
        self.tables = tables
        self.kept = pool.kept
        self.in_place = in_place
        self.common_offset = common_offset
        self.turns_by_index = True
        self.each = 1
        self.block_size = pool.block_size
        self.slot_mapping = slot_mapping
        self._pacer = pacer
        self._arrived: PagedCache | None = None
        self._num_blocks = pool.num_blocks
        self.mask_axes = tuple(range(1, 1 + pool.mask_axes))
        self._blocks = in_place[1] - in_place[0] if in_place else tables.shape[1]
        self._real: mx.array | None = None
        self._angles: dict[Rotation, mx.array] = {}
        self._writes: dict[int, mx.array] = {}
        self._runs: dict[tuple[int, int], mx.array] = {}
        self._joined: dict[int, mx.array] = {}
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    @property
    def length(self) -> int:
        """The number of tokens of each row."""
        return self.slot_mapping.shape[1]

    def mask(self, length: int, window: int | None) -> mx.array:
        """Return [rows, 1 (, 1), length, positions] bool: which positions each query sees, none after itself.

        window: the number of positions that a query sees; None: all before it.
        """
        made = self._masks.get((length, window))
        if made is None:
            if self.common_offset is not None:
                key = arange(self.common_offset + length)[self.first_read :]
            else:
                key = self.positions()
            query = self.offset[:, None, None] + arange(length)[None, :, None]
            made = key <= query
            if window is not None:
                made = made & (key > query - window)
            made = mx.expand_dims(made, self.mask_axes)
            self._masks[length, window] = made
        return made

    def positions(self) -> mx.array:
        """Return [positions] or [rows, 1, positions] int32: the positions whose keys are gathered by the tables."""
        key = arange(self._blocks * self.block_size)
        if self.kept is None:
            return key
        first = mx.maximum(self.offset + (1 - self.kept), 0) // self.block_size
        return first[:, None, None] * self.block_size + key

    @property
    def first_read(self) -> int:
        """First position that is read from the pool when `common_offset` is given."""
        assert self.common_offset is not None
        return first_block(self.common_offset, self.kept, self.block_size) * self.block_size

    def window(self, mask: mx.array | str | None) -> int | None:
        """Return the window of a mask made by `mask`; None for any other mask."""
        return next((window or EVERYTHING for (_, window), made in self._masks.items() if made is mask), None)

    def real(self) -> mx.array:
        """Return [rows, 1, length, 1] bool: which tokens are not padding. Padding is written to the first block,
        scratch.
        """
        if self._real is None:
            self._real = (self.slot_mapping >= self.block_size)[:, None, :, None]
        return self._real

    def angles(self, rotation: Rotation) -> mx.array:
        """Return cosines and sines of the positions, float32 [2, rows, length, dims / 2]."""
        if rotation not in self._angles:
            half = rotation.dims // 2
            frequency = np.exp2(np.arange(half) / -half * np.log2(rotation.base)).astype(np.float32)
            position = (self.offset[:, None] + arange(self.length)).astype(mx.float32) * rotation.scale
            angle = position[None, :, :, None] * mx.array(frequency)
            self._angles[rotation] = mx.concatenate([mx.cos(angle), mx.sin(angle)])
        return self._angles[rotation]

    def arrive(self, cache: PagedCache, x: mx.array) -> None:
        """Pause, if a pause is due, at the beginning of the layer of a cache; x depends on the layer's input."""
        if self._pacer is not None:
            if self._arrived is not None:
                self._arrived.forget()
            self._arrived = cache
            self._pacer.arrive(x)

    def writes(self, heads: int) -> mx.array:
        """Return [rows · heads · length]: the lines that new keys or values of a layer with so many heads are written
        to.
        """
        if heads not in self._writes:
            head = arange(heads, self._num_blocks * self.block_size)
            self._writes[heads] = (self.slot_mapping[:, None] + head[:, None]).reshape(-1)
        return self._writes[heads]

    def runs(self, heads: int, each: int = 1) -> mx.array:
        """Return [rows / each, heads, blocks]: the indices of each head's blocks that every `each`-th row reads."""
        if (heads, each) not in self._runs:
            self._runs[heads, each] = self.tables[::each, None] + arange(heads, self._num_blocks)[:, None]
        return self._runs[heads, each]

    def together(self, mask: mx.array) -> mx.array:
        """Return a mask made by `mask`, rearranged so that the rows of each sequence are queries of one row."""
        key = id(mask)
        if key not in self._joined:
            whole = mask.reshape(-1, self.each, mask.shape[-1])
            self._joined[key] = mx.expand_dims(whole, self.mask_axes)
        return self._joined[key]


class PagedCache:
    """The cache of one layer, bound to arrays of the pool for each forward. Arrays are arguments of a step, never
    captured.
    """

    def __init__(self, shape: LayerShape, attention: LayerKernels | OrderedAttention | None = None):
        """Create it. `attention`: the kernels for few queries, or all of the layer's attention in a fixed order."""
        self.shape = shape
        self._ordered = attention if isinstance(attention, OrderedAttention) else None
        self._fused = None if isinstance(attention, OrderedAttention) else attention
        self._arrays: list[mx.array] = []
        self._bound: StepView | None = None
        self._fetched: tuple[mx.array, ...] = ()
        self._after: list[mx.array] = []  # zeros that depend on the last write

    @property
    def reads_in_place(self) -> bool:
        """Whether kernels read the pool for few queries, so that nothing is gathered."""
        return self._fused is not None or (self._ordered is not None and self._ordered.kernel is not None)

    @property
    def keeps_order(self) -> bool:
        """Whether attention is computed in an order of sums that follows from a query's own position."""
        return self._ordered is not None

    def bind(self, arrays: Sequence[mx.array], view: StepView) -> None:
        """Bind the cache for a forward. `arrays`: those of the lines of keys, then those of values."""
        self._arrays, self._bound = list(arrays), view

    @property
    def _view(self) -> StepView:
        """The inputs of the present forward."""
        assert self._bound is not None, "the cache is bound while a forward runs"
        return self._bound

    def release(self) -> list[mx.array]:
        """Return the arrays after the forward and drop them, since the next write needs the only reference to them."""
        arrays, self._arrays, self._bound, self._fetched, self._after = self._arrays, [], None, (), []
        return arrays

    def forget(self) -> None:
        """Drop the keys and values of this forward, which would stay in memory while later layers are computed."""
        self._fetched = ()

    def written(self) -> list[mx.array]:
        """Return arrays that depend on what was written in this forward and share no memory with the pool."""
        return self._after or [zero_of(self._arrays)]

    # called by mlx-lm's modules

    @property
    def offset(self) -> mx.array:
        """Positions [rows] int32 of the rows' first tokens."""
        return self._view.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str:
        """Return the mask of N queries per row: "causal" where fused attention can use that, else an array."""
        common_offset = self._view.common_offset
        window = self.shape.window if window_size is None else window_size
        if common_offset is not None and not return_array and (window is None or common_offset + N <= window):
            return "causal"
        return self._view.mask(N, window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys and values [rows, heads, length, dim]; return [rows, heads, positions, dim] for all visible
        positions.
        """
        self._view.arrive(self, keys)
        halves = self._halves()
        self._arrays, self._after = [], []
        k, v = (
            self._update(form, pool, new)
            for form, pool, new in zip(self.shape.halves, halves, (keys, values), strict=True)
        )
        self._arrays = [*halves[0], *halves[1]]
        self._fetched = k, v
        return k, v

    def keys_and_values(self) -> tuple[mx.array, ...]:
        """Return what `update_and_fetch` returned in this forward, for a later layer that reads the same keys and
        values.
        """
        return self._fetched

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Return the attention of a layer, which the hook sends here.

        Few queries over the keys just fetched, under a mask of this step, are answered by the fused kernel from the
        pool. The gather of those keys is then never evaluated.
        """
        v = self._view
        fetched = len(self._fetched) == 2 and keys is self._fetched[0] and values is self._fetched[1]
        if self._ordered is not None and self._ordered.kernel is not None:
            return self._ordered.paged(queries, self._arrays, after(self._after, v.tables), v.offset, scale)
        if self._fused is not None and fetched and queries.shape[2] <= MOST_QUERIES:
            window = v.window(mask)
            if window is not None and queries.dtype == self.shape.keys.dtype:
                return self._answer(queries, scale, window, sinks).swapaxes(1, 2)
        complete = v.each > 1 and len(queries) % v.each == 0  # a gather needs whole groups
        if complete and fetched and isinstance(mask, mx.array) and v.window(mask) is not None:
            return self._attend_together(queries, scale, mask, sinks, v)
        return self._over_gathered(queries, keys, values, scale, mask, sinks)

    def _over_gathered(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Return attention over keys and values that were gathered."""
        if self._ordered is None:
            return backend.current().attend(queries, keys, values, scale, mask, sinks)
        assert isinstance(mask, mx.array)
        return self._ordered.gathered(queries, keys, values, scale, mask)

    def _answer(
        self,
        queries: mx.array,
        scale: float,
        window: int,
        sinks: mx.array | None,
        shape: tuple[int, ...] | None = None,
    ) -> mx.array:
        """Return attention [rows, length, heads, dim], or of `shape`, by the fused kernel for this step.

        queries: [rows, heads, length, dim].
        """
        v, fused = self._view, self._fused
        assert fused is not None
        pool, tables = self._arrays, after(self._after, v.tables)
        if fused.grouped is not None and v.each > 1 and window == EVERYTHING and v.kept is None and sinks is None:
            return fused.grouped(queries, pool, tables, v.offset, scale, each=v.each, shape=shape)
        return fused.attention(
            queries, pool, tables, v.offset, scale, window=window, kept=v.kept, sinks=sinks, shape=shape
        )

    def _attend_together(
        self, queries: mx.array, scale: float, mask: mx.array, sinks: mx.array | None, v: StepView
    ) -> mx.array:
        """Return what `attend` does for rows of one query, where each sequence has several adjacent rows."""
        rows, heads, _, dim = queries.shape
        keys, values = (
            form.decode([self._seen(array, form.heads, v, self._after, v.each) for array in pool])
            for form, pool in zip(self.shape.halves, self._halves(), strict=True)
        )
        own = queries.reshape(-1, v.each, heads, dim).swapaxes(1, 2)
        out = self._over_gathered(own, keys, values, scale, v.together(mask), sinks)
        return out.swapaxes(1, 2).reshape(rows, heads, 1, -1)

    # called by blocks with fused projections instead

    def offers(self, x: mx.array, mask: mx.array | str | None) -> bool:
        """Return whether `attend_products` can serve a block's input x under this mask.

        x: [rows, length, …] or [rows · length, …].
        """
        v = self._bound
        if v is None or self._fused is None or x.dtype != self.shape.keys.dtype or not v.turns_by_index:
            return False
        if v.length <= MOST_QUERIES:
            return v.window(mask) is not None
        return v.common_offset is not None and isinstance(mask, str)

    def attend_products(
        self,
        products: Sequence[mx.array],
        rotation: Rotation,
        norms: Norms | None,
        *,
        scale: float,
        mask: mx.array | str | None,
        gated: bool = False,
    ) -> mx.array:
        """Return the attention [..., heads · dim] of the products of q, k and v, as `Rotary` takes them.

        Its leading axes are those of the products. The keys and values are written into the pool.
        """
        v, fused = self._view, self._fused
        assert fused is not None
        v.arrive(self, products[0])
        few = v.length <= MOST_QUERIES
        queries, *new = fused.rotary(
            products, v.angles(rotation), v.slot_mapping, self._arrays, norms=norms, fetched=not few, gated=gated
        )
        shape = *products[0].shape[:-1], queries.shape[1] * queries.shape[3]
        if few:
            window = v.window(mask)
            assert window is not None
            return self._answer(queries, scale, window, None, shape)
        if v.common_offset:
            zeros = [zero_of([queries])] if inplace.writing().by_outputs else []
            new = [
                mx.concatenate([self._before(form, pool, v, zeros), own], axis=2)
                for form, pool, own in zip(self.shape.halves, self._halves(), new, strict=True)
            ]
        keys, values = new
        return backend.current().attend(queries, keys, values, scale, mask, None).swapaxes(1, 2).reshape(shape)

    def _halves(self) -> tuple[list[mx.array], list[mx.array]]:
        """Return the arrays of keys, and those of values."""
        between = len(self.shape.keys.lines())
        return self._arrays[:between], self._arrays[between:]

    def _update(self, form: RowFormat, pool: list[mx.array], new: mx.array) -> mx.array:
        """Write new keys or values; return them as they read from the pool, together with the earlier ones.

        Even new ones are returned as the pool holds them, so that it does not matter how a prompt was cut.
        """
        v = self._view
        if new.shape[2] > 1 or new.shape[0] > EXACT_ROWS:
            # Padding after a token that is not finite is not finite either, nor is padding under an adapter that
            # overflows. From the scratch block it would reach every row, since a masked weight of 0 times NaN is NaN.
            new = mx.where(v.real(), new, 0)
        writes = v.writes(form.heads)
        encoded = form.encode(new.reshape(-1, form.dim))
        written = [write(array, writes, lines) for array, lines in zip(pool, encoded, strict=True)]
        pool[:] = [array for array, _ in written]
        zeros = [zero for _, zero in written if zero is not None]
        self._after += zeros
        if v.common_offset is None:
            return form.decode([self._seen(array, form.heads, v, zeros) for array in pool])
        own = form.decode([lines.reshape(*new.shape[:3], -1) for lines in encoded])
        by_outputs = inplace.writing().by_outputs
        if by_outputs:
            own = after(zeros, own)  # so that the part's outputs depend on the write
        elif zeros:  # nothing else depends on the write
            own = mx.depends(own, zeros)
        if v.common_offset == 0:
            return own
        return mx.concatenate([self._before(form, pool, v, zeros if by_outputs else ()), own], axis=2)

    def _before(self, form: RowFormat, pool: Sequence[mx.array], v: StepView, zeros: Sequence[mx.array]) -> mx.array:
        """Return keys or values of the positions before `common_offset`, read after the writes of these zeros."""
        assert v.common_offset is not None
        seen = v.common_offset - v.first_read
        return form.decode([self._seen(array, form.heads, v, zeros)[:, :, :seen] for array in pool])

    @staticmethod
    def _seen(array: mx.array, heads: int, v: StepView, zeros: Sequence[mx.array], each: int = 1) -> mx.array:
        """Return [rows / each, heads, positions, width] of an array, read after the writes that gave these zeros, for
        every `each`-th row.
        """
        width = array.shape[1]
        if v.in_place is not None:
            first, last = v.in_place
            return array.reshape(heads, -1, width)[None, :, first * v.block_size : last * v.block_size]
        runs = after(zeros, v.runs(heads, each))
        rows, _, blocks = runs.shape
        gathered = array.reshape(-1, v.block_size * width)[runs]
        return gathered.reshape(rows, heads, blocks * v.block_size, width)


class ProbeCache:
    """A stand-in for a cache, in a forward that is never evaluated, that records what a layer caches."""

    offset = 0

    def __init__(self) -> None:
        self.shape: LayerShape | None = None
        self.windows: set[int] = set()
        self._fetched: tuple[mx.array, ...] = ()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str | None:
        """Record the window that a layer asks for; return no mask."""
        if window_size is not None:
            self.windows.add(window_size)
        return None

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Record how the layer asks for attention to its own keys and values."""
        if self.shape is not None and keys is self._fetched[0]:
            asks = Asks(queries.shape[1], sinks is not None, casts=queries.dtype != keys.dtype)
            self.shape = replace(self.shape, asks=asks)
        return backend.current().attend(queries, keys, values, scale, mask, sinks)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Record the formats of the layer's keys and values, and return these unchanged."""
        keys_form, values_form = (RowFormat(new.shape[1], new.shape[3], new.dtype) for new in (keys, values))
        self.shape = LayerShape(keys_form, values_form)
        self._fetched = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, ...]:
        """Return what `update_and_fetch` returned."""
        return self._fetched
