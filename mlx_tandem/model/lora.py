"""LoRA adapters on the device: stacked arrays, and linears of the served model that add each row's delta.

An adapted module is the model's own object with its class changed to a subclass that calls the original and adds
`x @ A[slot] @ B[slot]`; its weights are neither copied nor renamed, and one that no adapter ever targeted is left as
it was. The arrays are never captured: inside a traced step, `bind` puts the step's own (function arguments) where the
modules look for them. A step of base rows binds nothing and its graph has no delta operation at all.

A step whose rows all use one adapter takes that slot's own arrays and multiplies plainly. Otherwise `gather_mm` runs
a list of (rows of x, matrix) pairs. Small models pay about a microsecond for every node of the graph, views too, so
each node here was counted: `docs/decisions/lora-delta.md` has the measurements.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.config import LoraConfig
from mlx_tandem.model.uploads import Uploads

SMALLEST_RANK = 8
WINDOW = 8
"""Rows of a window: a BLAS takes hardly longer for 8 rows than for one."""
WINDOWS_FROM = 24
"""Rows of a step from which windows are worth the nodes that they add."""
KEEP_ROUTES = 64


class Layout(NamedTuple):
    """The static half of a step's route: part of the key of a compiled step.

    kind: "base", no row has an adapter; "uniform", all rows have the same; "rows", each row has its own; "windows",
    too, but A is applied to `windows` windows of WINDOW neighbouring rows, each for the rows of one adapter in it.
    """

    kind: Literal["base", "uniform", "rows", "windows"]
    rows: int = 0
    windows: int = 0


class Route(NamedTuple):
    """How the rows of a step reach their adapters.

    `layout` is static. `ids` (uint32, one axis) and `arrays` are arguments of the compiled step, to be passed to
    `bind` there. For the base, `ids` is None and `arrays` empty.
    """

    layout: Layout
    ids: mx.array | None
    arrays: list[mx.array]


class Target:
    """One linear of the model and, once an adapter asks for it, its stacked arrays.

    a [slots + 1, in, r], b [slots + 1, r, out]; with experts, [slots + 1, experts, …].
    """

    def __init__(self, path: str, module: nn.Module, shape: LinearShape) -> None:
        self.path = path
        self.module = module
        self.shape = shape
        self.a: mx.array | None = None
        self.b: mx.array | None = None

    def __repr__(self) -> str:
        return f"<{self.path} {self.shape}>"

    def build(self, slots: int, rank: int, dtype: mx.Dtype) -> None:
        """Arrays of this rank; what is there now is kept."""
        lead = (slots + 1, self.shape.experts) if self.shape.experts else (slots + 1,)
        a = mx.zeros((*lead, self.shape.inputs, rank), dtype)
        b = mx.zeros((*lead, rank, self.shape.outputs), dtype)
        if self.a is not None and self.b is not None:
            old = self.a.shape[-1]
            a[..., :old] = self.a
            b[..., :old, :] = self.b
        mx.eval(a, b)  # module by module: one old pair at a time lives beside its successor
        self.a, self.b = a, b

    def write(self, slot: int, pair: tuple[mx.array, mx.array] | None) -> None:
        """The whole slot, padding included: nothing of an evicted adapter is left. Evaluated by the caller. `pair` may
        be the bits of the arrays' dtype."""
        assert self.a is not None and self.b is not None
        if pair is None:
            self.a[slot] = mx.array(0, self.a.dtype)
            self.b[slot] = mx.array(0, self.b.dtype)
        else:
            rank = self.a.shape[-1]
            self.a[slot] = _widened(pair[0].view(self.a.dtype), -1, rank)
            self.b[slot] = _widened(pair[1].view(self.b.dtype), -2, rank)


def _widened(x: mx.array, axis: int, size: int) -> mx.array:
    """`x` with zeros behind it up to `size` along `axis`."""
    missing = size - x.shape[axis]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return mx.pad(x, widths) if missing else x


class _Windows(NamedTuple):
    """All uint32. `first`, `owner` [count]: first row and slot of each window. `back` [rows]: each row's place."""

    first: mx.array
    owner: mx.array
    back: mx.array


class _Bound(NamedTuple):
    """What the adapted modules read while a step is traced."""

    layout: Layout
    slots: mx.array  # [rows]; unused when uniform
    order: mx.array  # [rows]: 0, 1, 2 …; gather_mm makes its own at every call when it gets none
    windows: _Windows | None
    arrays: dict[str, tuple[mx.array, mx.array]]  # by path; one slot's own when uniform
    sorted_slots: list[mx.array]  # inside switch blocks: the slot of each entry, in the block's own order


