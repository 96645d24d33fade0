"""Changes the behaviour of one module of a model in place; its weights, their names and its owner stay the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.nn as nn


def mix_in(module: nn.Module, mixin: type) -> None:
    """Give the module a class in which the methods of `mixin` come before those of its own class.

    The methods of `mixin` reach the module's own with `super()`. The new class is a subclass of the old one, so
    `isinstance` gives the same answers.
    """
    module.__class__ = _mixed(mixin, type(module))


def unmix(module: nn.Module) -> None:
    """Undo the last `mix_in`."""
    module.__class__ = type(module).__bases__[1]


@cache
def _mixed(mixin: type, plain: type) -> type[Any]:
    return type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), {})
