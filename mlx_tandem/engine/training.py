"""Learning beside what is served: its messages one after the other, each as short slices of device work.

Answers are collected until `answers` takes them. A bad message fails alone; after an error that nobody foresaw,
gradients and whatever was half done are dropped. What is published or saved is made ready on other threads, since it
is copied whole: nobody else waits for that.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapters import Adapters
from mlx_tandem.engine.learning import Adam, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.pipeline import Wait
from mlx_tandem.errors import Conflict, EngineError, EngineUnavailable, InvalidRequest, TandemError

log = logging.getLogger(__name__)


class Trainers(Protocol):
    """The device's side. TandemErrors are for the caller and change nothing; any other error is a failure."""

    def open(self, spec: TrainerSpec, folder: str, weights: AdapterWeights | None) -> TrainerInfo:
        """A trainer with the arrays of `folder`, else of `weights`, else fresh ones."""

    def close(self, name: str) -> None: ...

    def run(
        self, batches: Sequence[Batch], forward_only: bool, micro_batch_tokens: int
    ) -> Generator[Wait, None, tuple[BatchResult, ...]]:
        """Each `next` launches one slice; the one before it need not be done yet."""

    def step(self, name: str, adam: Adam) -> Generator[Wait, None, StepDone]:
        """As a pass; nothing has changed until it is through."""

    def settle(self, name: str, keep: bool) -> None: ...

    def publish(self, name: str) -> Callable[[], AdapterWeights]:
        """The present weights; what is returned makes them what a folder would be read as, on any thread."""

    def snapshot(self, name: str) -> Callable[[str], None]:
        """The present state; what is returned writes it into a folder, on any thread."""

    def abandon(self) -> None:
        """Drop all gradients and passes that are half done."""


class TrainingFailed(Exception):
    """A slice raised what nobody foresaw. Its message is answered; the state before it is what counts."""


