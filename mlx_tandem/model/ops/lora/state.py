"""LoRA adapters on the device: stacked arrays, and linears of the served model that add each row's delta.

An adapted module calls the original and adds `x @ A[slot] @ B[slot]`. Its weights are neither copied nor renamed,
and a module that no adapter ever targeted is left as it was. Inside a trace, `bind` puts the arrays where the modules
look for them. Usually they are arguments of the step. On CUDA a kernel writes the slots in place, so that the arrays
stay the same until they grow, and compiled steps capture them, except uniform ones. This saves the host from passing
hundreds of arguments at each call (docs/decisions/gpu-steps.md). A step of base rows binds nothing, and its graph has
no delta operation at all.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.config import LoraConfig
from mlx_tandem.model import backend
from mlx_tandem.model.inputs import Numbers, constant
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import Order
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model.ops.lora.kernel import GroupedDeltas
from mlx_tandem.model.ops.lora.routes import WINDOW, Ids, Ints, Layout, lay_out, read
from mlx_tandem.model.ops.lora.slots import SlotWriter, Stack, Uploads, bucket
from mlx_tandem.model.ops.products.few_rows import FewRows
from mlx_tandem.model.ops.products.ordered import TiledDeltas
from mlx_tandem.model.targets import Target, adapt, find_head, find_targets

KEEP_ROUTES = 64
"""Routes that are kept for the next step with the same rows."""


class Route(NamedTuple):
    """The way of a step's rows to their adapters.

    `layout` is static. `ids` (made by `lay_out`) and `arrays` are arguments of the compiled step, which passes them
    to `bind`. For the base, `ids` is None and `arrays` is empty; it is also empty where a step captures the arrays.
    """

    layout: Layout
    ids: Numbers | None
    arrays: list[mx.array]


class _Bound(NamedTuple):
    """The arrays that adapted modules read while a step is traced."""

    layout: Layout
    ids: Ids
    arrays: dict[str, tuple[mx.array, mx.array]]
    """A and B by path; of a single slot if the layout is uniform."""

    sorted_slots: list[mx.array]
    """Inside blocks of experts: the slot of each entry, in the order into which the block sorts them."""

    flattened: list[mx.array]
    """The last input of a linear and the same with two axes: linears that are called one after another share it."""

    def flat(self, x: mx.array) -> mx.array:
        """Return x [..., inputs] with two axes."""
        if not self.flattened or self.flattened[0] is not x:
            self.flattened[:] = x, x.reshape(-1, x.shape[-1])
        return self.flattened[1]


class LoraState:
    """All adapters of one model on one device. It belongs to the thread that runs the model.

    For each step: `install` new versions, `route` the rows, and pass the route's `arrays` and `ids` to the compiled
    function of its `layout`, which calls `bind`, the model, and `unbind`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: LoraConfig,
        dtype: mx.Dtype,
        fused: GroupedDeltas | None = None,
        few: FewRows | None = None,
        tiled: TiledDeltas | None = None,
    ) -> None:
        """Find the linears of `model` that can be adapted; nothing is changed before the first `install`.

        `fused` are the fused kernels if `model/ops/lora/choice.py` has found them right and faster. `few` are the
        products by the kernel for few rows, which must be told which steps have adapters. `tiled` computes the products
        of adapters under `--deterministic`.
        """
        self.slots = config.max_loras
        self.max_rank = config.max_lora_rank
        here = backend.current()
        self.dtype = mx.float32 if here.products.only_float32_is_fast else dtype
        self.rank = 0  # of the stacked arrays
        self._fused, self._few, self._tiled = fused, few, tiled
        # Kernels and merged linears know an input by its shape and identity.
        self._takes_flat = fused is None and here.kernels.target is None
        best = "windows" if here.products.windows_beat_gathers else "gather"
        plain = config.backend if config.backend in ("gather", "windows") else best
        self.backend = "fused" if fused is not None else plain
        self._targets = find_targets(model)
        self._head = find_head(model)
        if self._head is not None:
            self._targets[self._head.path] = self._head
        self.uploads = Uploads(self.dtype, {p: t.cut for p, t in self._targets.items() if t.cut is not None})
        self._blocks = [m for m in model.modules() if isinstance(m, (SwitchGLU, SwitchMLP))]
        self._stacks: dict[str, Stack] = {}  # by path, in the model's order
        self.order = Order()  # orders all uses of arrays that kernels write: these, and those of the KV pool
        store = inplace.writing().store
        self._writer = SlotWriter(store, self.order) if store is not None else None
        self._routes: OrderedDict[tuple[tuple[int, ...], int], Route] = OrderedDict()
        self._bound: _Bound | None = None

    def linears(self) -> dict[str, LinearShape]:
        """Return every linear that an adapter may target, by path, except the output head."""
        return {path: t.shape for path, t in self._targets.items() if not t.is_head}

    def head(self) -> dict[str, LinearShape]:
        """Return the output head by its path, if adapters may target it."""
        return {} if self._head is None else {self._head.path: self._head.shape}

    # --- Contents of the slots -----------------------------------------------------------------------------------

    def grows(self, weights: AdapterWeights) -> bool:
        """Return whether `install` would change the set of adapted modules or the shape of any array.

        If so, drop all compiled steps before you call `install`: they may hold the old arrays, and memory does not
        suffice for the old and the new arrays together.
        """
        paths = (path for path in weights.tensors if path in self._targets)
        return bucket(weights.info.rank) > self.rank or any(path not in self._stacks for path in paths)

    def install(self, slot: int, weights: AdapterWeights) -> None:
        """Write `weights` into `slot` (1 … slots), in place of everything that it held.

        Where MLX's own operations write, this waits for the device first: arrays that a step in flight reads would be
        copied whole.
        """
        self._check(slot)
        if weights.info.rank > self.max_rank:
            raise ValueError(f"rank {weights.info.rank} is over the limit of {self.max_rank}")
        if self.grows(weights):
            self._grow(weights)
        self._write(slot, weights)

    def clear(self, slot: int) -> None:
        """Make `slot` the base again."""
        self._check(slot)
        self._write(slot, None)

    def arrays(self) -> list[mx.array]:
        """Return all stacked arrays: A and B of module after module in the model's order."""
        return [x for stack in self._stacks.values() for x in (stack.a, stack.b)]

    @property
    def nbytes(self) -> int:
        """Bytes of all stacked arrays."""
        return sum(x.nbytes for x in self.arrays())

    def _check(self, slot: int) -> None:
        if not 1 <= slot <= self.slots:
            raise ValueError(f"slot {slot} is not in 1 … {self.slots}")

    def _write(self, slot: int, weights: AdapterWeights | None) -> None:
        pairs = self.uploads.take(weights) if weights is not None else {}
        self._routes.clear()  # they hold views, because of which MLX would copy the arrays
        arrays = self.arrays()
        contents = [x for path, stack in self._stacks.items() for x in stack.contents(pairs.get(path))]
        if self._writer is not None and self._writer.write(arrays, slot, contents):
            return
        mx.synchronize()
        for x, own in zip(arrays, contents, strict=True):
            x[slot] = own
        mx.eval(arrays)  # at once: nobody else holds the old arrays, so each slot is written in place

    def _grow(self, weights: AdapterWeights) -> None:
        """Make room for the rank and the modules of `weights`."""
        # A product's order of sums may depend on the rank of the arrays, so `--deterministic` never changes it.
        rank = bucket(self.max_rank) if self._tiled is not None else max(self.rank, bucket(weights.info.rank))
        wider = rank > self.rank
        self.rank = rank
        if wider:
            self.order.wait()  # the arrays are copied now, and a slot of them may still be being written
        self._routes.clear()
        for path, target in self._targets.items():
            old = self._stacks.get(path)
            if old is None and path in weights.tensors:
                self._adapt(target)
            elif old is None or not wider:
                continue
            self._stacks[path] = Stack(target.shape, self.slots, rank, self.dtype, old)
        self._stacks = {path: self._stacks[path] for path in self._targets if path in self._stacks}
        if self._fused is not None:
            self._fused.adapted(self._stacks)

    def _adapt(self, target: Target) -> None:
        adapt(target, self)
        if target.shape.experts:
            for block in self._blocks:
                if any(child is target.module for child in block.children().values()) and "_lora" not in vars(block):
                    parent: Any = block
                    parent._lora = self
                    mix_in(parent, AdaptedBlock)

    # --- A step --------------------------------------------------------------------------------------------------

    def route(self, slots: Sequence[int], length: int = 1) -> Route:
        """Return the route of a step whose row i uses `slots[i]` (0: base) for `length` tokens.

        Any order of rows is right; it is faster if rows of one adapter are neighbours. The route is valid until the
        next `install` or `clear`.
        """
        key = (tuple(slots), length)
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._make_route(slots, length)
            if len(self._routes) > KEEP_ROUTES:
                self._routes.popitem(last=False)
        return found

    def _make_route(self, slots: Sequence[int], length: int) -> Route:
        which = np.array(slots if self._stacks else [0] * len(slots), np.int64)
        layout, ids = lay_out(which, length, windows=self.backend == "windows", tiles=self._in_tiles(which, length))
        if ids is None:
            return Route(layout, None, [])
        constant(ids)
        if layout.kind == "uniform":
            at = slots[0]
            own = [x[at : at + 1].squeeze(0) for x in self.arrays()]
            mx.eval(own)  # squeezed slices are views; an index would copy
            return Route(layout, ids, own)
        captured = self._writer is not None and self._writer.keeps_arrays
        return Route(layout, ids, [] if captured else self.arrays())

    def _in_tiles(self, slots: Ints, length: int) -> bool:
        """Return whether the fused kernels compute a step. With experts, a step of one adapter is faster as a
        uniform one.
        """
        if self._fused is None:
            return False
        same = bool((slots == slots[0]).all())
        if same and any(self._targets[path].shape.experts for path in self._stacks):
            return False
        return len(slots) * length <= (self._fused.same if same else self._fused.mixed)

    def bind(self, arrays: Sequence[mx.array], ids: mx.array | None, layout: Layout) -> None:
        """Have the model's modules use this route from here on; call it inside a traced step.

        A uniform step may also be given all stacked arrays; it then copies its slot out of each. If `arrays` is empty,
        the stacked arrays of this object are used.
        """
        self.unbind()
        if ids is None or layout.kind == "base":
            return
        arrays = arrays or self.arrays()
        if layout.kind == "uniform" and [x.ndim for x in arrays] == [x.ndim for x in self.arrays()]:
            arrays = [x[ids[0]] for x in arrays]
        if self._few is not None:
            self._few.begin()
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        self._bound = _Bound(layout, read(ids, layout), dict(zip(self._stacks, pairs, strict=True)), [], [])
        if self._fused is not None and self._bound.ids.tiles is not None:
            self._fused.start(self._bound.ids.tiles, layout.tokens, self._bound.arrays)

    def unbind(self) -> None:
        """Forget the step's arrays; the modules compute the base model again until the next `bind`."""
        self._bound = None
        if self._fused is not None:
            self._fused.stop()
        if self._few is not None:
            self._few.end()

    @contextmanager
    def narrowed(self, rows: mx.array) -> Iterator[None]:
        """Have the model's modules compute only these rows [n] of the route, with one token each, inside a block."""
        whole = self._bound
        if whole is None or whole.layout.kind == "uniform":
            yield
            return
        ids = Ids(whole.ids.slots[rows], mx.arange(len(rows), dtype=mx.uint32))
        self._bound = _Bound(Layout("rows", len(rows)), ids, whole.arrays, [], [])
        if self._fused is not None:
            self._fused.stop()
        try:
            yield
        finally:
            self._bound = whole
            if self._fused is not None and whole.ids.tiles is not None:
                self._fused.start(whole.ids.tiles, whole.layout.tokens, whole.arrays)

    def changes(self, target: Target) -> bool:
        """Return whether the linear has an adapter in this forward."""
        return self._bound is not None and target.path in self._bound.arrays

    def joined(self, target: Target, x: mx.array) -> mx.array | None:
        """Return the outputs for x, with their adapters, of all linears that were merged with this one, side by side.

        None if the fused kernels do not compute them all.
        """
        return None if self._bound is None or self._fused is None else self._fused.joined(target, x)

    def dense(self, target: Target, x: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
        """Return plain(x) + delta for x [rows, …, inputs], or with rows and positions flattened."""
        bound = self._bound
        if bound is None or target.path not in bound.arrays:
            return plain(x)
        if target.is_head:
            return self._logits(bound, target, x, plain)
        if self._fused is not None:
            given = self._fused.give(target, x)
            if given is not None:
                return given
        a, b = bound.arrays[target.path]
        kind, rows = bound.layout.kind, bound.layout.rows
        if self._tiled is not None:
            return _in_tiles(self._tiled, bound, x.astype(self.dtype), plain(x), bound.ids.slots, target.path)
        if kind == "uniform":
            # Two dimensions throughout: each further axis costs a flatten and an unflatten per product.
            flat = bound.flat(x)
            y = plain(flat) if self._takes_flat else plain(x).reshape(-1, target.shape.outputs)
            u = flat.astype(self.dtype) @ a
            y = mx.addmm(y, u, b) if y.dtype == self.dtype else y + (u @ b).astype(y.dtype)
            return y.reshape(*x.shape[:-1], y.shape[-1])
        y = plain(x)
        x = x.astype(self.dtype)
        if x.ndim != 3 or x.shape[0] != rows:
            x = x.reshape(rows, -1, x.shape[-1])
        slots, order, windows = bound.ids.slots, bound.ids.order, bound.ids.windows
        if windows is not None:
            length, width = x.shape[1:]
            shape, strides = (rows - WINDOW + 1, WINDOW * length, width), (length * width, width, 1)
            w = mx.as_strided(x, shape, strides)
            u = mx.gather_mm(w, a, lhs_indices=windows.first, rhs_indices=windows.owner)
            u = u.reshape(-1, length, u.shape[-1])  # by place in the windows; B takes the rows back into their order
            order = windows.back
        else:
            u = mx.gather_mm(x, a, lhs_indices=order, rhs_indices=slots)
        delta = mx.gather_mm(u, b, lhs_indices=order, rhs_indices=slots)
        if delta.shape != y.shape:
            delta = delta.reshape(y.shape)
        return y + delta.astype(y.dtype)

    def _logits(self, bound: _Bound, target: Target, x: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
        """Return the logits of the positions of x [rows, length, inputs] that are wanted, with each row's adapter."""
        module: Any = target.module
        positions, slots = getattr(module, "_positions", None), bound.ids.slots
        if positions is not None:
            x = positions.narrow(x)
            slots = slots if positions.picked is None or bound.layout.kind == "uniform" else slots[positions.picked]
        y = plain(x)
        a, b = bound.arrays[target.path]
        if self._tiled is not None:
            return _in_tiles(self._tiled, bound, x.astype(self.dtype), y, slots, target.path)
        x = x.astype(self.dtype)
        if bound.layout.kind == "uniform":
            delta = (x @ a) @ b
        else:
            rows = slots.shape[0]
            order = mx.arange(rows, dtype=mx.uint32)
            u = mx.gather_mm(x.reshape(rows, -1, x.shape[-1]), a, lhs_indices=order, rhs_indices=slots)
            delta = mx.gather_mm(u, b, lhs_indices=order, rhs_indices=slots)
        return y + delta.reshape(y.shape).astype(y.dtype)

    def switch(self, target: Target, x: mx.array, y: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        """Return y + delta for a linear with one matrix per expert; entry i of x goes through expert indices[i]."""
        bound = self._bound
        if bound is None or target.path not in bound.arrays:
            return y
        a, b = bound.arrays[target.path]
        which = indices.astype(mx.uint32)
        if bound.layout.kind != "uniform":
            if not in_order:
                slots = _spread(bound, indices.shape)
            elif bound.sorted_slots:
                slots = bound.sorted_slots[-1]
            else:
                raise RuntimeError(f"{target.path} was called with sorted tokens outside its block")
            a, b = a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])  # [slots x experts, …]
            which = slots * target.shape.experts + which
            in_order = False  # the entries are sorted by expert, but not by (slot, expert)
        in_order = in_order and self._tiled is None
        u = mx.gather_mm(x.astype(self.dtype), a, rhs_indices=which, sorted_indices=in_order)
        return y + mx.gather_mm(u, b, rhs_indices=which, sorted_indices=in_order).astype(y.dtype)

    def enter_block(self, indices: mx.array) -> None:
        """Work out the order into which a block of experts sorts its tokens.

        A block sorts its tokens by expert when there are many, and its linears then cannot tell which token is
        whose. If the block does not sort, nothing of this is evaluated.
        """
        bound = self._bound
        if bound is not None and bound.layout.kind != "uniform":
            order = mx.argsort(mx.stop_gradient(indices).flatten())
            bound.sorted_slots.append(_spread(bound, indices.shape).flatten()[order])

    def leave_block(self) -> None:
        """Forget the order of the block that `enter_block` entered last."""
        if self._bound is not None and self._bound.sorted_slots:
            self._bound.sorted_slots.pop()


def in_folders(lora: LoraState) -> dict[str, LinearShape]:
    """Return every linear that an adapter may target and the head, with the shapes that folders have for them."""
    return {path: target.whole for path, target in lora._targets.items()}


def use_kernels(lora: LoraState, fused: GroupedDeltas) -> None:
    """Have these kernels compute the adapters of `lora`, none of which may be installed yet."""
    lora._fused = fused
    lora.backend = "fused"


def _in_tiles(tiled: TiledDeltas, bound: _Bound, x: mx.array, y: mx.array, slots: mx.array, path: str) -> mx.array:
    """Return y, the output of a linear for x, plus the deltas of the slots of x's rows."""
    a, b = bound.arrays[path]
    if bound.layout.kind == "uniform":
        a, b, slots = a[None], b[None], mx.zeros((1,), mx.uint32)
    delta = tiled(x.reshape(slots.shape[0], -1, x.shape[-1]), a, b, slots)
    return y + delta.reshape(y.shape).astype(y.dtype)


def _spread(bound: _Bound, shape: tuple[int, ...]) -> mx.array:
    """Return each row's slot, repeated over the row's share of an array of `shape` whose first axis is rows or
    tokens.
    """
    rows = bound.layout.rows
    return mx.broadcast_to(bound.ids.slots[:, None], (rows, math.prod(shape) // rows)).reshape(shape)


class AdaptedBlock:
    """Mixin of a block of experts that tells its linears in which order it sorts its tokens."""

    _lora: LoraState

    def __call__(self, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Run the block, whose linears learn the order in which it sorts its tokens."""
        self._lora.enter_block(indices)
        try:
            out: mx.array = super().__call__(x, indices, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._lora.leave_block()
        return out