class LoraState:
    """All adapters of one model on one device. Owned by the thread that runs the model.

    The way of a step: `install` what is new, `route` the rows, pass the route's `arrays` and `ids` to the compiled
    function of its `layout`, and in it `bind` them, call the model, `unbind`.
    """

    def __init__(self, model: nn.Module, config: LoraConfig, dtype: mx.Dtype) -> None:
        self.slots = config.max_loras
        self.max_rank = config.max_lora_rank
        # MLX's CPU back end has gather_mm for float32 only, and its half-precision products are slow anyway.
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self.dtype = mx.float32 if on_cpu else dtype
        self.uploads = Uploads(self.dtype)
        self.rank = 0  # of the stacked arrays: the present bucket
        self.backend = ("windows" if on_cpu else "gather") if config.backend == "auto" else config.backend
        self._targets = find_targets(model)
        self._blocks = [m for m in model.modules() if isinstance(m, (SwitchGLU, SwitchMLP))]
        self._live: list[Target] = []  # those with arrays, in the model's order
        self._routes: OrderedDict[tuple[tuple[int, ...], bool], Route] = OrderedDict()
        self._bound: _Bound | None = None

    def linears(self) -> dict[str, LinearShape]:
        """Every module that an adapter may target, by path."""
        return {path: t.shape for path, t in self._targets.items()}

    # --- contents ------------------------------------------------------------------------------------------------

    def install(self, slot: int, weights: AdapterWeights) -> bool:
        """Make `slot` (1 … slots) hold `weights` and nothing else.

        True when the set of adapted modules or any array's shape changed, so that compiled steps must be rebuilt.
        Waits for what the device is doing: arrays that a step in flight reads would be copied whole to be changed.
        """
        self._check(slot)
        if weights.info.rank > self.max_rank:
            raise ValueError(f"rank {weights.info.rank} is over the limit of {self.max_rank}")
        changed = self._grow(weights)
        self._write(slot, weights)
        return changed

    def clear(self, slot: int) -> None:
        """Make `slot` the base again."""
        self._check(slot)
        self._write(slot, None)

    def arrays(self) -> list[mx.array]:
        """All stacked arrays, A and B of module after module in the model's order."""
        return [x for t in self._live for x in (t.a, t.b) if x is not None]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays())

    def _check(self, slot: int) -> None:
        if not 1 <= slot <= self.slots:
            raise ValueError(f"slot {slot} is not in 1 … {self.slots}")

    def _write(self, slot: int, weights: AdapterWeights | None) -> None:
        pairs = self.uploads.take(weights) if weights is not None else {}
        self._routes.clear()  # they hold views of the arrays, which would have them copied
        mx.synchronize()
        for t in self._live:
            t.write(slot, pairs.get(t.path))
        mx.eval(self.arrays())  # at once: nobody else holds the old arrays, so each slot is written in place

    def _grow(self, weights: AdapterWeights) -> bool:
        """Room for the rank and the modules of `weights`; True when there was none."""
        rank = max(self.rank, SMALLEST_RANK)
        while rank < weights.info.rank:
            rank *= 2
        wider = rank > self.rank
        self.rank = rank
        changed = False
        for path, t in self._targets.items():
            if t.a is None and path in weights.tensors:
                self._adapt(t)
            elif t.a is None or not wider:
                continue
            self._routes.clear()
            t.build(self.slots, rank, self.dtype)
            changed = True
        if changed:
            self._live = [t for t in self._targets.values() if t.a is not None]
        return changed

    def _adapt(self, t: Target) -> None:
        """Change the module's class for one that adds the delta. Its weights keep their place and names."""
        module: Any = t.module
        module._lora = (self, t)
        module.__class__ = _adapted(type(module))
        if t.shape.experts:
            for block in self._blocks:
                if any(child is module for child in block.children().values()) and not hasattr(block, "_lora"):
                    parent: Any = block
                    parent._lora = self
                    parent.__class__ = _adapted_block(type(block))

    # --- a step --------------------------------------------------------------------------------------------------

    def route(self, slots: Sequence[int], length: int = 1) -> Route:
        """How a step whose row i uses `slots[i]` (0: base) for `length` tokens reaches its adapters.

        Any order of rows is right; rows of one adapter beside each other are faster. Good until the next `install`
        or `clear`.
        """
        key = (tuple(slots), length == 1)
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._make_route(np.array(slots, np.int64), length)
            if len(self._routes) > KEEP_ROUTES:
                self._routes.popitem(last=False)
        return found

    def _make_route(self, slots: npt.NDArray[np.int64], length: int) -> Route:
        if not self._live or not slots.any():
            return Route(Layout("base"), None, [])
        rows = len(slots)
        if (slots == slots[0]).all():
            own = [x[int(slots[0])] for x in self.arrays()]
            mx.eval(own)  # views
            return Route(Layout("uniform"), mx.array([int(slots[0])], mx.uint32), own)
        layout = Layout("rows", rows)
        parts = [slots, np.arange(rows)]
        if self.backend == "windows" and length == 1 and rows >= WINDOWS_FROM:
            cut = _windows(slots)
            if cut is not None:
                layout = Layout("windows", rows, len(cut[0]))
                parts += cut
        return Route(layout, mx.array(np.concatenate(parts).astype(np.uint32)), self.arrays())

    def bind(self, arrays: Sequence[mx.array], ids: mx.array | None, layout: Layout) -> None:
        """Inside a traced step: from here on the model's modules use the route (`layout`, `ids`, `arrays`).

        A uniform step may also be given all stacked arrays; it then copies its slot out of each.
        """
        self._bound = None
        if ids is None or layout.kind == "base":
            return
        kind, rows, count = layout
        if kind == "uniform" and [x.ndim for x in arrays] == [x.ndim for x in self.arrays()]:
            arrays = [x[ids[0]] for x in arrays]
        slots, order = (ids, ids) if kind == "uniform" else (ids[:rows], ids[rows : 2 * rows])
        windows = None
        if kind == "windows":
            rest = ids[2 * rows :]
            windows = _Windows(rest[:count], rest[count : 2 * count], rest[2 * count :])
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        held = {t.path: pair for t, pair in zip(self._live, pairs, strict=True)}
        self._bound = _Bound(layout, slots, order, windows, held, [])

    def unbind(self) -> None:
        """Forget the step's arrays; the modules are the base model's again until the next `bind`."""
        self._bound = None

    def dense(self, t: Target, x: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
        """plain(x) + delta, for x [rows, …, in] or with rows and positions flattened."""
        bound = self._bound
        if bound is None or t.path not in bound.arrays:
            return plain(x)
        a, b = bound.arrays[t.path]
        kind, rows, _ = bound.layout
        if kind == "uniform":
            # In two dimensions from end to end: each further axis costs a flatten and an unflatten per product.
            flat = x.reshape(-1, x.shape[-1])
            y = plain(flat)
            u = flat.astype(self.dtype) @ a
            y = mx.addmm(y, u, b) if y.dtype == self.dtype else y + (u @ b).astype(y.dtype)
            return y.reshape(*x.shape[:-1], y.shape[-1])
        y = plain(x)
        x = x.astype(self.dtype)
        if x.ndim != 3 or x.shape[0] != rows:
            x = x.reshape(rows, -1, x.shape[-1])
        order = bound.order
        if bound.windows is not None:
            length, width = x.shape[1:]
            shape, strides = (rows - WINDOW + 1, WINDOW * length, width), (length * width, width, 1)
            w = mx.as_strided(x, shape, strides)
            u = mx.gather_mm(w, a, lhs_indices=bound.windows.first, rhs_indices=bound.windows.owner)
            u = u.reshape(-1, length, u.shape[-1])  # by place in the windows; B takes the rows back into their order
            order = bound.windows.back
        else:
            u = mx.gather_mm(x, a, lhs_indices=order, rhs_indices=bound.slots)
        delta = mx.gather_mm(u, b, lhs_indices=order, rhs_indices=bound.slots)
        if delta.shape != y.shape:
            delta = delta.reshape(y.shape)
        return y + delta.astype(y.dtype)

    def switch(self, t: Target, x: mx.array, y: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        """y + delta for a module with one matrix per expert: entry i of x goes through expert indices[i]."""
        bound = self._bound
        if bound is None or t.path not in bound.arrays:
            return y
        a, b = bound.arrays[t.path]
        which = indices.astype(mx.uint32)
        if bound.layout.kind != "uniform":
            if not in_order:
                slots = _spread(bound, indices.shape)
            elif bound.sorted_slots:
                slots = bound.sorted_slots[-1]
            else:
                raise RuntimeError(f"{t.path} was called with sorted tokens outside its block")
            a, b = a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])  # [slots x experts, …]
            which = slots * t.shape.experts + which
            in_order = False  # by expert, but not by (slot, expert)
        u = mx.gather_mm(x.astype(self.dtype), a, rhs_indices=which, sorted_indices=in_order)
        return y + mx.gather_mm(u, b, rhs_indices=which, sorted_indices=in_order).astype(y.dtype)

    def enter_block(self, indices: mx.array) -> None:
        """A switch block sorts its tokens by expert when there are many, and its linears then cannot tell whose is
        whose: work out the same order here. (When it does not sort, nothing of this is ever evaluated.)"""
        bound = self._bound
        if bound is not None and bound.layout.kind != "uniform":
            order = mx.argsort(mx.stop_gradient(indices).flatten())
            bound.sorted_slots.append(_spread(bound, indices.shape).flatten()[order])

    def leave_block(self) -> None:
        if self._bound is not None and self._bound.sorted_slots:
            self._bound.sorted_slots.pop()


