"""Planted bugs in what is pooled for embeddings."""

from __future__ import annotations

import pytest

from mlx_tandem.engine.sequence import Sequence
from tests.engine.mutants.planting import Plant


def _find_cached_prompts_of_embeddings(patch: pytest.MonkeyPatch) -> None:
    """The hidden states of what is in the prefix cache are missing."""
    patch.setattr(Sequence, "reads_whole_prompt", property(lambda s: s.scores is not None))


def _add_to_what_was_pooled_before(patch: pytest.MonkeyPatch) -> None:
    """A sequence that begins again keeps the sum of its first time."""

    def pool(s: Sequence, start: int, hidden: list[float]) -> None:
        original(s, start if start or not s.pooled else 1, hidden)

    original = Sequence.pool
    patch.setattr(Sequence, "pool", pool)


PLANTS: dict[str, Plant] = {
    "embeddings begin behind what is cached": _find_cached_prompts_of_embeddings,
    "embeddings keep the sum of a preempted run": _add_to_what_was_pooled_before,
}
