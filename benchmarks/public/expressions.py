"""The expressions of test sources, as the reader in `reader.py` follows them."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import json
import operator
import re
import textwrap
from collections.abc import Callable, Iterator
from types import NoneType
from typing import TYPE_CHECKING, Any

from public.language import Class, Function, Instance, Module, Scope
from public.values import Ours, Record, Skipped, Unknown, Unread, is_none, same

if TYPE_CHECKING:
    from public.reader import Reader

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
_ORDERS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ERRORS: dict[str, type[BaseException]] = {
    error.__name__: error
    for error in (
        Exception, AssertionError, AttributeError, IndexError, KeyError, LookupError, RuntimeError, StopIteration,
        TypeError, ValueError, NotImplementedError, TimeoutError, SyntaxWarning, DeprecationWarning,
    )
}  # fmt: skip
_PLAIN: dict[str, Any] = {
    function.__name__: function
    for function in (
        len, range, enumerate, zip, list, dict, tuple, set, frozenset, int, float, bool, any, all, sum, min, max, next,
        iter, reversed, repr, map, filter, abs, chr, ord, callable, object, bytes, round, sorted,
    )
}  # fmt: skip
_LISTED: dict[str, Any] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "functools.partial": functools.partial,
    "itertools.chain": itertools.chain,
    "itertools.product": itertools.product,
    "json.JSONDecodeError": json.JSONDecodeError,
    "json.dumps": json.dumps,
    "json.loads": json.loads,
    "re.compile": re.compile,
    "re.findall": re.findall,
    "re.search": re.search,
    "re.split": re.split,
    "re.sub": re.sub,
    "textwrap.dedent": textwrap.dedent,
    "types.NoneType": NoneType,
    "typing.cast": lambda kind, value: value,
}
"""The functions of Python's own modules that may be called."""

_VALUES = (str, bytes, int, float, list, dict, tuple, set, frozenset, re.Pattern, re.Match, range, itertools.chain)
"""The classes of values whose methods may be called."""

MOST_REPEATED = 5_000_000
"""Longest text that a product of a text and a number may make."""


def builtins_of(reader: Reader) -> dict[str, Any]:
    """Return the functions that a test may call without an import, and those of Python's modules by dotted names."""

    def is_instance(value: Any, kinds: Any) -> bool:
        return any(is_of(value, kind) for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))

    def get(value: Any, name: str, *default: Any) -> Any:
        try:
            return attribute(reader, value, name)
        except AttributeError:
            if default:
                return default[0]
            raise

    def has(value: Any, name: str) -> bool:
        try:
            attribute(reader, value, name)
        except AttributeError:
            return False
        return True

    return {
        **_PLAIN,
        **_ERRORS,
        **_LISTED,
        "isinstance": is_instance,
        "issubclass": lambda one, other: isinstance(one, Class) and other in one.order,
        "getattr": get,
        "hasattr": has,
        "print": lambda *args, **kwargs: None,
        "str": str,
        "type": lambda value: str if isinstance(value, Ours) else type(value),
        "super": None,
        "property": None,
        "staticmethod": None,
        "classmethod": None,
        "random.randint": reader.random.randint,
        "random.Random": lambda *args: reader.unknown("random"),
        "__name__": "tests",
    }


def is_of(value: Any, kind: Any) -> bool:
    """Return whether a value is of a class."""
    if isinstance(value, Unknown) and isinstance(kind, type):
        raise Unread(f"the class of {value.path}")
    if isinstance(kind, Class):
        return isinstance(value, Instance) and kind in value.made_of.order
    if isinstance(kind, Unknown):
        return isinstance(value, Record) and value.kind.rpartition(".")[2] == kind.name
    return isinstance(kind, type) and isinstance(value, kind)


def attribute(reader: Reader, owner: Any, name: str) -> Any:
    """Return an attribute of a value. Raises AttributeError."""
    if hasattr(owner, "public_attribute"):
        return owner.public_attribute(name)
    if isinstance(owner, Unknown):
        listed = reader.builtin(f"{owner.path}.{name}") if f"{owner.path}.{name}" in _LISTED else None
        if owner.path == "random" and name == "randint":
            return reader.random.randint
        return listed or owner.child(name)
    if isinstance(owner, Record | Instance):
        return owner.get(name)
    if isinstance(owner, Class):
        return owner.name if name == "__name__" else owner.find(name)
    if isinstance(owner, Module):
        if name in owner.names:
            return owner.names[name]
        raise AttributeError(name)
    if name.startswith("_"):
        if name == "__name__" and isinstance(owner, type | Function):
            return owner.__name__ if isinstance(owner, type) else owner.name
        raise Unread(f"the attribute {name}")
    if isinstance(owner, str):
        if name == "join":
            return lambda parts: joined(owner, list(parts))
        if isinstance(owner, Ours) and name in ("strip", "lstrip", "rstrip", "replace"):
            return lambda *args: type(owner)(getattr(str, name)(owner, *args))
        if name in ("format", "format_map") and re.search(r"\{[^{}]*[.\[]", owner):
            raise Unread("a format with attributes")
    if isinstance(owner, BaseException) or owner in (dict, str, list):
        return getattr(owner, name)
    if isinstance(owner, _VALUES):
        return getattr(owner, name)
    if owner is None:
        raise AttributeError(f"None has no {name}")
    raise Unread(f"{name} of {type(owner).__name__}")


