"""Escaping of the texts in messages, so that every frame can be encoded and its texts can be shown.

The types of the messages say which fields hold text, so no message can be forgotten, and tokens are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from msgspec import inspect, structs

from mlx_tandem.printable import printable

MOST_TEXT = 8192
"""Most characters of a text in a frame; paths and error messages are shorter."""

Escape = Callable[[Any], Any]
"""A function that returns its argument when nothing in it has to be escaped, else an escaped copy."""


@cache
def escape_of(kind: type) -> Escape | None:
    """Return the function that escapes the texts in messages of type `kind`; None when they can hold none."""
    return _escape(inspect.type_info(kind))


def _escape(kind: inspect.Type) -> Escape | None:
    match kind:
        case inspect.StrType():
            return lambda text: printable(text, MOST_TEXT)
        case inspect.StructType():
            fields = {f.name: escape for f in kind.fields if (escape := _escape(f.type)) is not None}
            return (lambda value: _struct(value, fields)) if fields else None
        case inspect.ListType() | inspect.VarTupleType():
            item = _escape(kind.item_type)
            return None if item is None else lambda values: _items(values, item)
        case inspect.UnionType():
            found = {_python(t): escape for t in kind.types if (escape := _escape(t)) is not None}
            return (lambda value: found.get(type(value), _unchanged)(value)) if found else None
        case inspect.TupleType():
            if any(_escape(t) is not None for t in kind.item_types):
                raise NotImplementedError("a tuple of several types with a text among them")
            return None
        case (
            inspect.IntType()
            | inspect.FloatType()
            | inspect.BoolType()
            | inspect.BytesType()
            | inspect.NoneType()
            | inspect.LiteralType()
        ):
            return None
        case inspect.BytesType():  # numbers, which are shown to nobody as they are
            return None
    raise NotImplementedError(f"{kind} in a message")


def _struct(value: Any, fields: dict[str, Escape]) -> Any:
    changes = {name: new for name, escape in fields.items() if (new := escape(old := getattr(value, name))) is not old}
    return structs.replace(value, **changes) if changes else value


def _items(values: Any, escape: Escape) -> Any:
    new = [escape(value) for value in values]
    return values if all(a is b for a, b in zip(new, values, strict=True)) else type(values)(new)


def _unchanged(value: Any) -> Any:
    return value


def _python(kind: inspect.Type) -> type:
    """Return the class that values of `kind`, a member of a union, have."""
    match kind:
        case inspect.StructType():
            return kind.cls
        case inspect.StrType():
            return str
        case inspect.VarTupleType():
            return tuple
    raise NotImplementedError(f"{kind} in a union with others")
