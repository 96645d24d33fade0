"""Dependencies that can be taken out of the package, one at a time: each leaves a hazard that has to be found."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

from mlx_tandem.model.cache.pools import KVArrays
from mlx_tandem.model.cache.states import StateCache
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import Order
from mlx_tandem.model.ops.attention.cache import PagedCache
from mlx_tandem.model.ops.lora.slots import SlotWriter
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step.forward import Forward
from mlx_tandem.model.step.forward_inputs import InputBuilder
from tests.hazards import steps
from tests.hazards.steps import Metal, Step

Take = Callable[[Metal, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Plant:
    """`take` takes a dependency out; that is found in these steps of the engine of this name."""

    take: Take
    engine: str
    steps: tuple[Callable[[Metal], Step], ...]


def text(owner: Any, name: str, right: str, wrong: str) -> Take:
    """Let something else stand in a function's text."""

    def take(metal: Metal, patch: pytest.MonkeyPatch) -> None:
        function: FunctionType = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(right) == 1, f"{name} has {source.count(right)} times {right!r}"
        made: dict[str, Any] = {}
        code = compile(source.replace(right, wrong), f"planted {name}", "exec")
        exec(code, function.__globals__, made)  # noqa: S102  the package's own text
        code = getattr(made[name], "__func__", made[name]).__code__  # of a static method, or of a function
        patch.setattr(function, "__code__", code)  # wherever it has been imported

    return take


def _apart(*orders: str) -> Take:
    """Let one of those who use the arrays keep an order of his own."""

    def take(metal: Metal, patch: pytest.MonkeyPatch) -> None:
        runner = metal.runner
        for owner in {"pool": runner._pool.pools, "slots": [runner._lora._writer]}[orders[0]]:
            patch.setattr(owner, "_order", Order())

    return take


def _in_place(metal: Metal, patch: pytest.MonkeyPatch) -> None:
    """Read contiguous blocks where they lie, without an index that an order could be in."""
    patch.setattr("mlx_tandem.model.step.forward_inputs.VIEW_BLOCKS", 2)
    text(InputBuilder, "_contiguous", "if by_outputs or (store", "if (store")(metal, patch)


decode, others = steps.decode, steps.decode_others
adapted = steps.KINDS["decode under adapters"]

