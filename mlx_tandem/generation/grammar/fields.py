"""Reading the fields of a request that constrain its answer: OpenAI's `response_format`, and vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.grammar.constraint import ANY_OBJECT, Constraint, OneOf, Pattern, Rules, Schema
from mlx_tandem.generation.sampling import Sampling
from mlx_tandem.strict_json import check_nested, dumps

FORMATS = ("text", "json_object", "json_schema")
"""The types of a `response_format`."""


def constraint_of(body: Sampling) -> Constraint | None:
    """Return what the answer must match; None for any text. Raises InvalidRequest naming the field."""
    given: list[Constraint] = []
    if body.response_format is not None and (made := _response_format(body.response_format)) is not None:
        given.append(made)
    for name, make in _GUIDED.items():
        if (value := getattr(body, f"guided_{name}")) is not None:
            given.append(Constraint(make(value, f"guided_{name}"), f"guided_{name}"))
    if body.structured_outputs is not None:
        given += _structured_outputs(body.structured_outputs)
    if not given:
        return None
    param = given[-1].param
    if len(given) > 1:
        raise InvalidRequest(f"{given[0].param} and {param} cannot both be given", param=param)
    _check_alone(body, param)
    return given[0]


def json_constraint(param: str, schema: Any = None, where: str = "") -> Constraint:
    """Return the constraint that the answer is JSON that is valid under `schema`; any JSON object for None.

    `param` is the field of the request, and `where` the path of the schema in it. Raises InvalidRequest.
    """
    return Constraint(Schema(ANY_OBJECT, param) if schema is None else _schema(schema, param + where), param)


def _check_alone(body: Sampling, param: str) -> None:
    """Raise InvalidRequest for a parameter that contradicts a constraint: it forbids tokens that the text may need."""
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} cannot be combined with {param}", param=name)


def _response_format(given: dict[str, Any]) -> Constraint | None:
    """Return the constraint of a `response_format`; None for text."""
    param = "response_format"
    kind = given.get("type")
    if kind not in FORMATS:
        raise InvalidRequest(f"{param}.type must be one of {', '.join(FORMATS)}", param=f"{param}.type")
    if kind == "text":
        _check_keys(given, {"type"}, param)
        return None
    if kind == "json_object":
        _check_keys(given, {"type"}, param)
        return Constraint(Schema(ANY_OBJECT, param), param)
    _check_keys(given, {"type", "json_schema"}, param)
    own = given.get("json_schema")
    if not isinstance(own, dict):
        code = "missing_required_parameter" if own is None else "invalid_type"
        raise InvalidRequest(f"{param}.json_schema must be an object", param=f"{param}.json_schema", code=code)
    _check_keys(own, {"name", "description", "schema", "strict"}, f"{param}.json_schema")
    if "schema" not in own:
        where = f"{param}.json_schema.schema"
        raise InvalidRequest(f"{where} is required", param=where, code="missing_required_parameter")
    return Constraint(_schema(own["schema"], f"{param}.json_schema.schema"), param)


def _structured_outputs(given: dict[str, Any]) -> list[Constraint]:
    """Return the constraints of vLLM's `structured_outputs`."""
    param = "structured_outputs"
    idle = {"disable_fallback", "disable_additional_properties"}
    _check_keys(given, {*_GUIDED, "json_object", "disable_any_whitespace", *idle}, param)
    if given.get("disable_additional_properties"):
        where = f"{param}.disable_additional_properties"
        raise InvalidRequest(f"{where} is not supported; say so in the schema", param=where)
    compact = given.get("disable_any_whitespace") is True
    made = [
        Constraint(make(given[name], f"{param}.{name}"), f"{param}.{name}", is_compact=compact)
        for name, make in _GUIDED.items()
        if given.get(name) is not None
    ]
    if given.get("json_object"):
        whole = f"{param}.json_object"
        made.append(Constraint(Schema(ANY_OBJECT, whole), whole, is_compact=compact))
    return made


def _check_keys(given: dict[str, Any], known: set[str], param: str) -> None:
    """Raise InvalidRequest for a key that is not known and not null."""
    for key in sorted(given, key=str):
        if key not in known and given[key] is not None:
            name = ascii(str(key)[:64])[1:-1]
            raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}", code="unknown_parameter")


def _schema(value: Any, param: str) -> Schema:
    """Return a schema, which is an object, a boolean, or either of them as JSON in a text."""
    if isinstance(value, str):
        return Schema(value.encode("utf-8", "surrogatepass"), param)
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{param} must be a JSON schema", param=param, code="invalid_type")
    check_nested(value, param, depth=limits.MAX_JSON_DEPTH, values=limits.MAX_GRAMMAR_BYTES)
    return Schema(dumps(value), param)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a text", param=param, code="invalid_type")
    if not value:
        raise InvalidRequest(f"{param} is empty", param=param)
    return value


def _texts(value: Any, param: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(f"{param} must be a list of texts", param=param, code="invalid_type")
    if not 1 <= len(value) <= limits.MAX_GUIDED_CHOICES:
        raise InvalidRequest(f"{param} has 1 to {limits.MAX_GUIDED_CHOICES} texts", param=param)
    return tuple(dict.fromkeys(value))


_GUIDED: dict[str, Callable[[Any, str], Schema | Pattern | OneOf | Rules]] = {
    "json": _schema,
    "regex": lambda value, param: Pattern(_text(value, param)),
    "choice": lambda value, param: OneOf(_texts(value, param)),
    "grammar": lambda value, param: Rules(_text(value, param)),
}
"""What makes the form of a constraint from each of vLLM's fields."""
