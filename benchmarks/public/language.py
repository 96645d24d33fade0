"""The modules, classes and functions of test sources, as the reader in `reader.py` keeps them."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from public.values import Unknown, Unread


class Host(Protocol):
    """The reader of the bodies of functions."""

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """Return the value of an expression."""
        ...

    def run(self, body: list[ast.stmt], scope: Scope) -> None:
        """Follow statements."""
        ...

    def builtin(self, name: str) -> Any:
        """Return the value of a name that no scope has."""
        ...

    def instance(self, made_of: Class, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an object of a class that comes from outside; None for a plain object."""
        ...

    def inherited(self, base: Unknown, name: str) -> Any:
        """Return an attribute that a class has from one outside. Raises AttributeError."""
        ...


class Return(Exception):
    """The end of a function that is being read."""

    def __init__(self, value: Any):
        self.value = value


class Break(Exception):
    """The end of a loop."""


class Continue(Exception):
    """The end of one turn of a loop."""


class Scope:
    """The names of a module, a class or a call."""

    def __init__(self, module: Module, parent: Scope | None = None):
        self.module = module
        self.parent = parent
        self.names: dict[str, Any] = {}
        self.outer: set[str] = set()
        self.yielded: list[Any] = []

    def find(self, name: str) -> Any:
        """Return the value of a name."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return self.module.reader.builtin(name)

    def set(self, name: str, value: Any) -> None:
        """Give a name a value, in the scope around this one if the name is declared to be from there."""
        scope = self
        if name in self.outer:
            above = self.parent
            while above is not None and name not in above.names:
                above = above.parent
            scope = above or self
        scope.names[name] = value


class Module(Scope):
    """A source file that has been read."""

    def __init__(self, reader: Host, path: Path, dotted: str):
        super().__init__(self)
        self.reader = reader
        self.path = path
        self.dotted = dotted
        self.source = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.source)


class Function:
    """A function of the test sources."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope, owner: Class | None):
        self.node = node
        self.scope = scope
        self.owner = owner
        self.name = getattr(node, "name", "lambda")
        reader = scope.module.reader
        self.defaults = [reader.value(each, scope) for each in node.args.defaults]
        self.keyword_defaults = [each and reader.value(each, scope) for each in node.args.kw_defaults]
        self.marks = [] if isinstance(node, ast.Lambda) else [ast.unparse(each) for each in node.decorator_list]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that can be given by position."""
        return [each.arg for each in (*self.node.args.posonlyargs, *self.node.args.args)]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns, or a list's iterator of what it yields."""
        reader = self.scope.module.reader
        scope = Scope(self.scope.module, self.scope)
        scope.names.update(self._bound(args, kwargs))
        if self.owner is not None:
            scope.names["__class__"] = self.owner
        if isinstance(self.node, ast.Lambda):
            return reader.value(self.node.body, scope)
        if isinstance(self.node, ast.AsyncFunctionDef):
            raise Unread("an asynchronous function")
        try:
            reader.run(self.node.body, scope)
        except Return as ended:
            if not _yields(self.node):
                return ended.value
        return iter(scope.yielded) if _yields(self.node) else None

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters' values."""
        names, spec = self.parameters, self.node.args
        bound = dict(zip(names[len(names) - len(self.defaults) :], self.defaults, strict=True))
        for each, default in zip(spec.kwonlyargs, self.keyword_defaults, strict=True):
            bound[each.arg] = default
        bound.update(zip(names, args, strict=False))
        if spec.vararg is not None:
            bound[spec.vararg.arg] = tuple(args[len(names) :])
        known = {*names, *(each.arg for each in spec.kwonlyargs)}
        bound.update({name: value for name, value in kwargs.items() if name in known})
        if spec.kwarg is not None:
            bound[spec.kwarg.arg] = {name: value for name, value in kwargs.items() if name not in known}
        missing = [name for name in names if name not in bound]
        if missing:
            raise TypeError(f"{self.name} misses {', '.join(missing)}")
        return bound


def _yields(node: ast.AST) -> bool:
    """Return whether a function is a generator."""
    inner = [*ast.iter_child_nodes(node)]
    while inner:
        child = inner.pop()
        if isinstance(child, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            inner += ast.iter_child_nodes(child)
    return False


class Class:
    """A class of the test sources."""

    def __init__(self, name: str, bases: list[Any], scope: Scope, decorators: list[ast.expr]):
        self.name = name
        self.bases = bases
        self.scope = scope
        self.decorators = decorators
        self.marks = [ast.unparse(each) for each in decorators]
        self.fields: list[str] = []

    @property
    def order(self) -> list[Class]:
        """The classes in which an attribute is looked for."""
        found = [self]
        for base in self.bases:
            if isinstance(base, Class):
                found += [each for each in base.order if each not in found]
        return found

    @property
    def is_data(self) -> bool:
        """Whether the class is a dataclass or a named tuple."""
        named = any(isinstance(base, Unknown) and base.name == "NamedTuple" for base in self.bases)
        return named or any("dataclass" in mark for each in self.order for mark in each.marks)

    def find(self, name: str) -> Any:
        """Return an attribute of the class. Raises AttributeError."""
        for each in self.order:
            if name in each.scope.names:
                return each.scope.names[name]
        for base in (base for each in self.order for base in each.bases):
            if isinstance(base, Unknown) and not name.startswith("__"):
                return self.scope.module.reader.inherited(base, name)
        raise AttributeError(f"{self.name} has no {name}")

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return a new object."""
        outside = self.scope.module.reader.instance(self, args, kwargs)
        if outside is not None:
            return outside
        made = Instance(self)
        if self.is_data:
            names = [name for each in reversed(self.order) for name in each.fields]
            made.names.update(zip(names, args, strict=False))
            made.names.update(kwargs)
            for name in names:
                if name not in made.names:
                    default = self.find(name)
                    made.names[name] = default.make() if isinstance(default, Default) else default
            return made
        try:
            start = self.find("__init__")
        except AttributeError:
            return made
        start(made, *args, **kwargs)
        return made


@dataclasses.dataclass
class Default:
    """The default of a dataclass's field."""

    make: Callable[[], Any]


class Instance:
    """An object of a class of the test sources."""

    def __init__(self, made_of: Class):
        self.made_of = made_of
        self.names: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Return an attribute. Raises AttributeError."""
        if name in self.names:
            return self.names[name]
        found = self.made_of.find(name)
        if isinstance(found, Function):
            if "property" in found.marks or "cached_property" in found.marks:
                return found(self)
            if "staticmethod" in found.marks:
                return found
            return functools.partial(found, self.made_of if "classmethod" in found.marks else self)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `__call__` returns."""
        return self.get("__call__")(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.made_of.name}({self.names!r})"
