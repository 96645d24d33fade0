"""A reader of test sources: it follows the statements of a test by their syntax trees, and never hands them to Python.

It knows the plain part of the language that tests are written in. Whatever comes from outside the folders of tests is
`Unknown`, and a host decides what a call of it means. Only methods of plain values and the functions that are listed
here can be called, the number of steps is bounded, and a construct that is not known ends the reading with `Unread`.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from public.assertions import assertions
from public.expressions import EXPRESSIONS, builtins_of, compared, is_of
from public.language import Break, Class, Continue, Default, Function, Instance, Module, Return, Scope
from public.values import NotServed, Record, Skipped, Unknown, Unread

MAX_STEPS = 3_000_000
"""Most statements and expressions that one test may take."""

_ERRORS = (
    AssertionError, AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError,
    ZeroDivisionError, NotImplementedError,
)  # fmt: skip
"""The exceptions that statements of a test may raise."""


class Reader:
    """The reader of one project's tests.

    `roots` are the folders in which modules are looked for, by the first part of their dotted names. `call` says what
    a call of something unknown means, and `made_from` what an object of a class that comes from outside is. `failed`
    hears of every assertion that does not hold: its text and the two sides. `replaced` has functions of the tests that
    are not followed, with what is called in their place.
    """

    def __init__(
        self,
        roots: dict[str, Path],
        call: Callable[[Unknown, tuple[Any, ...], dict[str, Any]], Any],
        failed: Callable[[str, Any, Any], None],
        replaced: dict[str, Callable[..., Any]],
        made_from: Callable[[Class, Unknown, tuple[Any, ...], dict[str, Any]], Any],
    ):
        self.roots = roots
        self.call = call
        self.failed = failed
        self.replaced = replaced
        self.made_from = made_from
        self.modules: dict[str, Module | None] = {}
        self.steps = 0
        self.asserted = 0
        self.random = random.Random(0)
        self._builtins = builtins_of(self)
        self._assertions = assertions(self._asserted, failed)

    def begin(self) -> None:
        """Begin another test."""
        self.steps = 0
        self.asserted = 0
        self.random.seed(0)

    def builtin(self, name: str) -> Any:
        """Return the value of a name that no scope has."""
        if name in self._builtins:
            return self._builtins[name]
        raise Unread(f"the name {name}")

    def _asserted(self) -> None:
        """Count an assertion that could be read."""
        self.asserted += 1

    def instance(self, made_of: Class, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the host makes of an object of a class that comes from outside; None for a plain object."""
        for base in (base for each in made_of.order for base in each.bases):
            if isinstance(base, Unknown):
                made = self.made_from(made_of, base, args, kwargs)
                if made is not None:
                    return made
        return None

    def inherited(self, base: Unknown, name: str) -> Any:
        """Return an attribute that a class has from one outside. Raises AttributeError."""
        if base.name.endswith("TestCase"):
            if name in self._assertions:
                return self._assertions[name]
            if name in ("setUp", "setUpClass", "setup_method"):
                raise AttributeError(name)
        if base.name in ("object", "ABC", "Protocol", "NamedTuple"):
            raise AttributeError(name)
        raise Unread(f"{base.name}.{name}")

    def unknown(self, path: str) -> Unknown:
        """Return the thing with this dotted name."""
        return Unknown(path, self.call)

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """Return the value of an expression."""
        self._step()
        found = EXPRESSIONS.get(type(node))
        if found is None:
            raise Unread(type(node).__name__)
        return found(self, node, scope)

    def truth(self, node: ast.expr, scope: Scope) -> bool:
        """Return whether an expression holds."""
        return bool(self.value(node, scope))

    def run(self, body: list[ast.stmt], scope: Scope) -> None:
        """Follow statements."""
        for node in body:
            self._step()
            found = _STATEMENTS.get(type(node))
            if found is None:
                raise Unread(type(node).__name__)
            found(self, node, scope)

    def _step(self) -> None:
        """Count a step."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Unread("too many steps")

    def module(self, dotted: str) -> Module | None:
        """Return the module with this dotted name; None if it is not in the folders."""
        if dotted not in self.modules:
            self.modules[dotted] = None
            first, _, rest = dotted.partition(".")
            if first in self.roots:
                path = self.roots[first].joinpath(*rest.split(".")) if rest else self.roots[first]
                for each in (path.with_suffix(".py"), path / "__init__.py"):
                    if each.is_file():
                        self.load(each, dotted)
                        break
        return self.modules[dotted]

    def load(self, path: Path, dotted: str) -> Module:
        """Return a module whose statements have been followed. One that cannot be followed is left out."""
        made = self.modules[dotted] = Module(self, path, dotted)
        plain = "tests" in path.parts or "test" in path.parts
        for node in made.tree.body:
            if not plain and not isinstance(node, ast.Assign | ast.AnnAssign | ast.ImportFrom):
                continue
            try:
                self.run([node], made)
            except (Unread, Skipped, NotServed, *_ERRORS):
                continue
        return made

    def imported(self, dotted: str, name: str) -> Any:
        """Return what `from dotted import name` gives: of projects' own sources, plain values only."""
        own = self.module(dotted)
        if own is not None and name in own.names:
            found = own.names[name]
            if dotted.split(".")[0] in ("tests", "test") or isinstance(found, str | int | float | list | dict | tuple):
                return found
        inner = self.module(f"{dotted}.{name}") if dotted.split(".")[0] in ("tests", "test") else None
        return inner or self.unknown(f"{dotted}.{name}")

    def compare(self, node: ast.expr, scope: Scope) -> tuple[bool, Any, Any]:
        """Return whether an assertion holds, and its two sides; the second is what it is compared with."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.value(node.left, scope), self.value(node.comparators[0], scope)
            if isinstance(left, Unknown) or isinstance(right, Unknown) or getattr(left, "open_ended", False):
                raise Unread("an assertion about something that is not in the test sources")
            return compared(node.ops[0], left, right), left, right
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            value, kind = (self.value(each, scope) for each in node.args)
            if isinstance(value, Unknown) or (isinstance(kind, Unknown) and not is_of(value, kind)):
                raise Unread("the class of something that is not in the test sources")
        found = self.value(node, scope)
        if isinstance(found, Unknown):
            raise Unread(f"an assertion about {found.path}")
        return bool(found), found, True


def _assign(reader: Reader, target: ast.expr, value: Any, scope: Scope) -> None:
    """Give a target a value."""
    if isinstance(target, ast.Name):
        scope.set(target.id, value)
    elif isinstance(target, ast.Tuple | ast.List):
        values = list(value)
        star = next((i for i, each in enumerate(target.elts) if isinstance(each, ast.Starred)), None)
        if star is not None:
            after = len(target.elts) - star - 1
            values = [*values[:star], values[star : len(values) - after], *values[len(values) - after :]]
        if len(values) != len(target.elts):
            raise ValueError("another number of values than of names")
        for each, own in zip(target.elts, values, strict=True):
            _assign(reader, each.value if isinstance(each, ast.Starred) else each, own, scope)
    elif isinstance(target, ast.Subscript):
        reader.value(target.value, scope)[reader.value(target.slice, scope)] = value
    elif isinstance(target, ast.Attribute):
        owner = reader.value(target.value, scope)
        if isinstance(owner, Instance):
            owner.names[target.attr] = value
        elif isinstance(owner, Record):
            owner.fields[target.attr] = value
        elif isinstance(owner, Class):
            owner.scope.names[target.attr] = value
        else:
            raise Unread(f"{target.attr} is set")
    else:
        raise Unread(type(target).__name__)


def _assignment(reader: Reader, node: ast.Assign, scope: Scope) -> None:
    value = reader.value(node.value, scope)
    for target in node.targets:
        _assign(reader, target, value, scope)


def _annotated(reader: Reader, node: ast.AnnAssign, scope: Scope) -> None:
    if node.value is not None:
        _assign(reader, node.target, reader.value(node.value, scope), scope)


def _augmented(reader: Reader, node: ast.AugAssign, scope: Scope) -> None:
    load = ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)
    _assign(reader, node.target, reader.value(load, scope), scope)


def _loaded(target: ast.expr) -> ast.expr:
    """Return a target as an expression."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    return target


