"""The tests of a file and how pytest and unittest would run them: fixtures, parameters and assertions."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from public.language import Class, Function, Instance, Module
from public.reader import Reader
from public.values import Record, Skipped, Unknown, Unread


@dataclass
class Case:
    """One test with one set of parameters."""

    name: str
    function: Function
    made_of: Class | None
    given: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


def cases_of(reader: Reader, module: Module) -> Iterator[Case]:
    """Yield the tests of a file. Raises Unread in the middle for parameters that cannot be read."""
    for name, value in list(module.names.items()):
        if isinstance(value, Function) and name.startswith("test_") and value.scope is module:
            yield from _variants(reader, module, Case(name, value, None))
        elif isinstance(value, Class) and value.scope.module is module and _is_test(value):
            seen: set[str] = set()
            for each in value.order:
                for inner, method in list(each.scope.names.items()):
                    if isinstance(method, Function) and inner.startswith("test_") and inner not in seen:
                        seen.add(inner)
                        yield from _variants(reader, module, Case(f"{name}::{inner}", method, value))


def _is_test(made: Class) -> bool:
    """Return whether a class holds tests."""
    return made.name.startswith("Test") or any(_is_case(base) for each in made.order for base in each.bases)


def _is_case(base: Any) -> bool:
    """Return whether a class of outside is unittest's."""
    return isinstance(base, Unknown) and base.name.endswith("TestCase")


def _variants(reader: Reader, module: Module, case: Case) -> Iterator[Case]:
    """Yield a test once for each set of its parameters."""
    axes: list[list[tuple[str, dict[str, Any], dict[str, Any]]]] = []
    node = case.function.node
    decorators = [] if isinstance(node, ast.Lambda) else list(node.decorator_list)
    owners: list[tuple[ast.expr, Any]] = [(each, case.function.scope) for each in decorators]
    if case.made_of is not None:
        owners += [(each, case.made_of.scope.module) for each in case.made_of.decorators]
    indirect: set[str] = set()
    for each, scope in owners:
        text = ast.unparse(each)
        if text.startswith(("pytest.mark.skip(", "pytest.mark.xfail", "unittest.skip(", "unittest.expectedFailure")):
            return
        if text.startswith("pytest.mark.parametrize("):
            axes.append(_axis(reader, each, scope, indirect))
    for name in _fixtures_used(case, module):
        params = _params(reader, name, case, module)
        if params is not None and name not in indirect:
            axes.append([(f"{i}", {}, {name: value}) for i, value in enumerate(params)])
    for chosen in itertools.product(*axes):
        label = "-".join(each[0] for each in chosen)
        made = Case(f"{case.name}[{label}]" if label else case.name, case.function, case.made_of)
        for _, given, own in chosen:
            made.given.update(given)
            made.params.update(own)
        yield made


def _axis(reader: Reader, node: ast.expr, scope: Any, indirect: set[str]) -> list[Any]:
    """Return the sets of values of one `parametrize`."""
    assert isinstance(node, ast.Call)
    spec: dict[str, Any] = dict(zip(("argnames", "argvalues"), node.args, strict=False))
    spec.update({each.arg: each.value for each in node.keywords if each.arg})
    names = reader.value(spec["argnames"], scope)
    names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
    names = [name for name in names if name]
    through = reader.value(spec["indirect"], scope) if "indirect" in spec else False
    made: list[Any] = []
    for i, values in enumerate(reader.value(spec["argvalues"], scope)):
        label = str(i)
        if isinstance(values, Record) and values.kind == "pytest.param":
            if "marks" in values.fields:
                continue
            label = str(values.fields.get("id", i))
            values = values.args if len(names) > 1 else values.args[0]
        own = dict(zip(names, values, strict=True)) if len(names) > 1 else {names[0]: values}
        fixed = set(names) if through is True else set(through or ())
        indirect |= fixed
        made.append(
            (
                label,
                {name: value for name, value in own.items() if name not in fixed},
                {name: value for name, value in own.items() if name in fixed},
            )
        )
    return made


def _find_fixture(name: str, case: Case, module: Module) -> Function | None:
    """Return the fixture with a name: of the test's class, its module, or a conftest.py around it."""
    for each in case.made_of.order if case.made_of is not None else []:
        found = each.scope.names.get(name)
        if _is_fixture(found):
            return found
    for own in (module, *_conftests(module)):
        for found in own.names.values():
            if _is_fixture(found) and (found.name == name or f"name='{name}'" in found.marks[0]):
                return found  # type: ignore[no-any-return]
    return None


def _is_fixture(value: Any) -> bool:
    """Return whether a function is a fixture."""
    return isinstance(value, Function) and any(mark.startswith("pytest.fixture") for mark in value.marks)


def _conftests(module: Module) -> Iterator[Module]:
    """Yield the conftest.py files around a file."""
    reader: Any = module.reader
    parts = module.dotted.split(".")
    for i in range(len(parts) - 1, 0, -1):
        found = reader.module(".".join([*parts[:i], "conftest"]))
        if found is not None:
            yield found


def _fixtures_used(case: Case, module: Module) -> list[str]:
    """Return the names of the fixtures that a test asks for, with those that they ask for."""
    found: list[str] = []
    todo = list(case.function.parameters)
    while todo:
        name = todo.pop(0)
        fixture = _find_fixture(name, case, module)
        if fixture is not None and name not in found:
            found.append(name)
            todo += fixture.parameters
    return found


def _params(reader: Reader, name: str, case: Case, module: Module) -> list[Any] | None:
    """Return the parameters of a fixture; None if it has none."""
    fixture = _find_fixture(name, case, module)
    node = fixture.node if fixture is not None else None
    for each in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
        if isinstance(each, ast.Call):
            for keyword in each.keywords:
                if keyword.arg == "params" and fixture is not None:
                    values = list(reader.value(keyword.value, fixture.scope.module))
                    return [v.args[0] if isinstance(v, Record) and v.kind == "pytest.param" else v for v in values]
    return None


def run_case(reader: Reader, module: Module, case: Case) -> None:
    """Follow a test."""
    reader.begin()
    own = Instance(case.made_of) if case.made_of is not None else None
    values: dict[str, Any] = dict(case.given)

    def fixture_value(name: str, asking: str) -> Any:
        if name == "self":
            return own
        if name == "request":
            node = Record("node", {"add_marker": _skip}, open_ended=True)
            return Record(
                "request",
                {
                    "param": case.params.get(asking),
                    "node": node,
                    "getfixturevalue": lambda wanted: fixture_value(wanted, wanted),
                },
            )
        if name in values:
            return values[name]
        fixture = _find_fixture(name, case, module)
        if fixture is None:
            if name in ("caplog", "subtests"):
                return Record(name, {}, open_ended=True)
            raise Unread(f"the fixture {name}")
        made = fixture(*(fixture_value(each, name) for each in fixture.parameters))
        values[name] = next(made) if hasattr(made, "__next__") else made
        return values[name]

    if own is not None:
        for name in ("setUpClass", "setUp", "setup_method"):
            try:
                start = case.made_of.find(name) if case.made_of is not None else None
            except AttributeError:
                continue
            if isinstance(start, Function):
                start(case.made_of if name == "setUpClass" else own)
    names = case.function.parameters
    case.function(**{name: fixture_value(name, name) for name in names})


def _skip(*args: Any, **kwargs: Any) -> None:
    """End a test that its authors expect to fail."""
    raise Skipped("expected to fail")
