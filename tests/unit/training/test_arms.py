"""The control arm: which prompts both versions answer."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mlx_tandem.training.online.arms import Arms, Pair
from mlx_tandem.types import AdapterRef

NEW, OLD = AdapterRef("policy", 9, "new"), AdapterRef("policy", 3, "old")


@pytest.mark.parametrize("prompts", [4, 23, 400])
@pytest.mark.parametrize("effort", [1.0, 2.0, 4.0])
def test_as_many_as_are_wanted_are_compared_however_many_there_are(prompts: int, effort: float) -> None:
    arms = Arms(6, random.Random(1))
    made: list[Pair] = []
    for update in range(40):
        pairs = [arms.choose(NEW, OLD, effort) for _ in range(prompts)]
        made += [p for p in pairs if p is not None and update >= 15]
        arms.updated()
    assert len(made) / 25 == pytest.approx(min(prompts, 6 * effort), rel=0.25)
    first = Counter(pair.first.version for pair in made)
    assert first[9] == pytest.approx(len(made) / 2, rel=0.35), "either answers the client equally often"


def test_nothing_is_compared_with_itself_or_when_nobody_wants_it() -> None:
    assert Arms(1000).choose(NEW, AdapterRef("policy", 3, "new"), 1.0) is None
    assert Arms(0).choose(NEW, OLD, 1.0) is None
