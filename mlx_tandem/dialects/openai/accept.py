"""Applying the table of parameters to a body: values without effect are dropped, unsupported ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mlx_tandem.dialects.openai.parameters import BODIES, PARAMETERS, Parameter, Route
from mlx_tandem.errors import InvalidRequest

TYPES = {bool: "a boolean", str: "a text", float: "a number", list: "a list", dict: "an object"}
"""The words of errors and docs for each type of value."""


def rules(route: Route) -> dict[str, Parameter]:
    """Return one row of the table for each parameter's name.

    The row of a parameter that is listed for the other route only is returned without its `no_effect` values.
    """
    found: dict[str, Parameter] = {}
    for row in PARAMETERS:
        if route in row.only or row.name not in found:
            found[row.name] = row if route in row.only else row._replace(no_effect=())
    return found


def accepting(route: Route) -> Callable[[Any], Any]:
    """Return the function that removes the parameters without effect on this route from a decoded body.

    The function raises InvalidRequest for a known parameter that is not supported. It keeps unknown parameters, which
    the body's type refuses.
    """
    table, served = rules(route), frozenset(BODIES[route].__struct_fields__)

    def accept(body: Any) -> Any:
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

    return accept


def _is_among(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Return whether `value` equals an accepted value or has an accepted type. true is not equal to 1."""
    return any(
        isinstance(value, int | float if a is float else a) and (a is bool or not isinstance(value, bool))
        if isinstance(a, type)
        else value == a and isinstance(value, bool) == isinstance(a, bool)
        for a in accepted
    )


def _refusal(row: Parameter) -> InvalidRequest:
    """Return the error for a parameter that is not supported."""
    says = f"{row.name} is not supported"
    if row.no_effect:
        says = f"{row.name} can only be {shown(row)} here, which changes nothing"
    elif row.idle_without:
        says += f" beside {' or '.join(row.idle_without)}"
    if row.instead:
        says += f"; use {row.instead}"
    return InvalidRequest(says, param=row.name, code="unsupported_parameter")


def shown(row: Parameter, quote: str = "") -> str:
    """Return in words the values other than null that have no effect. Values are written as JSON between `quote`."""
    return " or ".join(
        TYPES[value] if isinstance(value, type) else f"{quote}{json.dumps(value)}{quote}" for value in row.no_effect
    )
