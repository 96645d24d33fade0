"""Supervised fine-tuning: examples from a JSONL file, taught in shuffled batches, judged on some that are held out."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.engine.learning import BatchResult, Datum, LossConfig, StepDone
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.examples import Codec, Example, Pair, cut, parse

EPOCHS = 3
"""Epochs where nobody says how many and nothing is held out to judge by."""

MOST_EPOCHS = 100
PATIENCE_EPOCHS = 3
LEAST_FALL = 1e-3
"""Where nobody says how many epochs, training ends once the held-out loss has not fallen by LEAST_FALL nats per token
in PATIENCE_EPOCHS epochs, and after MOST_EPOCHS at the latest."""


class SftConfig(Struct, frozen=True):
    """Ranges are those of `limits.LEARNING`."""

    epochs: int | None = None  # None: until the held-out loss no longer falls
    batch_size: int = 8  # examples of one batch
    batch_tokens: int = 0  # of one batch, if that is fewer examples; 0: no such limit
    accumulate: int = 1  # batches of one step
    learning_rate: float = 2e-4  # the highest
    warmup_share: float = 0.05  # of all steps, in which the rate rises to it; of those of an epoch if epochs are open
    weight_decay: float = 0.0
    grad_norm: float = 1.0  # gradients are clipped to it; 0: not
    eval_every: int = 0  # steps; 0: after each epoch
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "seed" and (name, self.epochs) != ("epochs", None):
                limits.check(name, getattr(self, name))


# -- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """An example and where it stands."""

    place: str
    example: Example


@dataclass(frozen=True)
class Encoded:
    """Examples as data for a trainer."""

    data: list[Datum]
    shortened: int = 0  # that were longer than allowed
    left_out: int = 0  # of which nothing would have been left to teach


def read(path: Path) -> list[Line]:
    """Return the examples of a JSONL file. Raises InvalidRequest naming the file and the line."""
    found = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    with _at(place):
                        found.append(Line(place, _example(line)))
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be read: {e.strerror}", param="data") from e
    if not found:
        raise InvalidRequest(f"{path} holds no example", param="data")
    return found


def _example(line: bytes) -> Example:
    if len(line) > limits.MAX_EXAMPLE_BYTES:
        raise InvalidRequest(f"more than {limits.MAX_EXAMPLE_BYTES} bytes")
    try:
        value: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidRequest(f"not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise InvalidRequest("not an object")
    return parse(value)


def encode(lines: Sequence[Line], codec: Codec, *, max_length: int, raw: bool = False) -> Encoded:
    """Return each example as tokens, cut to `max_length` of them.

    A prompt and its completion are a question and its answer in the model's chat form, where it has one and `raw` does
    not say otherwise. Raises InvalidRequest naming the file and the line.
    """
    data, shortened, left_out = [], 0, 0
    for line in lines:
        example = line.example
        if isinstance(example, Pair) and codec.chats and not raw:
            example = example.chat()
        with _at(line.place):
            datum = example.datum(codec)
        kept = cut(datum, max_length)
        if kept is None:
            left_out += 1
        else:
            shortened += kept is not datum
            data.append(kept)
    if not data:
        raise InvalidRequest(f"nothing to learn is left within {max_length} tokens", param="max_length")
    return Encoded(data, shortened, left_out)


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as e:
        raise InvalidRequest(f"{place}: {e.message}", param=e.param, code=e.code) from e


def split(data: Sequence[Datum], share: float, seed: int) -> tuple[list[Datum], list[Datum]]:
    """Return what is learned and what is held out, by lot, at least one each; a share of 0 holds out none.

    Examples that are equal stay together, so that none of the held-out ones is learned. Raises InvalidRequest when
    there are too few.
    """
    if not share:
        return list(data), []
    kinds = list(dict.fromkeys(data))
    held = set(random.Random(seed).sample(kinds, min(max(round(share * len(kinds)), 1), len(kinds))))
    learned = [datum for datum in data if datum not in held]
    if not learned:
        raise InvalidRequest("there are too few different examples to hold some out", param="valid_share")
    return learned, [datum for datum in data if datum in held]


def batches(data: Sequence[Datum], config: SftConfig, epoch: int) -> list[list[Datum]]:
    """Return all data once, in batches, in an order of this epoch's own. An example over `batch_tokens` is a batch by
    itself.
    """
    order = list(data)
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    made: list[list[Datum]] = []
    tokens = 0
    for datum in order:
        tokens += len(datum.tokens)
        full = made and (len(made[-1]) == config.batch_size or 0 < config.batch_tokens < tokens)
        if not made or full:
            made.append([])
            tokens = len(datum.tokens)
        made[-1].append(datum)
    return made


def rate(config: SftConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step from 1 to `steps`: up in a line, then down to 0 on half a cosine."""
    rising = math.ceil(config.warmup_share * steps)
    if step <= rising:
        return config.learning_rate * step / rising
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (step - rising - 1) / max(steps - rising, 1)))


# -- learning ---------------------------------------------------------------------------------------------------------


