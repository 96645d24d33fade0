"""LoRA adapters on the device: stacked arrays, and linears of the served model that add each row's delta.

An adapted module is the model's own object with its class changed to a subclass that calls the original and adds
`x @ A[slot] @ B[slot]`; its weights are neither copied nor renamed, and one that no adapter ever targeted is left as
it was. The arrays are never captured: inside a traced step, `bind` puts the step's own (function arguments) where the
modules look for them. A step of base rows binds nothing and its graph has no delta operation at all.

Small models pay per operation, so linears that read the same input (q, k and v; gate and up) form a group whose
deltas come from one product with A and one with B. B is cut into chunks of equal width, and `gather_mm` runs a list
of (window of rows, matrix) pairs: that one primitive serves every way in which rows and adapters can be mixed.
`docs/decisions/lora-delta.md` has the measurements.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.config import LoraConfig

SMALLEST_RANK = 8
SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("wq", "wk", "wv"), ("w1", "w3"))
"""Siblings that most families call with the same input. Wrong here costs time only: `dense` looks at the input."""
MAX_CHUNKS = 16
WINDOW = 8
"""Rows of a window: OpenBLAS takes hardly longer for 8 rows than for one."""
WINDOWS_FROM = 24
"""Rows of a step from which windows are worth the operation that they add."""
KEEP_ROUTES = 64


class Layout(NamedTuple):
    """The static half of a step's route: part of the key of a compiled step.

    kind: "base", no row has an adapter; "uniform", all rows have the same; "rows", each row has its own;
    "windows", `count` windows of WINDOW neighbouring rows, each for the rows of one adapter in it.
    """

    kind: Literal["base", "uniform", "rows", "windows"]
    rows: int = 0
    count: int = 0


class Route(NamedTuple):
    """Which slot each row of a step uses. `ids` (uint32, one axis) is an argument of the compiled step, `layout` is
    static. `ids` is None for the base."""

    layout: Layout
    ids: mx.array | None


Signature = tuple[int, ...]
"""The numbers of chunks of a group's adapted members: groups of one signature share a step's index arrays."""


class _Pairs(NamedTuple):
    """What goes with what, in a traced step, for one signature of k members and c chunks. All uint32.

    `a_left`, `a_right` [n, k]: window of x, matrix of A. `b_left`, `b_right` [n, c]: the same for the second product.
    `back` [rows, c]: each row's place in the result (windows only, else None).
    """

    a_left: mx.array
    a_right: mx.array
    b_left: mx.array
    b_right: mx.array
    back: mx.array | None


class _Bound(NamedTuple):
    """What the adapted modules read while a step is traced."""

    layout: Layout
    slots: mx.array  # [rows], or [1] when uniform: for the switch modules
    pairs: dict[Signature, _Pairs]
    arrays: dict[int, tuple[mx.array, mx.array]]  # by id of the holder
    deltas: dict[int, tuple[mx.array, mx.array]]  # by id of the group: (its last input, its chunks)
    sorted_slots: list[mx.array]  # inside switch blocks: the slot of each entry in the block's own order


class _Target:
    """One linear of the model."""

    def __init__(self, path: str, module: nn.Module, shape: LinearShape) -> None:
        self.path = path
        self.module = module
        self.shape = shape
        self.group: _Group | None = None  # of a dense module

    def __repr__(self) -> str:
        return f"<{self.path} {self.shape}>"


class _Group:
    """Dense linears with the same input, and the stacked arrays of those that an adapter has asked for.

    a [slots + 1, k, in, r]; b [slots + 1, c, r, unit]: member after member, each in chunks of `unit` outputs.
    """

    def __init__(self, members: list[_Target]) -> None:
        self.all = members
        self.unit = math.gcd(*(t.shape.outputs for t in members))
        self.members: list[_Target] = []  # the adapted ones
        self.a: mx.array | None = None
        self.b: mx.array | None = None
        self.diverged = False  # a member was called with an input of its own
        for t in members:
            t.group = self

    @property
    def signature(self) -> Signature:
        return tuple(self.chunks(t) for t in self.members)

    def chunks(self, t: _Target) -> int:
        return t.shape.outputs // self.unit

    def span(self, t: _Target) -> tuple[int, int]:
        """Where the chunks of `t` begin and end."""
        i = self.members.index(t)
        begin = sum(self.signature[:i])
        return begin, begin + self.signature[i]

    def build(self, members: list[_Target], slots: int, rank: int, dtype: mx.Dtype) -> None:
        """New arrays for `members` at `rank`; what is there now is kept."""
        parts_a, parts_b = [], []
        for t in members:
            a = mx.zeros((slots + 1, 1, t.shape.inputs, rank), dtype)
            b = mx.zeros((slots + 1, self.chunks(t), rank, self.unit), dtype)
            if t in self.members:
                assert self.a is not None and self.b is not None
                i, (begin, end) = self.members.index(t), self.span(t)
                old = self.a.shape[-1]
                a[..., :old] = self.a[:, i : i + 1]
                b[:, :, :old] = self.b[:, begin:end]
            parts_a.append(a)
            parts_b.append(b)
        self.a = mx.concatenate(parts_a, 1) if len(parts_a) > 1 else parts_a[0]
        self.b = mx.concatenate(parts_b, 1) if len(parts_b) > 1 else parts_b[0]
        mx.eval(self.a, self.b)
        self.members = members

    def write(self, slot: int, weights: AdapterWeights | None, rank: int, dtype: mx.Dtype) -> None:
        """The whole slot, padding included: nothing of an evicted adapter is left."""
        assert self.a is not None and self.b is not None
        a = np.zeros(self.a.shape[1:], np.float32)
        b = np.zeros(self.b.shape[1:], np.float32)
        for i, t in enumerate(self.members):
            pair = weights.tensors.get(t.path) if weights is not None else None
            if pair is not None:
                r = pair[0].shape[-1]
                begin, end = self.span(t)
                a[i, :, :r] = pair[0]
                b[begin:end, :r] = pair[1].reshape(r, end - begin, self.unit).swapaxes(0, 1)
        self.a[slot] = mx.array(a).astype(dtype)
        self.b[slot] = mx.array(b).astype(dtype)


class _Switch:
    """A linear with one matrix per expert: a [slots + 1, experts, in, r], b [slots + 1, experts, r, out]."""

    def __init__(self, target: _Target) -> None:
        self.target = target
        self.a: mx.array | None = None
        self.b: mx.array | None = None

    def build(self, slots: int, rank: int, dtype: mx.Dtype) -> None:
        s = self.target.shape
        a = mx.zeros((slots + 1, s.experts, s.inputs, rank), dtype)
        b = mx.zeros((slots + 1, s.experts, rank, s.outputs), dtype)
        if self.a is not None and self.b is not None:
            old = self.a.shape[-1]
            a[..., :old] = self.a
            b[:, :, :old] = self.b
        mx.eval(a, b)
        self.a, self.b = a, b

    def write(self, slot: int, weights: AdapterWeights | None, rank: int, dtype: mx.Dtype) -> None:
        assert self.a is not None and self.b is not None
        a = np.zeros(self.a.shape[1:], np.float32)
        b = np.zeros(self.b.shape[1:], np.float32)
        pair = weights.tensors.get(self.target.path) if weights is not None else None
        if pair is not None:
            r = pair[0].shape[-1]
            a[..., :r] = pair[0]
            b[:, :r] = pair[1]
        self.a[slot] = mx.array(a).astype(dtype)
        self.b[slot] = mx.array(b).astype(dtype)


class LoraState:
    """All adapters of one model on one device. Owned by the thread that runs the model.

    The way of a step: `install` what is new, `route` the rows, pass `arrays()` and the route's `ids` to the compiled
    function of the route's `layout`, and in it `bind` them, call the model, `unbind`.
    """

    def __init__(self, model: nn.Module, config: LoraConfig, dtype: mx.Dtype) -> None:
        self.slots = config.max_loras
        self.max_rank = config.max_lora_rank
        # MLX's CPU back end has gather_mm for float32 only, and its half-precision products are slow anyway.
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self.dtype = mx.float32 if on_cpu else dtype
        self.rank = 0  # of the stacked arrays: the present bucket
        self.backend = ("windows" if on_cpu else "gather") if config.backend == "auto" else config.backend
        self._targets = _find(model)
        self._groups = _groups(self._targets)
        self._switches = {t.path: _Switch(t) for t in self._targets.values() if t.shape.experts}
        self._blocks = [m for m in model.modules() if isinstance(m, (SwitchGLU, SwitchMLP))]
        self._live: list[_Group | _Switch] = []  # those with arrays, in the model's order
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
        """The arrays that a compiled step takes as arguments, for `bind`. Ask again after each `install`."""
        return [x for holder in self._live for x in (holder.a, holder.b) if x is not None]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays())

    def _check(self, slot: int) -> None:
        if not 1 <= slot <= self.slots:
            raise ValueError(f"slot {slot} is not in 1 … {self.slots}")

    def _write(self, slot: int, weights: AdapterWeights | None) -> None:
        mx.synchronize()
        for holder in self._live:
            holder.write(slot, weights, self.rank, self.dtype)
            mx.eval(holder.a, holder.b)

    def _grow(self, weights: AdapterWeights) -> bool:
        """Room for the rank and the modules of `weights`; True when there was none."""
        rank = max(self.rank, SMALLEST_RANK)
        while rank < weights.info.rank:
            rank *= 2
        wider = rank > self.rank
        self.rank = rank
        changed = False
        for group in self._groups:
            members = [t for t in group.all if t in group.members or t.path in weights.tensors]
            if members and (wider or members != group.members):
                for t in members:
                    if t not in group.members:
                        self._adapt(t)
                group.build(members, self.slots, rank, self.dtype)
                changed = True
        for path, switch in self._switches.items():
            if (switch.a is None and path in weights.tensors) or (switch.a is not None and wider):
                if switch.a is None:
                    self._adapt(switch.target)
                switch.build(self.slots, rank, self.dtype)
                changed = True
        if changed:
            self._live = [h for h in (*self._groups, *self._switches.values()) if h.a is not None]
            self._routes.clear()
        return changed

    def _adapt(self, t: _Target) -> None:
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

        Any order of rows is right; rows of one adapter beside each other are faster.
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
            return Route(Layout("base"), None)
        rows = len(slots)
        if (slots == slots[0]).all():
            layout = Layout("uniform")
            left, owner, back = np.zeros(1, np.int64), slots[:1], None
        else:
            layout, left, owner, back = Layout("rows", rows), np.arange(rows), slots, None
            if self.backend == "windows" and length == 1 and rows >= WINDOWS_FROM:
                cut = _windows(slots)
                if cut is not None:
                    left, owner, back = cut
                    layout = Layout("windows", rows, len(left))
        parts = [slots[:1] if layout.kind == "uniform" else slots]
        n = len(left)
        for signature in self._signatures():
            k, c = len(signature), sum(signature)
            member = np.repeat(np.arange(k), signature)  # of each chunk
            parts.append(np.repeat(left, k))
            parts.append((owner[:, None] * k + np.arange(k)).reshape(-1))
            parts.append((np.arange(n)[:, None] * k + member).reshape(-1))
            parts.append((owner[:, None] * c + np.arange(c)).reshape(-1))
            if back is not None:
                window, within = back // WINDOW, back % WINDOW
                parts.append(((window[:, None] * c + np.arange(c)) * WINDOW + within[:, None]).reshape(-1))
        return Route(layout, mx.array(np.concatenate(parts).astype(np.uint32)))

    def _signatures(self) -> list[Signature]:
        return sorted({h.signature for h in self._live if isinstance(h, _Group)})

    def bind(self, arrays: Sequence[mx.array], ids: mx.array | None, layout: Layout) -> None:
        """Inside a traced step: from here on the model's modules use `arrays` and the route (`ids`, `layout`)."""
        self.unbind()
        if ids is None or layout.kind == "base":
            return
        at = 0

        def take(*shape: int) -> mx.array:
            nonlocal at
            at += math.prod(shape)
            return ids[at - math.prod(shape) : at].reshape(shape)  # a view

        rows = 1 if layout.kind == "uniform" else layout.rows
        n = layout.count if layout.kind == "windows" else rows
        slots = take(rows)
        pairs = {}
        for signature in self._signatures():
            k, c = len(signature), sum(signature)
            back = [(rows, c)] if layout.kind == "windows" else []
            shapes = [(n, k), (n, k), (n, c), (n, c), *back]
            taken = [take(*shape) for shape in shapes]
            pairs[signature] = _Pairs(taken[0], taken[1], taken[2], taken[3], taken[4] if back else None)
        it = iter(arrays)
        held = {id(holder): (next(it), next(it)) for holder in self._live}
        self._bound = _Bound(layout, slots, pairs, held, {}, [])

    def unbind(self) -> None:
        """Forget the step's arrays; the modules are the base model's again until the next `bind`."""
        self._bound = None

    def dense(self, t: _Target, x: mx.array, y: mx.array) -> mx.array:
        """y + delta for x [rows, …, in] (or with rows and positions flattened) and y [rows, …, out]."""
        bound, group = self._bound, t.group
        if bound is None or group is None or id(group) not in bound.arrays:
            return y
        shared = bound.deltas.get(id(group))
        if shared is None or shared[0] is not x:
            group.diverged = group.diverged or shared is not None
            shared = (x, self._chunks(bound, group, x))
            bound.deltas[id(group)] = shared
        begin, end = group.span(t)
        rows = 1 if bound.layout.kind == "uniform" else bound.layout.rows
        # chunks [rows, c, length, unit] -> those of this member, [rows, length, chunks, unit], is a view
        delta = shared[1][:, begin:end].swapaxes(1, 2)
        if delta.dtype != y.dtype:
            delta = delta.astype(y.dtype)
        return (y.reshape(rows, -1, end - begin, group.unit) + delta).reshape(y.shape)

    def _chunks(self, bound: _Bound, group: _Group, x: mx.array) -> mx.array:
        """The group's deltas for x, in chunks: [rows, c, length, unit]; uniform: rows 1, length all."""
        kind, rows, count = bound.layout
        a, b = bound.arrays[id(group)]
        a, b = a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])  # [slots x k, in, r], [slots x c, r, unit]
        p = bound.pairs[group.signature]
        width = x.shape[-1]
        x = x.astype(self.dtype).reshape(1 if kind == "uniform" else rows, -1, width)
        length = x.shape[1]
        if kind == "windows":
            x = mx.as_strided(x, (rows - WINDOW + 1, WINDOW * length, width), (length * width, width, 1))
        u = mx.gather_mm(x, a, lhs_indices=p.a_left, rhs_indices=p.a_right)  # [n, k, rows or length, r]
        u = u.reshape(-1, *u.shape[2:])
        d = mx.gather_mm(u, b, lhs_indices=p.b_left, rhs_indices=p.b_right)  # [n, c, rows or length, unit]
        if p.back is not None:
            d = d.reshape(-1, length, group.unit)[p.back]
        return d

    def switch(self, t: _Target, x: mx.array, y: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        """y + delta for a module with one matrix per expert: entry i of x goes through expert indices[i]."""
        bound, holder = self._bound, self._switches[t.path]
        if bound is None or id(holder) not in bound.arrays:
            return y
        a, b = bound.arrays[id(holder)]
        a, b = a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])  # [slots x experts, …]
        if bound.layout.kind == "uniform":
            slots = bound.slots
        elif not in_order:
            slots = _spread(bound, indices.shape)
        elif bound.sorted_slots:
            slots = bound.sorted_slots[-1]
        else:
            raise RuntimeError(f"{t.path} was called with sorted tokens outside its block")
        which = slots * t.shape.experts + indices.astype(mx.uint32)
        in_order = in_order and bound.layout.kind == "uniform"  # else by expert, but not by (slot, expert)
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


