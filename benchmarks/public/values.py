"""The values of the reader of test sources, and how what our parsers say is compared with what a test expects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class Unread(Exception):
    """The reader cannot follow a test. The text says why."""


class NotServed(Exception):
    """A test is about a form that is not served here. The text names it."""


class Skipped(Exception):
    """A test says itself that it is not to be run."""


class Unknown:
    """A thing that is not in the test sources, known by its dotted name only."""

    def __init__(self, path: str, call: Callable[[Unknown, tuple[Any, ...], dict[str, Any]], Any] | None = None):
        self.path = path
        self._call = call

    @property
    def name(self) -> str:
        """The last part of the dotted name."""
        return self.path.rpartition(".")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a call makes of it: the host's answer, or another unknown thing."""
        if self._call is not None:
            return self._call(self, args, kwargs)
        return Unknown(f"{self.path}()")

    def child(self, name: str) -> Unknown:
        """Return the unknown thing behind an attribute."""
        return Unknown(f"{self.path}.{name}", self._call)

    def __repr__(self) -> str:
        return f"<{self.path}>"


class Record:
    """An object of a class that is not in the test sources: what it was made of."""

    def __init__(self, kind: str, fields: dict[str, Any], args: tuple[Any, ...] = (), *, open_ended: bool = False):
        self.kind = kind
        self.fields = fields
        self.args = args
        self.open_ended = open_ended
        """Whether every attribute exists, as with a mock."""

    @property
    def name(self) -> str:
        """The last part of the class's name."""
        return self.kind.rpartition(".")[2]

    @property
    def compared(self) -> dict[str, Any]:
        """The fields that are compared. Ids are made up, and a field that is None may be left out."""
        return {name: value for name, value in self.fields.items() if name != "id" and not is_none(value)}

    def get(self, name: str) -> Any:
        """Return an attribute; None for one that was not given."""
        if name in self.fields:
            return self.fields[name]
        if name == "model_copy":
            return lambda update=None, **kwargs: Record(self.kind, {**self.fields, **(update or {})}, self.args)
        if self.open_ended:
            made = self.fields[name] = Record(f"{self.kind}.{name}", {}, open_ended=True)
            return made
        return Unknown(f"{self.kind}.{name}") if name.startswith("model_") else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a mock returns."""
        effect = self.fields.get("side_effect")
        return effect(*args, **kwargs) if callable(effect) else self.get("return_value")

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


class Ours(str):
    """Text that one of our parsers said. The amount of white space is not compared."""

    __slots__ = ()


class OurArguments(Ours):
    """Arguments of a call that one of our parsers said. The spelling of their JSON is not compared."""

    __slots__ = ()


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal, with what our parsers said compared by its meaning."""
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        raise Unread("a comparison with something that is not in the test sources")
    if (left is None and right == "") or (left == "" and right is None):
        return True
    if isinstance(left, Ours) or isinstance(right, Ours):
        return _same_text(left, right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, Record) and isinstance(right, Record):
        return left.name == right.name and same(left.compared, right.compared)
    return bool(left == right)


def _same_text(left: Any, right: Any) -> bool:
    """Return whether a text that our parsers said is the one that is expected."""
    if not isinstance(left or "", str) or not isinstance(right or "", str):
        return False
    first, second = (left or "").strip(), (right or "").strip()
    if first == second:
        return True
    if not isinstance(left, OurArguments) and not isinstance(right, OurArguments):
        return first.split() == second.split()
    if {first, second} == {"", "{}"}:
        return True
    try:
        return bool(json.loads(first) == json.loads(second))
    except ValueError:
        return False


def is_none(value: Any) -> bool:
    """Return whether a value is None, as empty text that our parsers said is."""
    return value is None or (isinstance(value, Ours) and not value)