def _assertion(reader: Reader, node: ast.Assert, scope: Scope) -> None:
    tests = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else [node.test]
    for test in tests:
        try:
            holds, left, right = reader.compare(test, scope)
        except Unread:
            continue
        except TypeError as error:
            if "Unknown" in str(error):
                continue
            raise
        reader.asserted += 1
        if not holds:
            reader.failed(ast.unparse(test), left, right)


def _branch(reader: Reader, node: ast.If, scope: Scope) -> None:
    if ast.unparse(node.test) == "TYPE_CHECKING":
        return
    reader.run(node.body if reader.truth(node.test, scope) else node.orelse, scope)


def _loop(reader: Reader, node: ast.For, scope: Scope) -> None:
    for each in reader.value(node.iter, scope):
        _assign(reader, node.target, each, scope)
        try:
            reader.run(node.body, scope)
        except Continue:
            continue
        except Break:
            return
    reader.run(node.orelse, scope)


def _while(reader: Reader, node: ast.While, scope: Scope) -> None:
    while reader.truth(node.test, scope):
        try:
            reader.run(node.body, scope)
        except Continue:
            continue
        except Break:
            return


def _try(reader: Reader, node: ast.Try, scope: Scope) -> None:
    try:
        reader.run(node.body, scope)
        reader.run(node.orelse, scope)
    except _ERRORS as error:
        for handler in node.handlers:
            if handler.type is None or _catches(reader.value(handler.type, scope), error):
                if handler.name:
                    scope.set(handler.name, error)
                reader.run(handler.body, scope)
                break
        else:
            raise
    finally:
        reader.run(node.finalbody, scope)


