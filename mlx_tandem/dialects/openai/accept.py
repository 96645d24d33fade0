"""The table of parameters applied to a body: what changes nothing is dropped, what cannot be done is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mlx_tandem.dialects.openai.parameters import BODIES, PARAMETERS, Parameter, Route
from mlx_tandem.errors import InvalidRequest

TYPES = {bool: "a boolean", str: "a text", float: "a number", list: "a list", dict: "an object"}


def rules(route: Route) -> dict[str, Parameter]:
    """Return the table for one route, with one row for each name: what has no effect elsewhere only is left out."""
    found: dict[str, Parameter] = {}
    for row in PARAMETERS:
        if route in row.only or row.name not in found:
            found[row.name] = row if route in row.only else row._replace(no_effect=())
    return found


def selection(route: Route) -> Callable[[Any], Any]:
    """Return the function that takes a decoded body and returns it without what has no effect on this route. It raises
    InvalidRequest for a known parameter that is not served; unknown ones are left for the body's type to refuse."""
    table, served = rules(route), frozenset(BODIES[route].__struct_fields__)

    def select(body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept: dict[str, Any] = {}
        refused: list[str] = []
        for name, value in body.items():
            row = table.get(name)
            if row is None:
                kept[name] = value
            elif value is None or _is_among(value, row.no_effect):
                continue
            elif name in served:
                kept[name] = value
            elif not row.idle_without or any(body.get(other) for other in row.idle_without):
                refused.append(name)
        if refused:
            raise _refusal(table[min(refused)])
        return kept

    return select


def _is_among(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Return whether `value` is one of the accepted ones, or of an accepted type. true is not 1."""
    return any(
        isinstance(value, int | float if a is float else a) and (a is bool or not isinstance(value, bool))
        if isinstance(a, type)
        else value == a and isinstance(value, bool) == isinstance(a, bool)
        for a in accepted
    )


def _refusal(row: Parameter) -> InvalidRequest:
    says = f"{row.name} is not supported"
    if row.no_effect:
        says = f"{row.name} can only be {shown(row)} here, which changes nothing"
    elif row.idle_without:
        says += f" beside {' or '.join(row.idle_without)}"
    if row.instead:
        says += f"; use {row.instead}"
    return InvalidRequest(says, param=row.name, code="unsupported_parameter")


def shown(row: Parameter, quote: str = "") -> str:
    """Return the values that have no effect beside null, in words; values as JSON between `quote`."""
    return " or ".join(
        TYPES[value] if isinstance(value, type) else f"{quote}{json.dumps(value)}{quote}" for value in row.no_effect
    )
