"""Rows whose masks are late. What they draw is dropped, and their sequences wait until the masks are there.

A row that is late is in flight already. Its sequence gives everything back, as when the pool is full, and is computed
again from its tokens once the mask is there. A sequence with a slow grammar keeps its seat from then on: its next row
is planned when the mask for it is there, so that no other row waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several

from mlx_tandem.engine.masks import MaskMaker, Place
from mlx_tandem.engine.plan import Mask, StepPlan, mask_words
from mlx_tandem.engine.run_queue import RunQueue
from mlx_tandem.engine.sequence import Sequence

_NONE: tuple[None, frozenset[int]] = (None, frozenset())


class LateRows:
    """The late rows of the plans in flight, and the sequences that wait for masks."""

    def __init__(self, queue: RunQueue, vocab_size: int):
        """Note that no row is late. The mask of a late row allows each of `vocab_size` tokens."""
        self._queue = queue
        self._everything = b"\xff" * (mask_words(vocab_size) * 4)
        self._found: tuple[StepPlan | None, frozenset[int]] = _NONE  # late sequences of the newest plan with masks
        self._void: tuple[StepPlan | None, frozenset[int]] = _NONE  # sequences whose rows in this plan draw nothing
        self._slow: set[int] = set()  # sequences whose rows wait for their masks

    def take(self, plan: StepPlan, made: Several[list[Mask] | None]) -> list[list[Mask]]:
        """Return the masks of a plan as the runner takes them, and note the rows whose masks are late, which are None.

        Another thread may call this while nothing else is asked of the scheduler.
        """
        rows = [plan.rows[i] for i in plan.masked]
        late = frozenset(row.sequence for row, own in zip(rows, made, strict=True) if own is None)
        self._found = (plan, late) if late else _NONE
        return [[self._everything] * row.draws if own is None else own for row, own in zip(rows, made, strict=True)]

    def hold_back(
        self, maker: MaskMaker | None, sequences: Mapping[int, Sequence], read: StepPlan | None = None
    ) -> None:
        """Let the sequences of late rows give everything back and wait for their masks.

        These rows are in the newest plan, and what was drawn before it has been taken in. With `read`, nothing is done
        for the rows of another plan.
        """
        assert maker is not None
        plan, late = self._found
        if not late or (read is not None and read is not plan):
            return
        self._void, self._found = self._found, _NONE
        for s in [sequences[i] for i in late if i in sequences]:
            self._queue.preempt(s, parks=True)
            self.prepare(maker, s)

    def resume(self, maker: MaskMaker | None) -> None:
        """Let the sequences go on whose masks are there."""
        assert maker is not None
        for s in list(self._queue.parked.values()):
            if not s.pending and maker.is_ready(s.request.id, s.choice):
                self._queue.resume(s)

    def prepare(self, maker: MaskMaker, s: Sequence) -> None:
        """Begin to make the mask behind the tokens of `s` if its next row waits for it."""
        is_parked = s.id in self._queue.parked
        if maker.is_slow(s.request.id, s.choice):
            self._slow.add(s.id)
        else:
            self._slow.discard(s.id)
        if is_parked or (s.id in self._slow and not s.pending):
            maker.prepare(Place(s.request, s.choice, s.tokens))

    def prepare_all(self, maker: MaskMaker | None, sequences: Mapping[int, Sequence], plan: StepPlan) -> None:
        """Begin to make the masks for which the sequences wait that have drawn by masks in a plan."""
        assert maker is not None
        for row in [plan.rows[i] for i in plan.masked]:
            s = sequences.get(row.sequence)
            if s is not None and s.id not in self._queue.parked:
                self.prepare(maker, s)

    def without_waiting(self, maker: MaskMaker | None, wanted: list[Sequence]) -> list[Sequence]:
        """Return the sequences of `wanted` that do not wait for their masks."""
        slow = self._slow
        if not slow:
            return wanted
        assert maker is not None
        return [s for s in wanted if s.id not in slow or (not s.pending and maker.is_ready(s.request.id, s.choice))]

    def is_slow(self, s: Sequence) -> bool:
        """Return whether the rows of `s` wait for their masks."""
        return s.id in self._slow

    def drops(self, plan: StepPlan, s: Sequence) -> bool:
        """Return whether the row of `s` in a plan was late. If so, nothing of it is in flight any more."""
        if plan is not self._void[0] or s.id not in self._void[1]:
            return False
        s.pending = s.slack = 0
        return True

    def forget(self, s: Sequence) -> None:
        """Drop what is known of a sequence that has ended."""
        self._slow.discard(s.id)

    def clear(self) -> None:
        """Forget the plans in flight, which are lost."""
        self._found = self._void = _NONE
