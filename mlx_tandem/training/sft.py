"""Supervised fine-tuning: its settings, and examples from a JSONL file in shuffled batches, some of them held out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.engine.learning import Datum
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.examples import Codec, Example, Pair, cut
from mlx_tandem.training.schedules import ScheduleKind

EPOCHS = 3
"""Epochs where nobody says how many and nothing is held out to judge by."""

MOST_EPOCHS = 100
PATIENCE_EPOCHS = 3
LEAST_FALL = 1e-3
"""If the number of epochs is open, training ends when the held-out loss has not fallen by LEAST_FALL nats per token in
PATIENCE_EPOCHS epochs, and after MOST_EPOCHS at the latest."""


BATCH_SIZE = 8
"""Default number of examples in one batch."""

TOO_FEW = "there are too few different examples to hold some out"


class SftConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a fine-tuning. Ranges are those of `limits.LEARNING`."""

    epochs: int | None = None  # None: until the held-out loss no longer falls
    batch_size: int = BATCH_SIZE  # examples of one batch
    batch_tokens: int = 0  # of one batch, if that is fewer examples; 0: no such limit
    accumulate: int = 1  # batches of one step
    learning_rate: float = 2e-4  # the highest
    schedule: ScheduleKind | None = None  # None: cosine; constant if epochs are open
    rate_floor: float = 0.0  # share of the highest learning rate that a schedule ends at
    warmup_share: float = 0.05  # of all steps, in which the rate rises to it; of those of an epoch if epochs are open
    weight_decay: float = 0.0
    grad_norm: float = 1.0  # gradients are clipped to it; 0: not
    eval_every: int = 0  # steps; 0: after each epoch
    patience: int = 0  # evaluations without a fall after which training ends; 0: if epochs are open, PATIENCE_EPOCHS
    least_fall: float = LEAST_FALL  # nats per token by which the held-out loss has to be lower to have fallen
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name not in ("seed", "schedule") and (name, self.epochs) != ("epochs", None):
                limits.check(name, getattr(self, name))
        limits.check("trainer_seed", self.seed, "seed")


# -- data -------------------------------------------------------------------------------------------------------------


class Taught(Protocol):
    """What a step learns from: one example as token ids."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that are computed."""


E = TypeVar("E")
T = TypeVar("T", bound=Taught)


@dataclass(frozen=True)
class Line(Generic[E]):
    """An example and where it stands."""

    place: str
    example: E


@dataclass(frozen=True)
class Encoded(Generic[T]):
    """Examples as data for a trainer."""

    data: list[T]
    shortened: int = 0  # that were longer than allowed
    left_out: int = 0  # of which nothing would have been left to teach


def read(path: Path, parse: Callable[[Mapping[str, Any]], E]) -> list[Line[E]]:
    """Return the examples of a JSONL file, each as `parse` reads it. Raises InvalidRequest naming the file and the
    line.
    """
    found = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    with at(place):
                        found.append(Line(place, parse(_object(line))))
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be read: {e.strerror}", param="data") from e
    if not found:
        raise InvalidRequest(f"{path} holds no example", param="data")
    return found


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > limits.MAX_EXAMPLE_BYTES:
        raise InvalidRequest(f"more than {limits.MAX_EXAMPLE_BYTES} bytes")
    try:
        value: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidRequest(f"not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise InvalidRequest("not an object")
    return value


def encode(lines: Sequence[Line[Example]], codec: Codec, *, max_length: int, raw: bool = False) -> Encoded[Datum]:
    """Return each example as tokens, cut to `max_length` of them.

    A prompt and its completion are a question and its answer in the model's chat form, where it has one and `raw` does
    not say otherwise. Raises InvalidRequest naming the file and the line.
    """
    data, shortened, left_out = [], 0, 0
    for line in lines:
        example = line.example
        if isinstance(example, Pair) and codec.chats and not raw:
            example = example.chat()
        with at(line.place):
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
def at(place: str) -> Iterator[None]:
    """Put the place into errors of the block."""
    try:
        yield
    except InvalidRequest as e:
        raise InvalidRequest(f"{place}: {e.message}", param=e.param, code=e.code) from e


def split(data: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Return what is learned and what is held out, by lot, at least one each; a share of 0 holds out none.

    Examples that are equal stay together, so that none of the held-out ones is learned. Raises InvalidRequest when
    there are too few.
    """
    if not share:
        return list(data), []
    kinds = list(dict.fromkeys(data))
    held = set(random.Random(seed).sample(kinds, _held(len(kinds), share)))
    learned = [datum for datum in data if datum not in held]
    if not learned:
        raise InvalidRequest(TOO_FEW, param="valid_share")
    return learned, [datum for datum in data if datum in held]


def count_split(lines: Sequence[Line[Any]], share: float) -> tuple[int, int]:
    """Return the most examples that `split` leaves to learn from, and the fewest that it holds out.

    Raises InvalidRequest when there are too few.
    """
    if not share:
        return len(lines), 0
    different = len({msgspec.json.encode(line.example) for line in lines})
    held = _held(different, share)
    if held == different:
        raise InvalidRequest(TOO_FEW, param="valid_share")
    return len(lines) - held, held


def _held(different: int, share: float) -> int:
    """Return how many of `different` different examples are held out."""
    return min(max(round(share * different), 1), different)


def batches(data: Sequence[T], config: SftConfig, epoch: int) -> list[list[T]]:
    """Return all data once, in batches, in an order of this epoch's own. An example over `batch_tokens` is a batch by
    itself.
    """
    order = list(data)
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    made: list[list[T]] = []
    tokens = 0
    for datum in order:
        tokens += len(datum.tokens)
        full = made and (len(made[-1]) == config.batch_size or 0 < config.batch_tokens < tokens)
        if not made or full:
            made.append([])
            tokens = len(datum.tokens)
        made[-1].append(datum)
    return made
