"""Aliases: names that split their traffic over adapter versions by weight and keep each user on one arm.

Plain data, one thread. Arms are chosen by weighted rendezvous hashing (Wang and Ravishankar 1998, in Schindelhauer
and Schomaker's logarithmic form): when weights change, a user keeps the arm as far as the new weights allow.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_tandem import limits
from mlx_tandem.adapters.registry import Counters
from mlx_tandem.config import Arm
from mlx_tandem.errors import InvalidRequest, NotFound, QuotaExceeded


@dataclass(frozen=True)
class AliasArm:
    """One arm of an alias and the counters of its requests, which outlive a change of weights."""

    alias: str
    adapter: str  # a name, name@version or "base"
    weight: float
    counters: Counters = field(default_factory=Counters, compare=False)
    test: str = ""  # id of the A/B test that the arm is in; empty: it is in none


class Aliases:
    """All aliases of one server."""

    def __init__(self) -> None:
        self._arms: dict[str, tuple[AliasArm, ...]] = {}

    def put(self, name: str, arms: Sequence[Arm], test: str = "") -> tuple[AliasArm, ...]:
        """Let `name` stand for these arms from the next request on; return them.

        The caller must know that the adapters exist. `test` is the id of the A/B test that the arms are in.

        Raises:
            InvalidRequest: A field is wrong, which the error names.
            QuotaExceeded: There are too many aliases.
        """
        limits.check_name(name, "alias")
        if name not in self._arms and len(self._arms) >= limits.MAX_ALIASES:
            raise QuotaExceeded(
                f"there are {limits.MAX_ALIASES} aliases, as many as there may be: remove some first",
                param="name",
                code="alias_quota_exceeded",
            )
        if not 1 <= len(arms) <= limits.MAX_ARMS:
            raise InvalidRequest(f"arms must have 1 to {limits.MAX_ARMS} entries", param="arms")
        for i, arm in enumerate(arms):
            limits.check("weight", arm.weight, f"arms[{i}].weight")
        if twice := {a.adapter for a in arms if sum(b.adapter == a.adapter for b in arms) > 1}:
            raise InvalidRequest(f"arms names {min(twice)[:140]!r} twice", param="arms")
        if not any(arm.weight for arm in arms):
            raise InvalidRequest("arms needs a weight above 0", param="arms")
        known = {a.adapter: a.counters for a in self._arms.get(name, ())}
        made = tuple(AliasArm(name, a.adapter, float(a.weight), known.get(a.adapter, Counters()), test) for a in arms)
        self._arms[name] = made
        return made

    def remove(self, name: str) -> None:
        """Remove an alias. Raise NotFound if it does not exist."""
        if self._arms.pop(name, None) is None:
            raise NotFound(f"the alias {name[:140]!r} does not exist", param="name", code="alias_not_found")

    def choose(self, name: str, user: str | None) -> AliasArm | None:
        """Return the arm of `name` for `user`, or a random one without a user; None if there is no such alias."""
        arms = self._arms.get(name)
        if arms is None:
            return None
        if len(arms) == 1:
            return arms[0]
        return max(arms, key=lambda arm: _score(arm, user))

    def arms(self, name: str) -> tuple[AliasArm, ...]:
        """Return the arms of `name`. Raise NotFound (`alias_not_found`) if there is no such alias."""
        try:
            return self._arms[name]
        except KeyError:
            raise NotFound(f"the alias {name[:140]!r} does not exist", param="name", code="alias_not_found") from None

    def items(self) -> list[tuple[str, tuple[AliasArm, ...]]]:
        """Return all aliases with their arms."""
        return list(self._arms.items())

    def __contains__(self, name: object) -> bool:
        return name in self._arms


def _score(arm: AliasArm, user: str | None) -> float:
    """Return the score of an arm; the arm with the highest wins, in proportion to the weights over many users."""
    if not arm.weight:
        return -math.inf
    if user is None:
        u = random.random()
    else:
        digest = hashlib.sha256("\0".join((arm.alias, arm.adapter, user)).encode()).digest()
        u = int.from_bytes(digest[:7], "big") / 2**56
    return arm.weight / -math.log(min(max(u, 1e-300), 1 - 1e-16))
