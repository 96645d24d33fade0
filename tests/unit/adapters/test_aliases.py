"""Aliases: shares by weight, and a user stays where it was."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.adapters.aliases import Aliases
from mlx_tandem.config import Arm
from mlx_tandem.errors import InvalidRequest, NotFound


def of(**weights: float) -> list[Arm]:
    return [Arm(name, weight) for name, weight in weights.items()]


def chosen(aliases: Aliases, users: int = 4000) -> dict[str, str]:
    arms = {f"user-{i}": aliases.choose("x", f"user-{i}") for i in range(users)}
    return {user: arm.adapter for user, arm in arms.items() if arm is not None}


@pytest.mark.parametrize("weights", [{"a": 6, "b": 3, "c": 1}, {"a": 8, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 0.5}])
def test_shares_follow_the_weights(weights: dict[str, float]) -> None:
    aliases = Aliases()
    aliases.put("x", of(never=0, **weights))
    counts = Counter(chosen(aliases).values())
    assert counts["never"] == 0
    for name, weight in weights.items():
        assert abs(counts[name] / 4000 - weight / sum(weights.values())) < 0.025


def test_the_shares_of_the_anonymous_follow_the_weights() -> None:
    aliases = Aliases()
    aliases.put("x", of(a=6, b=3, c=1))
    anonymous = Counter(arm.adapter for arm in (aliases.choose("x", None) for _ in range(4000)) if arm is not None)
    assert abs(anonymous["a"] / 4000 - 0.6) < 0.05


@given(st.text(max_size=50))
def test_a_user_stays_on_its_arm(user: str) -> None:
    aliases = Aliases()
    aliases.put("x", of(a=1, b=1))
    first = aliases.choose("x", user)
    assert all(aliases.choose("x", user) == first for _ in range(5))


def test_only_those_move_whose_share_moved() -> None:
    aliases = Aliases()
    aliases.put("x", of(a=5, b=5))
    before = chosen(aliases)
    aliases.put("x", of(a=5, b=5, c=1))
    after = chosen(aliases)
    assert {after[u] for u in before if before[u] != after[u]} == {"c"}


def test_the_arms_of_one_alias_say_nothing_about_those_of_another() -> None:
    """Two experiments with the same adapters at the same time: each has every kind of user of the other."""
    aliases = Aliases()
    for name in ("x", "y"):
        aliases.put(name, of(a=1, b=1))
    users = [f"user-{i}" for i in range(2000)]
    both = Counter(tuple(arm.adapter for n in ("x", "y") if (arm := aliases.choose(n, u)) is not None) for u in users)
    assert all(abs(both[pair] / 2000 - 0.25) < 0.04 for pair in product("ab", repeat=2))


def test_counters_outlive_a_change_of_weights() -> None:
    aliases = Aliases()
    aliases.put("x", of(a=1))[0].counters.requests = 7
    assert aliases.put("x", of(b=1, a=2))[1].counters.requests == 7
    assert aliases.choose("nobody", None) is None
    aliases.remove("x")
    assert "x" not in aliases and aliases.items() == []
    for ask in (aliases.remove, aliases.arms):
        with pytest.raises(NotFound):
            ask("x")


@pytest.mark.parametrize(
    ("name", "arms", "param"),
    [
        ("x/y", of(a=1), "alias"),
        ("x", [], "arms"),
        ("x", [Arm(f"a{i}", 1) for i in range(17)], "arms"),
        ("x", of(a=0, b=0), "arms"),
        ("x", [Arm("a", 1), Arm("a", 2)], "arms"),
        ("x", [Arm("a", 1), Arm("b", -1)], "arms[1].weight"),
        ("x", [Arm("a", float("nan"))], "arms[0].weight"),
        ("x", [Arm("a", float("inf"))], "arms[0].weight"),
    ],
)
def test_what_is_refused(name: str, arms: list[Arm], param: str) -> None:
    aliases = Aliases()
    with pytest.raises(InvalidRequest) as e:
        aliases.put(name, arms)
    assert e.value.param == param
    assert name not in aliases