def _catches(kinds: Any, error: BaseException) -> bool:
    """Return whether an except clause is for this error."""
    return any(
        isinstance(kind, type) and issubclass(kind, BaseException) and isinstance(error, kind)
        for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
    )


def _with(reader: Reader, node: ast.With, scope: Scope) -> None:
    raising = False
    for item in node.items:
        text = ast.unparse(item.context_expr)
        if "patch" in text:
            raise Unread("a patch")
        raising |= "raises" in text or "assertRaises" in text
        if item.optional_vars is not None:
            _assign(reader, item.optional_vars, [] if "catch_warnings" in text else reader.unknown(text), scope)
    if raising:
        raise Unread("an expected exception")
    reader.run(node.body, scope)


def _raise(reader: Reader, node: ast.Raise, scope: Scope) -> None:
    value = reader.value(node.exc, scope) if node.exc is not None else None
    text = ast.unparse(node.exc) if node.exc is not None else "an error"
    if isinstance(value, BaseException):
        raise value
    raise AssertionError(text)


def _function(reader: Reader, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
    if node.name in reader.replaced:
        scope.names[node.name] = reader.replaced[node.name]
        return
    owner = scope.names.get("__class__") if isinstance(scope.names.get("__class__"), Class) else None
    scope.names[node.name] = Function(node, scope, owner)


def _class(reader: Reader, node: ast.ClassDef, scope: Scope) -> None:
    inner = Scope(scope.module, scope)
    bases = [reader.value(base, scope) for base in node.bases]
    made = Class(node.name, bases, inner, node.decorator_list)
    inner.names["__class__"] = made
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and made.is_data:
            made.fields.append(each.target.id)
            inner.names[each.target.id] = _default(reader, each.value, scope)
        else:
            reader.run([each], inner)
    scope.names[node.name] = made


def _default(reader: Reader, node: ast.expr | None, scope: Scope) -> Any:
    """Return the default of a dataclass's field."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "dataclasses.field"):
        given = {each.arg: reader.value(each.value, scope) for each in node.keywords}
        return Default(given["default_factory"]) if "default_factory" in given else given.get("default")
    return None if node is None else reader.value(node, scope)


def _import(reader: Reader, node: ast.Import, scope: Scope) -> None:
    for each in node.names:
        if each.name == "regex":
            scope.set(each.asname or each.name, reader.unknown("re"))
            continue
        whole = each.name if each.asname else each.name.partition(".")[0]
        scope.set(each.asname or whole, reader.module(whole) or reader.unknown(whole))


def _import_from(reader: Reader, node: ast.ImportFrom, scope: Scope) -> None:
    dotted = node.module or ""
    if node.level:
        own = scope.module.dotted.split(".")[: -node.level]
        dotted = ".".join([*own, dotted] if dotted else own)
    for each in node.names:
        listed = reader._builtins.get(f"{dotted}.{each.name}")
        scope.set(each.asname or each.name, listed or reader.imported(dotted, each.name))


def _return(reader: Reader, node: ast.Return, scope: Scope) -> None:
    raise Return(None if node.value is None else reader.value(node.value, scope))


def _break(reader: Reader, node: ast.Break, scope: Scope) -> None:
    raise Break


def _continue(reader: Reader, node: ast.Continue, scope: Scope) -> None:
    raise Continue


def _outer(reader: Reader, node: ast.Nonlocal | ast.Global, scope: Scope) -> None:
    scope.outer.update(node.names)


def _nothing(reader: Reader, node: ast.stmt, scope: Scope) -> None:
    return


def _expression(reader: Reader, node: ast.Expr, scope: Scope) -> None:
    reader.value(node.value, scope)


def _delete(reader: Reader, node: ast.Delete, scope: Scope) -> None:
    for target in node.targets:
        if isinstance(target, ast.Subscript):
            del reader.value(target.value, scope)[reader.value(target.slice, scope)]


_STATEMENTS: dict[type[ast.stmt], Callable[[Reader, Any, Scope], None]] = {
    ast.AnnAssign: _annotated,
    ast.Assert: _assertion,
    ast.Assign: _assignment,
    ast.AsyncFunctionDef: _function,
    ast.AugAssign: _augmented,
    ast.Break: _break,
    ast.ClassDef: _class,
    ast.Continue: _continue,
    ast.Delete: _delete,
    ast.Expr: _expression,
    ast.For: _loop,
    ast.FunctionDef: _function,
    ast.Global: _outer,
    ast.If: _branch,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Nonlocal: _outer,
    ast.Pass: _nothing,
    ast.Raise: _raise,
    ast.Return: _return,
    ast.Try: _try,
    ast.While: _while,
    ast.With: _with,
}