class Learner(Protocol):
    """What `fit` needs of a trainer."""

    def forward_backward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        """Add the gradients of `data` to what the next step uses."""

    def forward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        """Compute the same without gradients."""

    def step(self, learning_rate: float, *, weight_decay: float, grad_norm: float) -> StepDone:
        """Take one step of the optimiser with the gradients since the last."""


@dataclass(frozen=True)
class Step:
    """One step of the optimiser. `loss` is nats per taught token before it; `tokens` are all that went through."""

    step: int
    steps: int | None  # of the whole training, if that is known
    loss: float
    tokens: int
    learning_rate: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """`loss` of what is held out, in nats per taught token. `best`: the lowest of any step so far. `fell`: by
    LEAST_FALL or more since it last did, or since the beginning.
    """

    step: int
    loss: float
    best: bool
    fell: bool


def fit(
    learner: Learner, train: Sequence[Datum], valid: Sequence[Datum], config: SftConfig
) -> Iterator[Step | Evaluation]:
    """Learn, and yield what happened after each step and each evaluation of what is held out (if anything is).

    The first evaluation is that before learning, at step 0. While an evaluation is handed out the learner is in the
    state that was judged. The gradient of a step is that of the mean over its taught tokens, however it is batched.
    Where the number of epochs is open, the learning rate stays at its highest and the held-out loss says when to stop.
    Raises InvalidRequest when gradients stop being finite.
    """
    is_open = config.epochs is None and bool(valid)
    most = config.epochs or (MOST_EPOCHS if is_open else EPOCHS)
    steps = None if is_open else sum(len(_groups(train, config, epoch)) for epoch in range(most))
    exam = _Exam(learner, valid, config)
    done = 0
    if valid:
        yield exam.hold(0)
    for epoch in range(most):
        groups = _groups(train, config, epoch)
        for at, group in enumerate(groups, 1):
            done += 1
            now = _open_rate(config, done, len(groups)) if steps is None else rate(config, done, steps)
            yield _learn(learner, group, config, done, steps, now)
            if valid and (done % config.eval_every == 0 if config.eval_every else at == len(groups)):
                yield exam.hold(done)
        if is_open and done - exam.fell_at >= PATIENCE_EPOCHS * len(groups):
            break
    if valid and exam.held_at != done:
        yield exam.hold(done)


def _groups(train: Sequence[Datum], config: SftConfig, epoch: int) -> list[Sequence[list[Datum]]]:
    """Return the batches of each step of an epoch."""
    return [*_chunks(batches(train, config, epoch), config.accumulate)]


def _open_rate(config: SftConfig, step: int, epoch: int) -> float:
    """Return the learning rate of a step where nobody knows how many follow; `epoch` is the number of an epoch's."""
    return config.learning_rate * min(step / max(math.ceil(config.warmup_share * epoch), 1), 1.0)


class _Exam:
    """Looks at what is held out, each of which is compared with those before."""

    def __init__(self, learner: Learner, valid: Sequence[Datum], config: SftConfig):
        self._learner = learner
        self._valid = valid
        self._config = config
        self._lowest = self._fallen_to = math.inf
        self.fell_at = self.held_at = 0  # steps

    def hold(self, step: int) -> Evaluation:
        loss = evaluate(self._learner, self._valid, self._config)
        self.held_at = step
        if step == 0:
            self._fallen_to = loss
            return Evaluation(0, loss, False, False)
        best, fell = loss < self._lowest, loss <= self._fallen_to - LEAST_FALL
        if best:
            self._lowest = loss
        if fell:
            self._fallen_to, self.fell_at = loss, step
        return Evaluation(step, loss, best, fell)


def _learn(
    learner: Learner, group: Sequence[list[Datum]], config: SftConfig, step: int, steps: int | None, now: float
) -> Step:
    """Take one step at the learning rate `now`."""
    started = time.perf_counter()
    taught = sum(_taught(batch) for batch in group)
    loss = LossConfig("cross_entropy", scale=1.0 / taught)
    nats = sum(_nats(batch, learner.forward_backward(batch, loss)) for batch in group)
    stepped = learner.step(now, weight_decay=config.weight_decay, grad_norm=config.grad_norm)
    if not stepped.finite:
        raise InvalidRequest(
            f"gradients are no longer finite at step {step}; a lower learning rate may help", param="learning_rate"
        )
    tokens = sum(len(datum.tokens) for batch in group for datum in batch)
    return Step(step, steps, nats / taught, tokens, now, stepped.grad_norm, time.perf_counter() - started)


def evaluate(learner: Learner, data: Sequence[Datum], config: SftConfig) -> float:
    """Return the mean loss of a taught token, in nats."""
    loss = LossConfig("cross_entropy")
    nats = sum(_nats(batch, learner.forward(batch, loss)) for batch in _chunks(data, config.batch_size))
    return nats / _taught(data)


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _taught(data: Sequence[Datum]) -> int:
    return sum(weight != 0 for datum in data for weight in datum.weights)


def _nats(data: Sequence[Datum], result: BatchResult) -> float:
    pairs = (
        pair for datum, own in zip(data, result.logprobs, strict=True) for pair in zip(datum.weights, own, strict=True)
    )
    return -math.fsum(logprob for weight, logprob in pairs if weight)