PLANTS: dict[str, Plant] = {
    # A step and the one before it.
    "a step is not made of the order": Plant(
        text(Forward, "step", "tokens = after(order, tokens)", "pass"),
        "short blocks",
        (decode, others),
    ),
    "a step of own blocks is not made of the order": Plant(
        text(Forward, "step", "tokens = after(order, tokens)", "pass"),
        "own blocks",
        (decode, others),
    ),
    "a step leaves the order that it found": Plant(
        text(Forward, "step", "order = [zero_of([logits, *states, *ahead.marker])] if order else []", "pass"),
        "short blocks",
        (others, others),
    ),
    "a step leaves an order of its tokens alone": Plant(
        text(Forward, "step", "zero_of([logits, *states, *ahead.marker])", "zero_of([tokens])"),
        "short blocks",
        (others, others),
    ),
    "the next step finds an older order": Plant(
        text(
            MLXRunner,
            "_build_parts",
            "self._pool.layers, self._order.zeros = made",
            "self._pool.layers, _ = made",
        ),
        "short blocks",
        (others, others),
    ),
    "parts of one step do not follow one another": Plant(
        text(
            MLXRunner,
            "_build_parts",
            "self._pool.layers, self._order.zeros = made",
            "self._pool.layers, _ = made",
        ),
        "short blocks",
        (steps.unlike,),
    ),
    # Within a layer.
    "attention is not made of the queries": Plant(
        text(
            PagedCache,
            "_answer",
            "queries, pool, tables, v.offset, scale, window",
            "mx.zeros(queries.shape, queries.dtype), pool, tables, v.offset, scale, window",
        ),
        "short blocks",
        (decode,),
    ),
    "a chunk reads what is before it at once": Plant(
        text(
            PagedCache,
            "attend_products",
            "[zero_of([queries])] if inplace.writing().by_outputs else []",
            "[]",
        ),
        "short blocks",
        (steps.first_chunk, steps.next_chunk),
    ),
    "a chunk reads what is before it behind its products": Plant(
        text(PagedCache, "attend_products", "zero_of([queries])", "zero_of([products[0]])"),
        "short blocks",
        (steps.first_chunk, steps.next_chunk),
    ),
    "a chunk is read where it lies": Plant(_in_place, "short blocks", (steps.first_chunk, steps.next_chunk)),
    "kernels read behind no write": Plant(
        text(PagedCache, "_answer", "after(self._after, v.tables)", "v.tables"), "own blocks", (decode,)
    ),
    "kernels read behind the values alone": Plant(
        text(PagedCache, "_update", "self._after += zeros", "self._after = zeros"), "own blocks", (decode,)
    ),
    "a gather reads behind no write": Plant(
        text(PagedCache, "_update", "self._seen(array, form.heads, v, zeros)", "self._seen(array, form.heads, v, ())"),
        "own blocks, no common offset",
        (steps.chunks,),
    ),
    "a gather reads behind the codes alone": Plant(
        text(
            PagedCache,
            "_update",
            "self._seen(array, form.heads, v, zeros)",
            "self._seen(array, form.heads, v, zeros[:1])",
        ),
        "few bits, own blocks, no common offset",
        (steps.chunks,),
    ),
    "a chunk's own keys wait on the host alone": Plant(
        text(PagedCache, "_update", "own = after(zeros, own)", "own = mx.depends(own, zeros)"),
        "own blocks",
        (steps.first_chunk, steps.next_chunk),
    ),
    "own blocks read what is before a chunk at once": Plant(
        text(PagedCache, "_update", "zeros if by_outputs else ()", "()"),
        "own blocks",
        (steps.first_chunk, steps.next_chunk),
    ),
    "indices are not added to": Plant(
        text(PagedCache, "_seen", "after(zeros, v.runs(heads, each))", "v.runs(heads)"),
        "own blocks, no common offset",
        (steps.chunks,),
    ),
    "one of several zeros counts": Plant(
        text(inplace, "after", "for zero in zeros]", "for zero in zeros[:1]]"), "own blocks", (decode,)
    ),
    # Blocks.
    "a save is not waited for": Plant(
        text(KVArrays, "read", "self._order.follow(read)", "pass"), "short blocks", (steps.save,)
    ),
    "one array's save is waited for": Plant(
        text(KVArrays, "read", "self._order.follow(read)", "self._order.follow(read[:1])"),
        "short blocks",
        (steps.save,),
    ),
    "a load is not waited for": Plant(
        text(KVArrays, "_write", "self._order.follow(touched)", "pass"), "short blocks", (steps.load,)
    ),
    "one array's load is waited for": Plant(
        text(KVArrays, "_write", "self._order.follow(touched)", "self._order.follow(touched[:1])"),
        "short blocks",
        (steps.load,),
    ),
    "all but one array's copy is waited for": Plant(
        text(KVArrays, "_write", "self._order.follow(touched)", "self._order.follow(touched[1:])"),
        "short blocks",
        (steps.copy,),
    ),
    "a fork's copy is not waited for": Plant(
        text(KVArrays, "_write", "self._order.follow(touched)", "pass"), "short blocks", (steps.fork,)
    ),
    "blocks are saved at once": Plant(
        text(KVArrays, "_rows", "self._order.zeros", "()"), "short blocks", (decode, steps.save)
    ),
    "blocks are loaded at once": Plant(
        text(KVArrays, "_rows", "self._order.zeros", "()"), "own blocks", (decode, steps.load)
    ),
    "blocks are copied at once": Plant(
        text(KVArrays, "_rows", "self._order.zeros", "()"), "few bits", (decode, steps.copy)
    ),
    "the pool keeps an order of its own": Plant(_apart("pool"), "short blocks", (steps.load,)),
    "a pool behind another's arrays keeps an older order": Plant(
        text(Order, "follow", "self.zeros = [zero_of(made)]", "self.zeros = self.zeros"), "windows", (steps.load,)
    ),
    "one of the arrays is followed": Plant(
        text(inplace, "zero_of", "for x in arrays]", "for x in arrays[-1:]]"), "windows", (steps.copy,)
    ),
    # States.
    "states are read at once": Plant(
        text(Forward, "_views", "after(order, read[0])", "read[0]"), "states", (decode, steps.next_chunk)
    ),
    "a write of states is not waited for": Plant(
        text(StateCache, "release", "view.written += [] if zero is None else [zero]", "pass"),
        "states",
        (steps.first_chunk,),
    ),
    "a step with states leaves an order of its tokens alone": Plant(
        text(Forward, "step", "zero_of([logits, *states, *ahead.marker])", "zero_of([tokens])"),
        "states",
        (decode, steps.next_chunk),
    ),
    # Adapters.
    "a slot is written at once": Plant(
        text(SlotWriter, "write", "after(self._order.zeros, rows)", "rows"), "short blocks", (adapted, steps.upload)
    ),
    "a slot is read at once": Plant(
        text(SlotWriter, "write", "self._order.follow(written)", "pass"), "short blocks", (steps.upload,)
    ),
    "a slot of which views are read is read at once": Plant(
        text(SlotWriter, "write", "self._order.follow(written)", "pass"), "plain adapters", (steps.upload_for_one,)
    ),
    "one array of a slot is waited for": Plant(
        text(SlotWriter, "write", "self._order.follow(written)", "self._order.follow(written[:1])"),
        "short blocks",
        (steps.upload,),
    ),
    "slots keep an order of their own": Plant(_apart("slots"), "plain adapters", (steps.upload,)),
    "a published version is read at once": Plant(
        text(SlotWriter, "write", "self._order.follow(written)", "pass"),
        "short blocks",
        (lambda metal: steps.publish, steps.upload),
    ),
    "slots that are being written are copied": Plant(
        text(LoraState, "_grow", "self.order.wait()", "pass"), "short blocks", (steps.upload, steps.wider)
    ),
}