def alike(text: str, parts: list[Any]) -> str:
    """Return a text as one that our parsers said if a part of it is."""
    ours = next((type(part) for part in parts if isinstance(part, Ours)), None)
    return text if ours is None else ours(text)


def joined(glue: str, parts: list[Any]) -> str:
    """Return texts joined; the whole is ours if a part is."""
    text = glue.join(parts)
    return alike(text, parts) if parts else Ours(text)


def compared(sign: ast.cmpop, left: Any, right: Any) -> bool:
    """Return what a comparison says."""
    match sign:
        case ast.Eq():
            return same(left, right)
        case ast.NotEq():
            return not same(left, right)
        case ast.Is() | ast.IsNot():
            alike = is_none(left) if right is None else left is right
            return alike == isinstance(sign, ast.Is)
        case ast.In() | ast.NotIn():
            if isinstance(left, Unknown) or isinstance(right, Unknown):
                raise Unread("a look into something that is not in the test sources")
            if right is None and isinstance(left, str):
                right = ""
            return (left in right) == isinstance(sign, ast.In)
    return bool(_ORDERS[type(sign)](left, right))


def _constant(reader: Reader, node: ast.Constant, scope: Scope) -> Any:
    return node.value


def _name(reader: Reader, node: ast.Name, scope: Scope) -> Any:
    return scope.find(node.id)


def _attribute(reader: Reader, node: ast.Attribute, scope: Scope) -> Any:
    if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super":
        made_of = scope.find("__class__")
        own = scope.find("self")
        for each in own.made_of.order[own.made_of.order.index(made_of) + 1 :]:
            if node.attr in each.scope.names:
                return functools.partial(each.scope.names[node.attr], own)
        return lambda *args, **kwargs: None
    return attribute(reader, reader.value(node.value, scope), node.attr)


def _subscript(reader: Reader, node: ast.Subscript, scope: Scope) -> Any:
    owner = reader.value(node.value, scope)
    if isinstance(owner, type | Unknown | Class):
        return owner
    key = reader.value(node.slice, scope)
    if isinstance(owner, Record):
        found = owner.fields.get("__items__", owner.fields)
        return found[key]
    found = owner[key]
    return type(owner)(found) if isinstance(owner, Ours) else found


def _slice(reader: Reader, node: ast.Slice, scope: Scope) -> slice:
    return slice(*(each and reader.value(each, scope) for each in (node.lower, node.upper, node.step)))


def _call(reader: Reader, node: ast.Call, scope: Scope) -> Any:
    function = reader.value(node.func, scope)
    args: list[Any] = []
    for each in node.args:
        if isinstance(each, ast.Starred):
            args += reader.value(each.value, scope)
        else:
            args.append(reader.value(each, scope))
    kwargs: dict[str, Any] = {}
    for given in node.keywords:
        if given.arg is None:
            kwargs.update(reader.value(given.value, scope))
        else:
            kwargs[given.arg] = reader.value(given.value, scope)
    if not callable(function):
        raise TypeError(f"{ast.unparse(node.func)} cannot be called")
    if function is str and args and isinstance(args[0], Ours):
        return args[0]
    if function is json.loads and args and isinstance(args[0], Unknown | Record):
        raise Unread("JSON of something that is not in the test sources")
    return function(*args, **kwargs)


def _binary(reader: Reader, node: ast.BinOp, scope: Scope) -> Any:
    left, right = reader.value(node.left, scope), reader.value(node.right, scope)
    if isinstance(left, Unknown) and isinstance(right, Unknown) and isinstance(node.op, ast.BitOr):
        return left
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        raise Unread(f"a sum with something that is not in the test sources: {ast.unparse(node)[:80]}")
    found = _OPERATORS.get(type(node.op))
    if found is None:
        raise Unread(type(node.op).__name__)
    if isinstance(node.op, ast.Mult):
        text, times = (left, right) if isinstance(left, str | list | tuple) else (right, left)
        if isinstance(text, str | list | tuple) and len(text) * times > MOST_REPEATED:
            raise Unread("a very long text")
    made = found(left, right)
    return alike(made, [left, right]) if isinstance(made, str) else made


def _boolean(reader: Reader, node: ast.BoolOp, scope: Scope) -> Any:
    wanted = isinstance(node.op, ast.Or)
    found: Any = None
    for each in node.values:
        found = reader.value(each, scope)
        if bool(found) == wanted:
            break
    return found


