"""Copies of a model's module tree over the same arrays, so that modules of one tree can be changed without the
other.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn


def clone(module: nn.Module) -> nn.Module:
    """Return a copy of the module tree whose modules are new objects and whose arrays are shared."""
    return _clone(module, {})  # type: ignore[no-any-return]


def _clone(value: Any, made: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        if id(value) not in made:
            copy = made[id(value)] = type(value).__new__(type(value))
            copy.__dict__.update(value.__dict__)
            dict.update(copy, {k: _clone(v, made) for k, v in value.items()})
        return made[id(value)]
    if isinstance(value, list):
        return [_clone(v, made) for v in value]
    if isinstance(value, dict):
        return {k: _clone(v, made) for k, v in value.items()}
    return value
