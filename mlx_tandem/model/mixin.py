"""Changing what one module of a model does, in place: its weights, their names and what holds it stay as they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.nn as nn


def mix_in(module: nn.Module, mixin: type) -> None:
    """Change the module's class for a subclass of it whose methods are first those of `mixin`, which go on to the
    module's own with `super()`. A module counts as what it was, `isinstance` included."""
    module.__class__ = _mixed(mixin, type(module))


def unmix(module: nn.Module) -> None:
    """Undo the last `mix_in`."""
    module.__class__ = type(module).__bases__[1]


@cache
def _mixed(mixin: type, plain: type) -> type[Any]:
    return type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), {})