class Training:
    """`make`: the trainers, made when the first is opened; None: this engine has none. `learns` False: they are opened
    and published but never trained. `most_rank`: of an adapter that can be served. `on_failure` is called with what
    went wrong on the device."""

    def __init__(
        self,
        make: Callable[[], Trainers] | None,
        adapters: Adapters,
        *,
        learns: bool,
        most_rank: int,
        on_failure: Callable[[Exception], object] = lambda error: None,
    ):
        self._make = make
        self._on_failure = on_failure
        self._adapters = adapters
        self._learns = learns
        self._most_rank = most_rank
        self._trainers: Trainers | None = None
        self._queue: deque[m.Learning] = deque()  # the first is under way
        self._under_way: Generator[Wait, None, m.Outbound] | None = None  # of the first message
        self._aside: list[_Aside] = []
        self._threads: dict[type, ThreadPoolExecutor] = {}  # by kind of work: no version waits for a checkpoint
        self._answers: list[m.Outbound] = []
        self._stopped = False

    @property
    def has_work(self) -> bool:
        """Whether `slice` has something to do."""
        return bool(self._queue)

    @property
    def is_brief(self) -> bool:
        """Whether what is next is short and rare, so that it need not wait for learning's turn."""
        return bool(self._queue) and not isinstance(self._queue[0], m.RunPass | m.StepTrainer)

    @property
    def is_waiting(self) -> bool:
        """Whether other threads have something to make ready."""
        return bool(self._aside)

    @property
    def jobs(self) -> int:
        """Messages that wait or are under way."""
        return len(self._queue) + len(self._aside)

    def submit(self, message: m.Learning) -> None:
        """Queue a message; one that cannot be done here is answered with its error."""
        try:
            self._check(message)
        except TandemError as e:
            self._fail(message, e)
        else:
            self._queue.append(message)

    def slice(self) -> Wait | None:
        """Launch one slice of device work of the first message, and return what waits for it; None when there is
        nothing to wait for. Both raise TrainingFailed."""
        message = self._queue[0]
        try:
            done = self._work(message)
        except TandemError as e:
            self._end()
            self._fail(message, e)
            return None
        except Exception as e:
            raise self._failed(message, e) from e
        if not callable(done):
            if done is not None:
                self._answers.append(done)
            self._end()
            return None
        wait = done

        def wait_or_fail() -> None:
            try:
                wait()
            except Exception as e:
                raise self._failed(message, e) from e

        return wait_or_fail

    def _failed(self, message: m.Learning, e: Exception) -> TrainingFailed:
        log.error("learning failed", exc_info=e)
        self._on_failure(e)
        if self._queue and self._queue[0] is message:
            self._end()
            self._fail(message, EngineError(f"learning failed: {type(e).__name__}"))
        if self._trainers is not None:
            self._trainers.abandon()
        return TrainingFailed(f"{type(message).__name__}: {type(e).__name__}")

    def answers(self) -> list[m.Outbound]:
        """What there is to say since the last time; what other threads have made ready is found out here."""
        if any(aside.future.done() for aside in self._aside):
            done = [aside for aside in self._aside if aside.future.done()]
            self._aside = [aside for aside in self._aside if aside not in done]
            self._answers += [self._settle(aside) for aside in done]
        answers, self._answers = self._answers, []
        return answers

    def _settle(self, aside: _Aside) -> m.Outbound:
        call = aside.message.call
        try:
            result = aside.future.result()
            if isinstance(aside.message, m.PublishTrainer):
                self._publish(result)
                return m.AdapterLoaded(call, result.info)
            return m.CallDone(call)
        except TandemError as e:
            return m.CallFailed(call, e.code or "invalid_value", e.message, e.param)
        except Exception as e:
            what = "published" if isinstance(aside.message, m.PublishTrainer) else "saved"
            log.error("a trainer could not be %s: %r", what, e)
            why = (e.strerror if isinstance(e, OSError) else None) or type(e).__name__
            failure = EngineError(f"the trainer could not be {what}: {why}")
            return m.CallFailed(call, failure.code or "", failure.message)

    def stop(self) -> None:
        """Nothing more is done or taken; what is being written is written."""
        self._stopped = True
        waiting, self._queue = self._queue, deque()
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None
        for message in waiting:
            self._fail(message, EngineUnavailable("the engine is draining"))

    def close(self) -> None:
        """Wait for what is being written."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)

    def _check(self, message: m.Learning) -> None:
        if self._stopped:
            raise EngineUnavailable("the engine is draining")
        if self._make is None:
            raise InvalidRequest("this engine does not learn")
        if not self._learns and isinstance(message, m.RunPass | m.StepTrainer):
            raise Conflict("nothing is trained here: the mode is inference_only", param="mode")

    def _fail(self, message: m.Learning, e: TandemError) -> None:
        self._answers.append(m.CallFailed(message.call, e.code or "invalid_value", e.message, e.param))

    def _end(self) -> None:
        self._queue.popleft()
        self._under_way = None

    def _work(self, message: m.Learning) -> Wait | m.Outbound | None:
        """What waits for the slice that was launched, or else the message is done here: its answer, unless another
        thread will have it."""
        if self._trainers is None:
            assert self._make is not None
            self._trainers = self._make()
        trainers = self._trainers
        match message:
            case m.RunPass() | m.StepTrainer():
                if self._under_way is None:
                    self._under_way = _slices(trainers, message)
                try:
                    return next(self._under_way)
                except StopIteration as e:
                    answer: m.Outbound = e.value
                    return answer
            case m.OpenTrainer():
                weights = self._loaded(message.digest) if message.digest else None
                return m.TrainerOpened(message.call, trainers.open(message.spec, message.folder, weights))
            case m.PublishTrainer():
                self._set_aside(message, trainers.publish(message.trainer))
                return None
            case m.SaveTrainer():
                write = trainers.snapshot(message.trainer)
                self._set_aside(message, lambda: write(message.folder))
                return None
            case m.SettleTrainer():
                trainers.settle(message.trainer, message.keep)
            case m.CloseTrainer():
                trainers.close(message.trainer)
        return m.CallDone(message.call)

    def _loaded(self, digest: str) -> AdapterWeights:
        weights = self._adapters.store.get(digest)
        if weights is None:
            raise InvalidRequest("this adapter version is not in memory", param="digest")
        return weights

    def _publish(self, weights: AdapterWeights) -> None:
        if weights.info.rank > self._most_rank:
            raise InvalidRequest(
                f"an adapter of rank {weights.info.rank} cannot be served: the limit is {self._most_rank}", param="rank"
            )
        self._adapters.publish(weights)

    def _set_aside(self, message: m.PublishTrainer | m.SaveTrainer, work: Callable[[], Any]) -> None:
        thread = self._threads.get(type(message))
        if thread is None:
            thread = self._threads[type(message)] = ThreadPoolExecutor(1, "tandem-training")
        self._aside.append(_Aside(message, thread.submit(work)))


def _slices(trainers: Trainers, message: m.RunPass | m.StepTrainer) -> Generator[Wait, None, m.Outbound]:
    if isinstance(message, m.StepTrainer):
        return m.Stepped(message.call, (yield from trainers.step(message.trainer, message.adam)))
    passing = trainers.run(message.batches, message.forward_only, message.micro_batch_tokens)
    return m.PassDone(message.call, (yield from passing))


class _Aside(NamedTuple):
    """What another thread makes ready."""

    message: m.PublishTrainer | m.SaveTrainer
    future: Future[Any]