def _find(model: nn.Module) -> dict[str, _Target]:
    """What can be adapted. A module reachable by two paths counts under the first. The output head is left out: the
    runner may call it for some of the positions only."""
    blocks = {id(c) for m in model.modules() if isinstance(m, (SwitchGLU, SwitchMLP)) for c in m.children().values()}
    found: dict[str, _Target] = {}
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
            found[path] = _Target(path, module, shape)
    return found


def _groups(targets: dict[str, _Target]) -> list[_Group]:
    """The dense targets in groups of siblings that share their input, alone where none is known."""
    groups: list[_Group] = []
    for path, t in targets.items():
        if t.group is not None or t.shape.experts:
            continue
        parent, _, leaf = path.rpartition(".")
        names = next((names for names in SHARED_INPUT if leaf in names), (leaf,))
        siblings = [targets[p] for p in (f"{parent}.{n}" if parent else n for n in names) if p in targets]
        same = [s for s in siblings if s.shape.inputs == t.shape.inputs and not s.shape.experts and s.group is None]
        unit = math.gcd(*(s.shape.outputs for s in same))
        groups.append(_Group(same if sum(s.shape.outputs for s in same) // unit <= MAX_CHUNKS else [t]))
    return groups


_classes: dict[type, type] = {}


def _adapted(plain: type) -> type:
    """A subclass of `plain` whose calls go on to the state in `_lora`."""
    if plain in _classes:
        return _classes[plain]
    base: Any = plain

    class Dense(base):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            state, target = self._lora
            return state.dense(target, x, super().__call__(x))

    class Switch(base):  # type: ignore[misc]
        def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
            state, target = self._lora
            y = super().__call__(x, indices, sorted_indices=sorted_indices)
            return state.switch(target, x, y, indices, sorted_indices)

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
                return super().__call__(x, indices, *args, **kwargs)
            finally:
                self._lora.leave_block()

    Block.__name__ = Block.__qualname__ = f"Lora{plain.__name__}"
    _classes[plain] = Block
    return Block
