"""The queues of all trainers: they decide whose slice runs next, so that trainers share learning's time equally.

This is fair queueing. Each trainer has a clock of the milliseconds that it has had, and the trainer with the lowest
clock goes next. A trainer that begins to want something joins at the clock of the trainer that was chosen last: time in
which it wanted nothing is neither owed to it nor held against it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from mlx_tandem.engine import messages as m
from mlx_tandem.engine.plan import Slice, SliceKind, Wait
from mlx_tandem.types import PassUnderWay

KINDS: dict[type[m.Learning], SliceKind] = {  # of the slices of each message
    m.OpenTrainer: "open",
    m.CloseTrainer: "close",
    m.ForwardBackward: "forward_backward",
    m.OptimStep: "optim_step",
    m.SettleTrainer: "settle",
    m.PublishTrainer: "publish",
    m.SaveTrainer: "save",
}


@dataclass(slots=True, eq=False)
class Work:
    """The work of one message that waits or is under way."""

    message: m.Learning
    trainers: tuple[str, ...]
    number: int  # counted in the order of arrival
    slices: Generator[Wait, None, m.Outbound] | None = None  # once it is under way
    launched: int = 0  # number of slices
    done: float = 0.0  # share of a pass that is behind it, as of its last pause
    is_over: bool = False
    has_failed: bool = False

    @property
    def kind(self) -> SliceKind:
        """Kind of its slices."""
        return KINDS[type(self.message)]

    @property
    def slice(self) -> Slice:
        """Name of its next slice."""
        return Slice(self.trainers, self.kind, self.launched)


@dataclass(slots=True, eq=False)
class _Lane:
    """The queue of one trainer."""

    works: deque[Work] = field(default_factory=deque)  # the first may be under way
    milliseconds: float = 0.0  # its clock
    turn: int = 0  # number of its last slice


class TrainerQueues:
    """The queues of all trainers.

    Work of several trainers is in the queue of each, and runs when it is the first in all of them. Work that has begun
    runs until it pauses or is over; only brief work comes in between.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._works: dict[Work, None] = {}  # all of them, in the order of their arrival
        self._piece: Work | None = None  # the work under way, unless it is at a pause
        self._clock = 0.0  # the clock of the trainer that was chosen last, at that time
        self._arrivals = itertools.count()
        self._turns = itertools.count(1)

    def __len__(self) -> int:
        """Return how much work there is."""
        return len(self._works)

    def __iter__(self) -> Iterator[Work]:
        """Yield all work in the order of arrival. Work may be removed during the iteration."""
        return iter(list(self._works))

    def add(self, message: m.Learning) -> None:
        """Queue a message behind the others of its trainers."""
        work = Work(message, trainers_of(message), next(self._arrivals))
        self._works[work] = None
        for name in work.trainers:
            self._lanes.setdefault(name, _Lane()).works.append(work)

    def remove(self, work: Work) -> None:
        """Remove work that is over. A trainer without work is forgotten once its clock has been overtaken."""
        if self._piece is work:
            self._piece = None
        del self._works[work]
        for name in work.trainers:
            lane = self._lanes[name]
            lane.works.remove(work)
            if not lane.works and lane.milliseconds <= self._clock:
                del self._lanes[name]
        if not self._works:
            self._lanes.clear()
            self._clock = 0.0

    def jobs(self, name: str) -> int:
        """Return how much work a trainer has."""
        return len(self._lanes[name].works) if name in self._lanes else 0

    def passes(self) -> tuple[PassUnderWay, ...]:
        """Return how far the passes under way are, by trainer."""
        begun = [work for work in self._works if work.kind == "forward_backward" and work.slices is not None]
        return tuple(PassUnderWay(name, work.done) for work in begun for name in work.trainers)

    def first(self, name: str) -> Work:
        """Return the work that is first in a trainer's queue."""
        return self._lanes[name].works[0]

    def chosen(self) -> Work:
        """Return the work that runs next: brief work in the order of arrival, else work under way, else the lowest
        clock.
        """
        heads = [lane.works[0] for lane in self._lanes.values() if lane.works]
        ready = [work for work in heads if self._is_ready(work)]
        brief = [work for work in ready if work.slice.is_brief]
        if brief:
            return min(brief, key=attrgetter("number"))
        return self._piece or min(ready, key=self._place)

    def begin(self, work: Work) -> None:
        """Note that a slice of the work is launched now."""
        turn = next(self._turns)
        for lane in self._lanes_of(work):
            lane.turn = turn
        if not work.slice.is_brief and self._piece is not work:
            self._begin_piece(work)

    def gives_way(self, work: Work) -> bool:
        """Return whether other work runs first now that this work has come to a pause; if not, this work continues."""
        self._piece = None
        if self.chosen() is not work:
            return True
        self._begin_piece(work)
        return False

    def charge(self, slice_: Slice, milliseconds: float) -> None:
        """Charge the time of a slice to its trainers in equal parts."""
        for name in slice_.trainers:
            if name in self._lanes:
                self._lanes[name].milliseconds += milliseconds / len(slice_.trainers)

    def _begin_piece(self, work: Work) -> None:
        """Let the work run to its next pause.

        Time that a trainer did not use because it wanted nothing, or waited for another trainer of the same pass, is
        not owed to it afterwards.
        """
        self._piece = work
        self._clock = max(self._clock, self._place(work)[0])
        for lane in self._lanes_of(work):
            lane.milliseconds = max(lane.milliseconds, self._clock)

    def _is_ready(self, work: Work) -> bool:
        """Return whether the work is the first of each of its trainers."""
        return all(lane.works[0] is work for lane in self._lanes_of(work))

    def _place(self, work: Work) -> tuple[float, int]:
        """Return the key by which ready work is ordered; the lowest runs first."""
        lanes = list(self._lanes_of(work))
        return max(lane.milliseconds for lane in lanes), max(lane.turn for lane in lanes)

    def _lanes_of(self, work: Work) -> Iterator[_Lane]:
        return (self._lanes[name] for name in work.trainers)


def trainers_of(message: m.Learning) -> tuple[str, ...]:
    """Return the names of the trainers that a message is for, each once."""
    match message:
        case m.OpenTrainer():
            return (message.spec.name,)
        case m.ForwardBackward():
            return tuple(dict.fromkeys(batch.trainer for batch in message.batches)) or ("",)
        case _:
            return (message.trainer,)
