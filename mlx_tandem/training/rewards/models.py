"""The scoring function `reward_model`: the score that a served reward model gives to a prompt with its completion.

The engine computes it, with the base model that is in memory, and no worker process is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

REWARD_MODEL = "reward_model"
"""The name of the function."""


class ModelOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `reward_model`: the name of the reward model, or one of its versions as name@version."""

    model: str


class RewardModels(Protocol):
    """The reward models that a server has."""

    def check(self, name: str) -> None:
        """Raise InvalidRequest unless `name` is a reward model that is loaded."""

    async def scores(self, name: str, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each prompt with its completion, as token ids. Raises TandemError."""
