"""The host of trainers without an engine: a back end without a device, and turns as the pipeline makes them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Any

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.adapters.store import AdapterStore
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapters import Adapters
from mlx_tandem.engine.learning import (
    AdamParams,
    Batch,
    BatchResult,
    Datum,
    LossConfig,
    StepDone,
    TrainerInfo,
    TrainerSpec,
)
from mlx_tandem.engine.loading import Loader
from mlx_tandem.engine.plan import Slice, Wait
from mlx_tandem.engine.trainer_queues import trainers_of
from mlx_tandem.engine.trainers import Pause, TrainerBackend, TrainerHost
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import AdapterInfo

BUDGET = 100
PAIR = "ab"
"""The trainers of random workloads."""


def adapter(digest: str, invocation: tuple[int, ...] = ()) -> AdapterWeights:
    return AdapterWeights(AdapterInfo(digest, 8, 1.0, "peft", ("q_proj",), 64, 64, invocation), {})


class Backend:
    """Trainers whose gradients are the calls of the passes that made them. `fail` says which slices raise what.

    A pass has as many pieces as its first batch has data, and each of these as many slices as it has tokens.
    """

    def __init__(self) -> None:
        self.gradients: dict[str, list[int]] = {}
        self.steps: dict[str, list[list[int]]] = defaultdict(list)
        self.fail: dict[tuple[str, int], Exception] = {}  # (trainers, number of the slice), raised when it is launched
        self.fail_wait: dict[tuple[str, int], Exception] = {}
        self.under_way: set[str] = set()  # trainers of passes that are within a piece

    def required_bytes(self, spec: TrainerSpec, folder: str) -> int:
        return spec.rank

    def open(self, spec: TrainerSpec, folder: str, weights: AdapterWeights | None) -> TrainerInfo:
        self.gradients[spec.name] = []
        return TrainerInfo(spec.name, spec.rank, spec.alpha, (), 1, 0)

    def close(self, name: str) -> None:
        del self.gradients[name]

    def run(
        self, batches: Sequence[Batch], forward_only: bool, micro_batch_tokens: int
    ) -> Generator[Wait, None, tuple[BatchResult, ...]]:
        names = [batch.trainer for batch in batches]
        if not set(names) <= self.gradients.keys():
            raise InvalidRequest("there is no such trainer", param="trainer")
        return self._run("".join(names), batches[0].data, names, micro_batch_tokens)

    def _run(
        self, key: str, pieces: Sequence[Datum], names: list[str], call: int
    ) -> Generator[Wait, None, tuple[BatchResult, ...]]:
        number = 0
        for i, piece in enumerate(pieces):
            if i:
                self.under_way.discard(key)
                yield Pause(i / len(pieces))
            assert not self.under_way - {key}, "two passes have activations at once"
            self.under_way.add(key)
            for _ in piece.tokens:
                if (key, number) in self.fail:
                    self.under_way.discard(key)
                    raise self.fail[key, number]
                yield lambda number=number: self._wait(key, number)
                number += 1
        self.under_way.discard(key)
        for name in names:
            self.gradients[name].append(call)
        return tuple(BatchResult(name, 0.0, 0, (), ()) for name in names)

    def _wait(self, key: str, number: int) -> None:
        if (key, number) in self.fail_wait:
            self.under_way.discard(key)
            raise self.fail_wait[key, number]

    def step(self, name: str, adam: AdamParams, more: bool = False) -> Generator[Wait, None, StepDone]:
        used, self.gradients[name] = self.gradients[name], []
        self.steps[name].append(used)
        yield lambda: None
        return StepDone(name, len(self.steps[name]), 1.0, True)

    def settle(self, name: str, keep: bool) -> None: ...

    def publish(self, name: str) -> Callable[[], AdapterWeights]:
        return lambda: adapter(name)

    def snapshot(self, name: str, optimizer: bool = True) -> Callable[[str], None]:
        return lambda folder: None

    def drop_gradients(self, name: str) -> None:
        if name in self.gradients:
            self.gradients[name] = []


SECONDS = 60.0
"""Longest time of a run."""


class Driver:
    """A host that is turned as the pipeline turns it: one slice is launched before the one before it is waited for."""

    def __init__(self, backend: TrainerBackend, budget: int = BUDGET, *, learns: bool = True) -> None:
        self.adapters = Adapters(
            AdapterStore({}, most_bytes=1 << 30, most=0), Loader(lambda source: adapter("x")), SlotTable(1)
        )
        self.host = TrainerHost(lambda: backend, self.adapters, learns=learns, most_rank=8, budget_bytes=budget)
        self.answers: list[m.Outbound] = []
        self.slices: list[Slice] = []
        self.failures: list[str] = []
        self.took: dict[str, float] = defaultdict(float)
        self._flight: deque[tuple[Slice, Wait, float]] = deque()

    def open(self, *names: str) -> Driver:
        for i, name in enumerate(names):
            self.host.submit(m.OpenTrainer(1000 + i, TrainerSpec(name, 1, 1.0)))
        self.run()
        self.answers.clear()
        self.slices.clear()
        return self

    def turn(self, milliseconds: Callable[[Slice], float] = lambda slice_: 1.0) -> None:
        slice_ = self.host.next_slice()
        if slice_ is not None:
            wait = self.host.launch(slice_)
            if wait is None:
                self.host.charge(slice_, 0.0)
            else:
                self.slices.append(slice_)
                self._flight.append((slice_, wait, milliseconds(slice_)))
        if len(self._flight) > 1 or (slice_ is None and self._flight):
            read, wait, ms = self._flight.popleft()
            wait()
            self.host.charge(read, ms)
            for name in read.trainers:
                self.took[name] += ms / len(read.trainers)
        self.answers += self.host.answers()
        self.failures += self.host.device_failures()

    def run(self, most: int = 20_000) -> Driver:
        """Turn until nothing is left to do; other threads, which save, may need longer than `most` turns take."""
        turns, late = 0, time.monotonic() + SECONDS
        while self.host.jobs or self._flight:
            assert turns < most or time.monotonic() < late, "never done"
            self.turn()
            turns += 1
        return self


def draw_message(rng: Random, call: int, *, exports: bool) -> m.Learning:
    """A message for one trainer of PAIR, or for both. `exports`: other threads may have to finish it."""
    name = rng.choice(PAIR)
    if rng.random() < 0.6:
        names = rng.choice((name, PAIR))
        data = tuple(Datum((0,) * rng.randint(1, 4), 1, ()) for _ in range(rng.randint(1, 5)))
        return m.ForwardBackward(call, tuple(Batch(n, data, LossConfig()) for n in names), False, call)
    brief = m.SettleTrainer(call, name, True)
    if not exports:
        return rng.choice((m.OptimStep(call, name, AdamParams(0.1)), brief))
    others = m.PublishTrainer(call, name), m.SaveTrainer(call, name, "/folder")
    return rng.choice((m.OptimStep(call, name, AdamParams(0.1)), brief, *others))


class Learning:
    """Two trainers beside a random workload, some of whose slices fail. Each message is answered once, in its order."""

    def __init__(self, rng: Random):
        self._rng = rng
        self._backend = Backend()
        self._driver = Driver(self._backend).open(*PAIR)
        self._messages: list[m.Learning] = []
        if rng.random() < 0.5:
            self._backend.fail[rng.choice((*PAIR, PAIR)), rng.randint(0, 9)] = RuntimeError("broken")

    def turn(self, due: bool) -> None:
        """Maybe ask for something, and run a slice if learning is due."""
        if self._rng.random() < 0.2:
            self._messages.append(draw_message(self._rng, len(self._messages), exports=False))
            self._driver.host.submit(self._messages[-1])
        if due:
            self._driver.turn()

    def finish(self) -> int:
        """Run what is left and look at all of it; how many messages there were."""
        self._driver.run()
        answers: list[Any] = self._driver.answers
        assert Counter(x.call for x in answers) == Counter(x.call for x in self._messages), "lost or answered twice"
        failed = {x.call for x in answers if isinstance(x, m.CallFailed)}
        place = {x.call: i for i, x in enumerate(answers)}
        for name in PAIR:
            own = [x for x in self._messages if name in trainers_of(x)]
            assert [x.call for x in own] == sorted((x.call for x in own), key=place.__getitem__), "another order"
            used, since = [], list[int]()
            for x in own:
                if isinstance(x, m.OptimStep):
                    used.append(since)
                    since = []
                elif x.call in failed:
                    since = []
                elif isinstance(x, m.ForwardBackward):
                    since.append(x.call)
            assert self._backend.steps[name] == used, "gradients are lost, or another trainer's failure took them"
            assert self._backend.gradients[name] == since
        return len(self._messages)