def _windows(
    slots: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Windows of WINDOW neighbouring rows such that every row lies in one of its own slot.

    (first row, slot) of each window, and per row window * WINDOW + its place in it; None when there would be too many
    to be worth it. The number is rounded up, so that a batch that changes a little keeps its compiled step.
    """
    rows = len(slots)
    first: list[int] = []
    owner: list[int] = []
    back = np.zeros(rows, np.int64)
    current: dict[int, int] = {}  # slot -> its last window
    for row, slot in enumerate(slots.tolist()):
        w = current.get(slot)
        if w is None or row - first[w] >= WINDOW:
            w = current[slot] = len(first)
            first.append(min(row, rows - WINDOW))
            owner.append(slot)
        back[row] = w * WINDOW + row - first[w]
    step = max(rows // 16, 1)
    count = -(-len(first) // step) * step
    if count * 2 > rows:
        return None
    pad = count - len(first)
    return np.array(first + [0] * pad), np.array(owner + [0] * pad), back


def _spread(bound: _Bound, shape: tuple[int, ...]) -> mx.array:
    """Each row's slot, repeated over the row's share of an array of `shape` whose first axis is rows or tokens."""
    rows = bound.layout.rows
    return mx.broadcast_to(bound.slots[:, None], (rows, math.prod(shape) // rows)).reshape(shape)


# --- the model's modules -----------------------------------------------------------------------------------------


def find_targets(model: nn.Module) -> dict[str, Target]:
    """What can be adapted. A module reachable by two paths counts under the first. The output head is left out: the
    runner may call it for some of the positions only."""
    blocks = {id(c) for m in model.modules() if isinstance(m, (SwitchGLU, SwitchMLP)) for c in m.children().values()}
    found: dict[str, Target] = {}
    seen: set[int] = set()
    # named_modules goes last child first; logs and errors read better in the model's own order.
    for path, module in reversed(model.named_modules()):
        if id(module) in seen or path.rpartition(".")[2] == "lm_head":
            continue
        shape = None
        if isinstance(module, nn.Linear):
            shape = LinearShape(module.weight.shape[1], module.weight.shape[0])
        elif isinstance(module, nn.QuantizedLinear):
            shape = LinearShape(module.weight.shape[1] * 32 // module.bits, module.weight.shape[0])
        elif isinstance(module, (SwitchLinear, QuantizedSwitchLinear)) and id(module) in blocks:
            shape = LinearShape(module.input_dims, module.output_dims, module.num_experts)
        if shape is not None:
            seen.add(id(module))
            found[path] = Target(path, module, shape)
    return found


_classes: dict[type, type] = {}


def _adapted(plain: type) -> type:
    """A subclass of `plain` whose calls go on to the state in `_lora`."""
    if plain in _classes:
        return _classes[plain]
    base: Any = plain

    class Dense(base):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            state, target = self._lora
            out: mx.array = state.dense(target, x, super().__call__)
            return out

    class Switch(base):  # type: ignore[misc]
        def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
            state, target = self._lora
            y = super().__call__(x, indices, sorted_indices=sorted_indices)
            out: mx.array = state.switch(target, x, y, indices, sorted_indices)
            return out

    made: type = Switch if issubclass(plain, (SwitchLinear, QuantizedSwitchLinear)) else Dense
    made.__name__ = made.__qualname__ = f"Lora{plain.__name__}"
    _classes[plain] = made
    return made


def _adapted_block(plain: type) -> type:
    if plain in _classes:
        return _classes[plain]
    base: Any = plain

    class Block(base):  # type: ignore[misc]
        def __call__(self, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            self._lora.enter_block(indices)
            try:
                out: mx.array = super().__call__(x, indices, *args, **kwargs)
            finally:
                self._lora.leave_block()
            return out

    Block.__name__ = Block.__qualname__ = f"Lora{plain.__name__}"
    _classes[plain] = Block
    return Block
