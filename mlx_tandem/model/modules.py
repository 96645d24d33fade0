"""Changes of one module of a model in place, and copies of a model's module tree over the same arrays.

Modules of a copy can be changed without those of the other tree.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.nn as nn


def mix_in(module: nn.Module, mixin: type) -> None:
    """Give the module a class in which the methods of `mixin` come before those of its own class.

    The methods of `mixin` reach the module's own with `super()`. The new class is a subclass of the old one, so
    `isinstance` gives the same answers. A mixin that says `outermost` stays before those that come later.
    """
    own: Any = type(module)
    outer: Any = _outermost(own)
    inner: Any = _mixed(mixin, own if outer is None else own.__bases__[1])
    module.__class__ = inner if outer is None else _mixed(outer, inner)


def unmix(module: nn.Module) -> None:
    """Undo the last `mix_in` of a mixin that does not say `outermost`."""
    own: Any = type(module)
    outer: Any = _outermost(own)
    module.__class__ = own.__bases__[1] if outer is None else _mixed(outer, own.__bases__[1].__bases__[1])


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without a mixin that says `outermost`."""
    own = type(module)
    return own if _outermost(own) is None else own.__bases__[1]


def _outermost(own: type[Any]) -> type[Any] | None:
    """Return the mixin of a class that says `outermost`; None if it has none."""
    first = own.__bases__[0]
    return first if vars(first).get("outermost", False) else None


@cache
def _mixed(mixin: type, plain: type) -> type[Any]:
    return type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), {})


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
