"""The course of a training from a file: steps, evaluations of what is held out, and when it ends.

Everything that the course depends on is in its settings, its data and the events so far, so that a run that was
interrupted continues exactly as if it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from mlx_tandem.engine.learning import BatchResult, Datum, LossConfig, StepDone
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.schedules import Schedule
from mlx_tandem.training.sft import BATCH_SIZE, EPOCHS, MOST_EPOCHS, PATIENCE_EPOCHS, SftConfig, Taught, batches


class Learner(Protocol):
    """What `fit` needs of a trainer."""

    def forward_backward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        """Add the gradients of `data` to what the next step uses."""

    def forward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        """Compute the same without gradients."""

    def step(self, learning_rate: float, *, weight_decay: float, grad_norm: float) -> StepDone:
        """Take one step of the optimiser with the gradients since the last."""


class Judged(NamedTuple):
    """How well a trainer does on examples: its mean loss and, where each is done right or wrong, the share of right."""

    loss: float
    accuracy: float | None = None


class Objective(Protocol):
    """What a course teaches. Losses are in nats per `unit`."""

    unit: str

    def learn(self, learner: Learner, group: Sequence[Sequence[Any]], /) -> float:
        """Add the gradients of the mean loss over the batches of one step, and return that loss."""

    def judge(self, learner: Learner, data: Sequence[Any], batch_size: int, /) -> Judged:
        """Return how well the learner does on `data`."""


class Step(Struct, frozen=True, tag=True):
    """One step of the optimiser. `loss` is the mean before it, in nats per unit of the objective; `tokens` are all that
    went through.
    """

    step: int
    steps: int | None  # of the whole training, if that is known
    loss: float
    tokens: int
    learning_rate: float
    grad_norm: float
    seconds: float


class Evaluation(Struct, frozen=True, tag=True):
    """`loss` of what is held out, in nats per unit of the objective; `accuracy`: the share of it that is right, if the
    objective says that. `best`: the lowest loss of any step so far. `fell`: by `least_fall` or more since it last did,
    or since the beginning.
    """

    step: int
    loss: float
    best: bool
    fell: bool
    accuracy: float | None = None


Event = Step | Evaluation


@dataclass(frozen=True)
class Course:
    """The shape of a fine-tuning, which its settings and its data decide."""

    config: SftConfig
    train: Sequence[Taught]
    valid: Sequence[Taught]
    objective: Objective = field(default_factory=lambda: Likelihood())

    def __post_init__(self) -> None:
        _check_end(self.config, len(self.valid))

    @property
    def is_open(self) -> bool:
        """Whether the held-out loss decides how many epochs there are."""
        return self.config.epochs is None and bool(self.valid)

    @property
    def most_epochs(self) -> int:
        """The number of epochs after which training ends at the latest."""
        return self.config.epochs or (MOST_EPOCHS if self.is_open else EPOCHS)

    def groups(self, epoch: int) -> list[Sequence[list[Taught]]]:
        """Return the batches of each step of an epoch."""
        return [*_chunks(batches(self.train, self.config, epoch), self.config.accumulate)]

    def steps(self) -> int | None:
        """Return the number of steps, None where it is open."""
        return None if self.is_open else sum(len(self.groups(epoch)) for epoch in range(self.most_epochs))

    def ends_after(self, exam: Exam, step: int, epoch_steps: int | None) -> bool:
        """Return whether training ends after this step. `epoch_steps` are those of the epoch that it ends, if any."""
        if self.config.patience:
            return exam.without_fall >= self.config.patience
        return self.is_open and epoch_steps is not None and step - exam.fell_at >= PATIENCE_EPOCHS * epoch_steps


def check_plan(config: SftConfig, learned: int, held: int) -> int | None:
    """Return the most steps of a course, computed before its examples are tokenised; None if they depend on the tokens.

    At most `learned` examples will be learned from, and at least `held` will be held out. Raises InvalidRequest with
    the name of the setting that does not fit these numbers. The default of `batch_size` fits any number of examples.
    """
    _check_end(config, held)
    if config.batch_size > max(learned, BATCH_SIZE):
        raise InvalidRequest(
            f"batch_size is {config.batch_size}, but there are {learned} examples to learn", param="batch_size"
        )
    if config.batch_tokens:
        return None
    in_epoch = math.ceil(learned / config.batch_size)
    if config.accumulate > in_epoch:
        raise InvalidRequest(
            f"accumulate is {config.accumulate}, but an epoch of {learned} examples has {in_epoch} batches",
            param="accumulate",
        )
    epochs = config.epochs or (MOST_EPOCHS if held else EPOCHS)
    steps = epochs * math.ceil(in_epoch / config.accumulate)
    if config.eval_every > steps:
        raise InvalidRequest(
            f"eval_every is {config.eval_every}, but the training has at most {steps} steps", param="eval_every"
        )
    return steps


def _check_end(config: SftConfig, held: int) -> None:
    """Raise InvalidRequest for settings of the end of training that do not fit `held` held-out examples."""
    if config.patience and not held:
        raise InvalidRequest("patience needs examples that are held out", param="patience")
    if config.epochs is None and held and config.schedule not in (None, "constant"):
        raise InvalidRequest(
            f"the schedule {config.schedule} needs a number of epochs, without which the number of steps is open",
            param="schedule",
        )


def rate(config: SftConfig, step: int, steps: int | None, epoch_steps: int = 0) -> float:
    """Return the learning rate of a step from 1 to `steps`. Where these are open, the rise is within the first epoch,
    which has `epoch_steps`.
    """
    rising = math.ceil(config.warmup_share * (epoch_steps if steps is None else steps))
    if steps is None:
        schedule = Schedule("constant", rising)
    else:
        schedule = Schedule.over(config.schedule or "cosine", steps, rising, config.rate_floor)
    return config.learning_rate * schedule.share(step)


def fit(learner: Learner, course: Course, past: Sequence[Event] = ()) -> Iterator[Event]:
    """Learn, and yield what happened after each step and each evaluation of what is held out (if anything is).

    The first evaluation is that before learning, at step 0. While an event is handed out the learner is in the state
    that it is about, and a later `fit` with a learner in that state and all events so far as `past` continues from
    there. The gradient of a step is that of the mean over all of it, however it is batched. Raises InvalidRequest when
    gradients stop being finite.
    """
    config, valid = course.config, course.valid
    steps = course.steps()
    exam = Exam(learner, course)
    done = exam.recall(past)
    if valid and exam.held_at < 0:
        yield exam.hold(0)
    step = 0
    for epoch in range(course.most_epochs):
        groups = course.groups(epoch)
        if step + len(groups) < done:
            step += len(groups)
            continue
        for at, group in enumerate(groups, 1):
            step += 1
            if step > done:
                yield _learn(learner, group, course, step, steps, rate(config, step, steps, len(groups)))
            ends_epoch = at == len(groups)
            due = step % config.eval_every == 0 if config.eval_every else ends_epoch
            if valid and due and step > exam.held_at:
                yield exam.hold(step)
            if step >= done and course.ends_after(exam, step, len(groups) if ends_epoch else None):
                break
        else:
            continue
        break
    if valid and exam.held_at != step:
        yield exam.hold(step)


class Exam:
    """Looks at what is held out, each of which is compared with those before."""

    def __init__(self, learner: Learner, course: Course):
        self._learner = learner
        self._course = course
        self._lowest = self._fallen_to = math.inf
        self.fell_at = 0  # steps
        self.held_at = -1
        self.without_fall = 0
        """Evaluations since the loss last fell."""

    def recall(self, past: Sequence[Event]) -> int:
        """Take note of earlier evaluations, and return the number of steps that are done."""
        done = 0
        for event in past:
            if isinstance(event, Step):
                done = event.step
            else:
                self._note(event.step, Judged(event.loss, event.accuracy))
        return done

    def hold(self, step: int) -> Evaluation:
        """Evaluate what is held out after this step."""
        course = self._course
        return self._note(step, course.objective.judge(self._learner, course.valid, course.config.batch_size))

    def _note(self, step: int, judged: Judged) -> Evaluation:
        self.held_at = step
        loss = judged.loss
        if step == 0:
            self._fallen_to = loss
            return Evaluation(0, loss, False, False, judged.accuracy)
        best, fell = loss < self._lowest, loss <= self._fallen_to - self._course.config.least_fall
        self.without_fall = 0 if fell else self.without_fall + 1
        if best:
            self._lowest = loss
        if fell:
            self._fallen_to, self.fell_at = loss, step
        return Evaluation(step, loss, best, fell, judged.accuracy)


def _learn(
    learner: Learner, group: Sequence[list[Taught]], course: Course, step: int, steps: int | None, now: float
) -> Step:
    """Take one step at the learning rate `now`."""
    started, config = time.perf_counter(), course.config
    loss = course.objective.learn(learner, group)
    stepped = learner.step(now, weight_decay=config.weight_decay, grad_norm=config.grad_norm)
    if not stepped.finite:
        raise InvalidRequest(
            f"gradients are no longer finite at step {step}; a lower learning rate may help", param="learning_rate"
        )
    tokens = sum(len(example.tokens) for batch in group for example in batch)
    return Step(step, steps, loss, tokens, now, stepped.grad_norm, time.perf_counter() - started)


class Likelihood:
    """The objective of supervised fine-tuning: that taught tokens become likely."""

    unit = "token"

    def learn(self, learner: Learner, group: Sequence[Sequence[Datum]]) -> float:
        """Add the gradients of the mean over all taught tokens of a step's batches, and return that mean."""
        taught = sum(map(_taught, group))
        loss = LossConfig("cross_entropy", scale=1.0 / taught)
        return sum(_nats(batch, learner.forward_backward(batch, loss)) for batch in group) / taught

    def judge(self, learner: Learner, data: Sequence[Datum], batch_size: int) -> Judged:
        """Return the mean loss of a taught token."""
        loss = LossConfig("cross_entropy")
        nats = sum(_nats(batch, learner.forward(batch, loss)) for batch in _chunks(data, batch_size))
        return Judged(nats / _taught(data))


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _taught(data: Sequence[Datum]) -> int:
    return sum(weight != 0 for datum in data for weight in datum.weights)


def _nats(data: Sequence[Datum], result: BatchResult) -> float:
    pairs = (
        pair for datum, own in zip(data, result.logprobs, strict=True) for pair in zip(datum.weights, own, strict=True)
    )
    return -math.fsum(logprob for weight, logprob in pairs if weight)
