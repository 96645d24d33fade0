"""Planted bugs in what belongs to adapters: their keys in the prefix cache, their slots, and new versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from mlx_tandem.adapters.slots import Assignment, SlotTable
from mlx_tandem.engine import run_queue
from mlx_tandem.engine import sequence as sequences
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.plan import StepPlan, StepResult
from mlx_tandem.engine.prefix_keys import PrefixKeys
from mlx_tandem.engine.run_queue import RunQueue
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.hashing import Chain
from mlx_tandem.kv.prefix import PrefixCache
from mlx_tandem.types import AdapterRef
from tests.engine.mutants.planting import Plant, attribute, kept


def _share_by_name(patch: pytest.MonkeyPatch) -> None:
    """The name of an adapter stands for its content."""

    def chain(self: PrefixKeys, s: Sequence) -> Chain:
        if s.chain is None:
            s.chain = self._caches[0].chain(s.adapter.name if s.adapter else "")
        return s.chain

    patch.setattr(PrefixKeys, "chain", chain)


def _trust_lost_uploads(patch: pytest.MonkeyPatch) -> None:
    """Adapters whose upload was lost with a step count as resident."""
    patch.setattr(SlotTable, "lost", lambda self, digest: None)


def _assume_resident(patch: pytest.MonkeyPatch) -> None:
    """A slot is given to another adapter without its content being written."""

    def acquire(self: SlotTable, digest: str) -> Assignment | None:
        made = original(self, digest)
        return replace(made, upload=False) if made and made.evicted else made

    original = SlotTable.acquire
    patch.setattr(SlotTable, "acquire", acquire)


def _steal_slots(patch: pytest.MonkeyPatch) -> None:
    """A slot in use is given to another adapter."""

    def acquire(self: SlotTable, digest: str) -> Assignment | None:
        made = original(self, digest)
        return made or Assignment(1, upload=True)

    original = SlotTable.acquire
    patch.setattr(SlotTable, "acquire", acquire)
    patch.setattr(SlotTable, "release", lambda self, digest: None)


def _name_the_newest(patch: pytest.MonkeyPatch) -> None:
    """Tokens name the version that their sequence has by the time they are read."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        newest = {s.id: s.adapter.version for s in self._sequences.values() if s.request.follow and s.adapter}
        rows = tuple(structs.replace(row, version=newest.get(row.sequence, 0)) for row in plan.rows)
        return original(self, replace(plan, rows=rows), result)

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _follow_without_being_asked(patch: pytest.MonkeyPatch) -> None:
    """Pinned requests go on under newer versions, too."""

    def follows(self: Sequence, ref: AdapterRef) -> bool:
        adapter = self.next_adapter or self.adapter
        return adapter is not None and adapter.name == ref.name and adapter != ref

    patch.setattr(Sequence, "follows", follows)


def _with_activation(position: Callable[[int, int], int]) -> Plant:
    """The keys of blocks are those of an adapter that applies from another position: of this, and the block's size."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def chain(self: PrefixCache, adapter: str, adapter_start: int = 0) -> Chain:
            return original(self, adapter, position(adapter_start, self.block_size))

        original = PrefixCache.chain
        patch.setattr(PrefixCache, "chain", chain)

    return plant


def _read_across_activations(patch: pytest.MonkeyPatch) -> None:
    """A chunk goes on where its adapter begins to apply."""

    def chunk(self: Scheduler, s: Sequence, tokens: int) -> int:
        adapter_start, s.adapter_start = s.adapter_start, 0
        tokens = original(self, s, tokens)
        s.adapter_start = adapter_start
        return tokens

    original = Scheduler._chunk
    patch.setattr(Scheduler, "_chunk", chunk)


def _activate_at_first(patch: pytest.MonkeyPatch) -> None:
    """An adapter applies from where it is invoked for the first time."""

    def adapter_start_of(adapter: AdapterRef | None, prompt: tuple[int, ...]) -> int:
        wanted = () if adapter is None else adapter.invocation
        places = (at for at in range(len(prompt)) if prompt[at : at + len(wanted)] == wanted)
        return next(places, sequences.NEVER) if wanted else 0

    patch.setattr(sequences, "adapter_start_of", adapter_start_of)


PLANTS: dict[str, Plant] = {
    "the name of an adapter is its namespace": _share_by_name,
    "the block in which an adapter begins is the base's": _with_activation(lambda at, size: -(-at // size) * size),
    "what an adapter computes is the base's": _with_activation(lambda at, size: sequences.NEVER if at else 0),
    "a row goes on where its adapter begins": _read_across_activations,
    "an adapter begins where it is invoked first": _activate_at_first,
    "an upload that was lost is trusted": _trust_lost_uploads,
    "an evicted slot is not written": _assume_resident,
    "a slot in use is given away": _steal_slots,
    "a slot is never given back": attribute(SlotTable, "release", lambda self, digest: None),
    "a follower stays in its slot": kept(RunQueue, "_move", "slot"),
    "a token names the newest version": _name_the_newest,
    "everybody follows": _follow_without_being_asked,
    "whoever waits for a slot waits for ever": attribute(run_queue, "OVERTAKEN_FOR_SLOT", 1000),
}
