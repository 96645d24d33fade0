"""Packages' own reward functions: entry points of the group `mlx_tandem.rewards`.

In a package's pyproject.toml:

    [project.entry-points."mlx_tandem.rewards"]
    politeness = "my_package.rewards:politeness"

The function takes a Sample and its options, a dict, and returns a number. It is imported in worker processes only.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.limits import check_name
from mlx_tandem.training.rewards.messages import Sample

GROUP = "mlx_tandem.rewards"

Function = Callable[[Sample, dict[str, Any]], float]


def own_names() -> list[str]:
    """Return the names of all installed functions. Raises InvalidRequest for one that is not legal or given twice."""
    found = {(e.name, e.value) for e in entry_points(group=GROUP)}
    names = sorted(name for name, _ in found)
    for name in names:
        check_name(name, f"the entry point '{name}' of {GROUP}")
        if names.count(name) > 1:
            raise InvalidRequest(f"two installed packages give the reward function '{name}'")
    return names


def load(name: str) -> Function:
    """Import a function. Raises whatever its module raises, and LookupError when it is not installed."""
    for e in entry_points(group=GROUP, name=name):
        return cast(Function, e.load())
    raise LookupError(name)