def _unary(reader: Reader, node: ast.UnaryOp, scope: Scope) -> Any:
    value = reader.value(node.operand, scope)
    if isinstance(node.op, ast.Not):
        if isinstance(value, Unknown):
            raise Unread(f"whether {value.path} holds")
        return not (value.strip() if isinstance(value, Ours) else value)
    return -value if isinstance(node.op, ast.USub) else value


def _compare(reader: Reader, node: ast.Compare, scope: Scope) -> bool:
    left = reader.value(node.left, scope)
    for sign, each in zip(node.ops, node.comparators, strict=True):
        right = reader.value(each, scope)
        if not compared(sign, left, right):
            return False
        left = right
    return True


def _either(reader: Reader, node: ast.IfExp, scope: Scope) -> Any:
    return reader.value(node.body if reader.truth(node.test, scope) else node.orelse, scope)


def _formatted(reader: Reader, node: ast.JoinedStr, scope: Scope) -> str:
    return joined("", [reader.value(each, scope) for each in node.values]) + ""


def _field(reader: Reader, node: ast.FormattedValue, scope: Scope) -> str:
    value = reader.value(node.value, scope)
    if isinstance(value, Unknown):
        raise Unread("a text with something that is not in the test sources")
    if node.conversion == ord("r"):
        value = repr(value)
    spec = reader.value(node.format_spec, scope) if node.format_spec is not None else ""
    return value if isinstance(value, str) and not spec else format(value, spec)


def _list(reader: Reader, node: ast.List | ast.Tuple | ast.Set, scope: Scope) -> Any:
    made: list[Any] = []
    for each in node.elts:
        if isinstance(each, ast.Starred):
            made += reader.value(each.value, scope)
        else:
            made.append(reader.value(each, scope))
    return made if isinstance(node, ast.List) else tuple(made) if isinstance(node, ast.Tuple) else set(made)


def _dict(reader: Reader, node: ast.Dict, scope: Scope) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            made.update(reader.value(value, scope))
        else:
            made[reader.value(key, scope)] = reader.value(value, scope)
    return made


def _lambda(reader: Reader, node: ast.Lambda, scope: Scope) -> Function:
    return Function(node, scope, None)


def _turns(reader: Reader, generators: list[ast.comprehension], scope: Scope) -> Iterator[Scope]:
    """Yield the scope of each turn of a comprehension."""
    from public.reader import _assign

    if not generators:
        yield scope
        return
    first, *rest = generators
    for each in reader.value(first.iter, scope):
        inner = Scope(scope.module, scope)
        _assign(reader, first.target, each, inner)
        if all(reader.truth(test, inner) for test in first.ifs):
            yield from _turns(reader, rest, inner)


def _comprehension(reader: Reader, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope) -> Any:
    made = [reader.value(node.elt, inner) for inner in _turns(reader, node.generators, scope)]
    return made if isinstance(node, ast.ListComp) else set(made) if isinstance(node, ast.SetComp) else iter(made)


def _dict_comprehension(reader: Reader, node: ast.DictComp, scope: Scope) -> dict[Any, Any]:
    return {
        reader.value(node.key, inner): reader.value(node.value, inner)
        for inner in _turns(reader, node.generators, scope)
    }


def _named(reader: Reader, node: ast.NamedExpr, scope: Scope) -> Any:
    value = reader.value(node.value, scope)
    scope.set(node.target.id, value)
    return value


def _yield(reader: Reader, node: ast.Yield, scope: Scope) -> None:
    _call_scope(scope).yielded.append(None if node.value is None else reader.value(node.value, scope))


def _yield_from(reader: Reader, node: ast.YieldFrom, scope: Scope) -> None:
    _call_scope(scope).yielded.extend(reader.value(node.value, scope))


def _call_scope(scope: Scope) -> Scope:
    """Return the scope of the call in which a yield is."""
    return scope


def skip(*args: Any, **kwargs: Any) -> Any:
    """End a test that is not to be run."""
    raise Skipped(str(args[0] if args else kwargs.get("reason", "")))


EXPRESSIONS: dict[type[ast.AST], Callable[[Reader, Any, Scope], Any]] = {
    ast.Attribute: _attribute,
    ast.BinOp: _binary,
    ast.BoolOp: _boolean,
    ast.Call: _call,
    ast.Compare: _compare,
    ast.Constant: _constant,
    ast.Dict: _dict,
    ast.DictComp: _dict_comprehension,
    ast.FormattedValue: _field,
    ast.GeneratorExp: _comprehension,
    ast.IfExp: _either,
    ast.JoinedStr: _formatted,
    ast.Lambda: _lambda,
    ast.List: _list,
    ast.ListComp: _comprehension,
    ast.Name: _name,
    ast.NamedExpr: _named,
    ast.Set: _list,
    ast.SetComp: _comprehension,
    ast.Slice: _slice,
    ast.Subscript: _subscript,
    ast.Tuple: _list,
    ast.UnaryOp: _unary,
    ast.Yield: _yield,
    ast.YieldFrom: _yield_from,
}
