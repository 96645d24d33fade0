"""The host of all trainers: each has its own queue, gradients, memory and failures, and they share learning's time.

A message waits in the queue of the trainer that it names; a pass over several trainers waits in the queue of each. The
work of a message is a series of slices, which the pipeline launches one at a time between steps. Between two pieces of
work (the micro-batches of a pass, the steps of an optimiser) the trainer that has had the fewest milliseconds goes
next. Within a piece a pass is not interrupted, so that only the activations of one micro-batch are in memory at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapters import Adapters
from mlx_tandem.engine.budget import size_text
from mlx_tandem.engine.exports import Exports, call_failed
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.plan import DeviceError, OutOfMemory, Slice, Wait
from mlx_tandem.engine.trainer_queues import TrainerQueues, Work
from mlx_tandem.errors import Conflict, EngineError, EngineUnavailable, InvalidRequest, TandemError
from mlx_tandem.types import PassUnderWay

log = logging.getLogger(__name__)


class Pause:
    """A place in a pass, in place of a slice, where another trainer may go next. `done` is the share of the pass before
    it.
    """

    def __init__(self, done: float) -> None:
        self.done = done

    def __call__(self) -> None:
        """Return at once: there is nothing to wait for."""


class TrainerBackend(Protocol):
    """The work of trainers on the device.

    A TandemError is for the caller, and nothing has changed. A DeviceError says that the device failed, any other error
    that the code is wrong; after either, the trainers of the work have lost their gradients.
    """

    def required_bytes(self, spec: TrainerSpec, folder: str) -> int:
        """Return how many bytes the trainer would hold while it is open; nothing is computed."""

    def open(self, spec: TrainerSpec, folder: str, weights: AdapterWeights | None) -> TrainerInfo:
        """Make a trainer with the arrays in `folder`, else with `weights`, else with new ones."""

    def close(self, name: str) -> None:
        """Forget a trainer."""

    def run(
        self, batches: Sequence[Batch], forward_only: bool, micro_batch_tokens: int
    ) -> Generator[Wait, None, tuple[BatchResult, ...]]:
        """Run a pass. Each `next` launches one slice, while the slice before may still run, or yields a Pause."""

    def step(self, name: str, adam: AdamParams, more: bool) -> Generator[Wait, None, StepDone]:
        """Take one step of the optimiser, in slices. Nothing has changed until the last of them is done.

        With `more` the step is kept or taken back together with the next one.
        """

    def settle(self, name: str, keep: bool) -> None:
        """Keep the last step of the optimiser, or take it back."""

    def publish(self, name: str) -> Callable[[], AdapterWeights]:
        """Copy the present weights. The returned function turns them into an adapter, on any thread."""

    def snapshot(self, name: str, optimizer: bool) -> Callable[[str], None]:
        """Copy the present state, or without `optimizer` only the adapter. The returned function writes it into a
        folder, on any thread.
        """

    def drop_gradients(self, name: str) -> None:
        """Forget the gradients of a trainer, if there is one of that name."""


class OpenTrainerState(NamedTuple):
    """The state of one open trainer."""

    name: str
    nbytes: int  # of the budget that it holds
    jobs: int  # messages that wait or are under way


class TrainerHost:
    """All trainers of one engine.

    The pipeline asks for `next_slice`, names it in its plan, launches it and reports its time. Answers are collected
    until `answers` is called. Errors of learning are answered and never raised. Used on the engine's thread only.
    """

    def __init__(
        self,
        make: Callable[[], TrainerBackend] | None,
        adapters: Adapters,
        *,
        learns: bool,
        most_rank: int,
        budget_bytes: int,
    ):
        """Create a host without trainers.

        Args:
            make: Makes the back end when the first message is handled; None: this engine has none.
            adapters: Where trainers are published to and may begin from.
            learns: Whether trainers are trained; if not, they are only opened and published.
            most_rank: The highest rank of an adapter that can be served.
            budget_bytes: What all open trainers may take on the device.
        """
        self._make = make
        self._adapters = adapters
        self._learns = learns
        self._budget_bytes = budget_bytes
        self._backend: TrainerBackend | None = None
        self._queues = TrainerQueues()
        self._held: dict[str, int] = {}  # bytes of the open trainers
        self._exports = Exports(adapters, most_rank)
        self._answers: list[m.Outbound] = []
        self._failures: list[str] = []
        self._ran_out = False  # whether the last message that ended did so for lack of memory
        self._is_stopped = False

    # messages

    @property
    def has_work(self) -> bool:
        """Whether there is a slice to launch."""
        return len(self._queues) > 0

    @property
    def is_waiting(self) -> bool:
        """Whether other threads are preparing a version or a checkpoint."""
        return len(self._exports) > 0

    @property
    def jobs(self) -> int:
        """Number of messages that wait or are under way."""
        return len(self._queues) + len(self._exports)

    def open_trainers(self) -> tuple[OpenTrainerState, ...]:
        """Return the open trainers by name, with what each holds."""
        return tuple(OpenTrainerState(name, size, self._queues.jobs(name)) for name, size in sorted(self._held.items()))

    def passes(self) -> tuple[PassUnderWay, ...]:
        """Return how far the passes under way are, by trainer."""
        return self._queues.passes()

    def submit(self, message: m.Learning) -> None:
        """Queue a message behind the others of its trainers, or answer it with an error if it cannot be done here."""
        try:
            self._check(message)
        except TandemError as e:
            self._answers.append(call_failed(message.call, e))
        else:
            self._queues.add(message)

    def _check(self, message: m.Learning) -> None:
        """Raise a TandemError for a message that cannot be done here."""
        if self._is_stopped:
            raise EngineUnavailable("the engine is draining")
        if self._make is None:
            raise InvalidRequest("this engine does not learn")
        if not self._learns and isinstance(message, m.ForwardBackward | m.OptimStep):
            raise Conflict("nothing is trained here: the mode is inference_only", param="mode")

    def answers(self) -> list[m.Outbound]:
        """Return the answers since the last call, including those of exports that other threads have finished."""
        self._answers += self._exports.poll()
        answers, self._answers = self._answers, []
        return answers

    def device_failures(self) -> list[str]:
        """Return the failures since the last call that concern the device and not one message."""
        failures, self._failures = self._failures, []
        return failures

    def stop(self) -> None:
        """Answer all messages with EngineUnavailable and accept no more; exports continue."""
        self._is_stopped = True
        for work in self._queues:
            self._end(work, call_failed(work.message.call, EngineUnavailable("the engine is draining")))

    def close(self) -> None:
        """Wait until all exports are written."""
        self._exports.close()

    # slices

    def next_slice(self) -> Slice | None:
        """Return the name of the slice to `launch` next; None when there is none."""
        return self._queues.chosen().slice if len(self._queues) else None

    def launch(self, slice_: Slice) -> Wait | None:
        """Launch a slice and return a function that waits for it, or None when it is done. Neither raises."""
        work = self._queues.first(slice_.trainers[0])
        self._queues.begin(work)
        try:
            done = self._advance(work)
        except TandemError as e:
            self._end(work, call_failed(work.message.call, e))
        except Exception as e:
            self._fail(work, e)
        else:
            if callable(done):
                work.launched += 1
                return lambda: self._wait(work, done)
            if done is not None:
                self._ran_out = False
                self._end(work, *done)
        return None

    def charge(self, slice_: Slice, milliseconds: float) -> None:
        """Note how long the device had for a slice."""
        self._queues.charge(slice_, milliseconds)

    def _advance(self, work: Work) -> Wait | tuple[m.Outbound, ...] | None:
        """Launch the next slice of the work and return a function that waits for it.

        Return the answers of work that is done instead; they are empty when another thread will answer. Return None
        when the work has paused and another trainer goes first.
        """
        if self._backend is None:
            assert self._make is not None
            self._backend = self._make()
        message = work.message
        if not isinstance(message, m.ForwardBackward | m.OptimStep):
            return self._do(self._backend, message)
        if work.slices is None:
            work.slices = _slices(self._backend, message)
        try:
            while isinstance(wait := next(work.slices), Pause):
                work.done = wait.done
                if self._queues.gives_way(work):
                    return None
        except StopIteration as e:
            return (e.value,)
        return wait

    def _do(self, backend: TrainerBackend, message: m.Learning) -> tuple[m.Outbound, ...]:
        """Do brief work and return its answer, or nothing when another thread will answer."""
        match message:
            case m.OpenTrainer():
                return (self._open(backend, message),)
            case m.PublishTrainer():
                self._exports.begin(message, backend.publish(message.trainer))
                return ()
            case m.SaveTrainer():
                write, folder = backend.snapshot(message.trainer, message.optimizer), message.folder
                self._exports.begin(message, lambda: write(folder))
                return ()
            case m.SettleTrainer():
                backend.settle(message.trainer, message.keep)
            case m.CloseTrainer():
                backend.close(message.trainer)
                self._held.pop(message.trainer, None)
        return (m.CallDone(message.call),)

    def _open(self, backend: TrainerBackend, message: m.OpenTrainer) -> m.Outbound:
        """Open a trainer if the budget has room for it. Raises InvalidRequest otherwise."""
        weights = self._loaded(message.digest) if message.digest else None
        nbytes = backend.required_bytes(message.spec, message.folder)
        others = {name: size for name, size in self._held.items() if name != message.spec.name}
        left = max(self._budget_bytes - sum(others.values()), 0)
        if nbytes > left:
            held = "".join(f"; {name} has {size_text(size)}" for name, size in sorted(others.items())[:8])
            raise InvalidRequest(
                f"this trainer would take {size_text(nbytes)}; of the {size_text(self._budget_bytes)} for "
                f"trainers {size_text(left)} are left{held}. A smaller rank, fewer targets or closing a trainer "
                "helps",
                param="rank",
            )
        info = backend.open(message.spec, message.folder, weights)
        self._held[message.spec.name] = nbytes
        return m.TrainerOpened(message.call, info)

    def _loaded(self, digest: str) -> AdapterWeights:
        """Return the weights of an adapter to begin with. Raises InvalidRequest if it is not in memory or is an
        activated LoRA, which a trainer would apply to every position.
        """
        weights = self._adapters.store.get(digest)
        if weights is None:
            raise InvalidRequest("this adapter version is not in memory", param="digest")
        if weights.info.invocation:
            raise InvalidRequest(
                "this adapter has alora_invocation_tokens: an activated LoRA cannot be trained", param="init_from"
            )
        return weights

    # ends

    def _wait(self, work: Work, wait: Wait) -> None:
        """Wait for a slice, unless its work has failed meanwhile."""
        if work.has_failed:
            return
        try:
            wait()
        except Exception as e:
            self._fail(work, e)

    def _fail(self, work: Work, error: Exception) -> None:
        """End the message of work that failed with an unforeseen error, and drop its trainers' gradients.

        A failure of the device is noted, since it may concern everybody; a lack of memory only if it comes twice in a
        row.
        """
        work.has_failed = True
        names = ", ".join(work.trainers)
        log.error("learning failed: %s of %s", work.kind, names, exc_info=error)
        ran_out = isinstance(error, OutOfMemory)
        if isinstance(error, DeviceError) and not error.again and (self._ran_out or not ran_out):
            self._failures.append(f"{work.kind} of {names}: {error}")
        self._ran_out = ran_out
        why = "the device has too little memory" if ran_out else type(error).__name__
        self._end(work, call_failed(work.message.call, EngineError(f"learning failed: {why}")))
        if self._backend is not None:
            for name in work.trainers:
                self._backend.drop_gradients(name)

    def _end(self, work: Work, *answer: m.Outbound) -> None:
        """Remove work that is over from all queues and keep its answer."""
        if work.is_over:
            return
        work.is_over = True
        if work.slices is not None:
            work.slices.close()
        self._queues.remove(work)
        self._answers += answer


def _slices(backend: TrainerBackend, message: m.ForwardBackward | m.OptimStep) -> Generator[Wait, None, m.Outbound]:
    """Yield the slices of a pass or of an optimiser's step; return its answer."""
    if isinstance(message, m.OptimStep):
        return m.Stepped(message.call, (yield from backend.step(message.trainer, message.adam, message.more)))
    passing = backend.run(message.batches, message.forward_only, message.micro_batch_tokens)
    return m.PassDone(message.call, (yield from passing))
