"""The amount of work of the checks of `tandem doctor --mac`."""

from __future__ import annotations

from typing import Self

from msgspec import Struct


class Sizes(Struct, frozen=True):
    """The amount of work of those checks that can do more or less, and the model that they use."""

    model: str = ""  # folder of the model that is measured; empty: one with random weights
    small: bool = False  # whether models with random weights have a few thousand parameters
    overlaps: int = 50  # runs of steps that overlap
    prompt: int = 16_384  # tokens of the long prompt
    prompt_seconds: float = 60.0  # the rest of this prompt is left out after this time
    contexts: tuple[int, int, int] = (128, 1024, 16_384)  # tokens before the timed ones
    rows: tuple[int, ...] = (1, 8)
    tokens: int = 48  # timed tokens of each row
    decode_seconds: float = 90.0  # predicted seconds above which a number of rows is left out
    warm_seconds: float = 5.0  # predicted seconds up to which prompts are read once before they are timed
    idle: float = 120.0  # seconds without a request
    most: float = 1_200.0  # seconds of the whole command

    @classmethod
    def least(cls, model: str) -> Self:
        """Return the least sizes. They show that the command works, and their figures mean nothing."""
        return cls(model, small=True, overlaps=2, prompt=192, contexts=(16, 48, 96), rows=(1, 2), tokens=6, idle=1.0)
