"""What is scored and by what, and what the pool and its workers say to each other."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from mlx_tandem.config import RewardSpec
from mlx_tandem.isolation.frames import Busy
from mlx_tandem.training.rewards.models import REWARD_MODEL

Kind = Literal["timeout", "memory", "died", "raised", "invalid", "too_large", "model"]
"""Why there is no score. `invalid`: the function returned something else than a number in limits.py's range. `model`:
the reward model could not be asked."""
KINDS: tuple[Kind, ...] = get_args(Kind)


class Sample(Struct, frozen=True):
    """One completion, as reward functions see it."""

    prompt: str
    completion: str
    metadata: dict[str, Any] = {}
    tokens: int = 0  # of the completion
    finish_reason: str = ""  # why it ended, such as "stop" or "length"; empty: nobody knows
    sequence: tuple[int, ...] = ()  # token ids of prompt and completion, for reward models; functions see none


class Scoring(Struct, frozen=True):
    """A checked wish: the weighted sum of `parts` is the reward."""

    function: str  # the name that was asked for; of an unnamed composite its parts' names, joined by +
    parts: tuple[RewardSpec, ...]
    metadata: dict[str, Any] = {}

    @property
    def computed(self) -> tuple[RewardSpec, ...]:
        """The parts that functions compute in worker processes."""
        return tuple(part for part in self.parts if part.function != REWARD_MODEL)

    @property
    def judged(self) -> tuple[RewardSpec, ...]:
        """The parts that are scores of reward models."""
        return tuple(part for part in self.parts if part.function == REWARD_MODEL)


class Item(Struct, frozen=True, array_like=True):
    """One score to compute. A batch is a list of encoded ones: each is decoded afresh, so nothing is shared."""

    parts: tuple[RewardSpec, ...]
    sample: Sample


class Scored(Struct, frozen=True, array_like=True, tag=True):
    """An item's reward. The items of a batch are answered in their order."""

    value: float


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """An item that has no reward."""

    kind: Kind
    detail: str = ""  # an exception's or a value's type: never a text, which may quote a prompt


MAX_ANSWER = 1024  # bytes

decode_item = msgspec.msgpack.Decoder(Item).decode
decode_answer = msgspec.msgpack.Decoder(Scored | Failed | Busy).decode
