"""Masks that do not come in time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from mlx_tandem.engine.masks import Place
from mlx_tandem.engine.plan import Mask
from tests.engine.workloads import Masks


class LateMasks(Masks):
    """Masks that are late now and then, and requests that are slow for a while.

    A mask that has been prepared is ready after a number of questions. Until then only the mask itself is asked for.
    """

    def __init__(self, rng: Random, share: float, eos: tuple[int, ...] = (), of: int = 2):
        super().__init__(eos, of)
        self._rng, self._lateness = rng, share
        self._left: dict[tuple[int, int], int] = {}  # questions until what was prepared is ready
        self._prepared: dict[tuple[int, int], tuple[int, ...]] = {}
        self.late = 0

    def masks(self, places: Sequence[Place]) -> list[Mask | None]:
        made: list[Mask | None] = list(super().masks(places))
        for at, (request, choice, tokens) in enumerate(places):
            key = request.id, choice
            if self._left.get(key) or (
                self._prepared.pop(key, None) != tuple(tokens) and self._rng.random() < self._lateness
            ):
                made[at] = None
            self.late += made[at] is None
        return made

    def is_slow(self, request: int, choice: int) -> bool:
        return (request + len(self._prepared)) % 3 == 0

    def prepare(self, place: Place) -> None:
        key = place.request.id, place.choice
        if not self._left.get(key):
            self._prepared[key] = tuple(place.tokens)
            self._left[key] = self._rng.choice((0, 1, 3, 9))

    def is_ready(self, request: int, choice: int) -> bool:
        left = self._left.get((request, choice), 0)
        self._left[request, choice] = max(left - 1, 0)
        return not left

    def forget(self, request: int, choice: int) -> None:
        super().forget(request, choice)
        self._left.pop((request, choice), None)
        self._prepared.pop((request, choice), None)
