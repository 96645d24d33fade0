"""The OpenAPI document of the routes, made from the types of their bodies and the ranges in limits.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from mlx_tandem import __version__, limits
from mlx_tandem.dialects.route import FORM, Route

_WRITTEN_OUT: dict[str, dict[str, Any]] = {
    "stop": {"type": ["string", "array", "null"], "items": {"type": "string"}},
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}},
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
}
"""Schemas of fields that are not numbers and that no type describes."""

ERRORS = (400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 500, 503, 504, 507)
"""Statuses of error replies."""

_MEMBERS = {"message": {"type": "string"}, "type": {"type": "string"}} | {
    name: {"type": ["string", "null"]} for name in ("param", "code")
}
_OBJECT = {"type": "object", "properties": _MEMBERS, "required": list(_MEMBERS), "additionalProperties": False}
_BODY = {"type": "object", "properties": {"error": _OBJECT}, "required": ["error"], "additionalProperties": False}

_FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
    "required": ["file", "purpose"],
}
"""A form with a file of requests."""

_PROGRESS = {
    "type": "object",
    "description": "How far the start is, while the status is starting or restarting.",
    "properties": {
        "stage": {"type": "string", "description": "What is being done."},
        "fraction": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "description": "The share of the stage that is done.",
        },
        "elapsed_s": {"type": "number", "minimum": 0, "description": "Seconds since the engine was launched."},
        "left_s": {
            "type": ["number", "null"],
            "minimum": 0,
            "description": "Seconds that are left by the last start of this model and settings; null without one.",
        },
    },
    "required": ["stage", "fraction", "elapsed_s", "left_s"],
}
_UNHEALTHY = {
    "type": "object",
    "properties": {"status": {"type": "string"}, "progress": _PROGRESS},
    "required": ["status"],
}
"""The body of /health while no requests are accepted. The progress is shown to clients that send the key."""


def document(routes: Iterable[Route], *, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `routes`. `needs_key` tells whether this server asks for a key."""
    routes = list(routes)
    kinds = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        for name, property_ in schema.get("properties", {}).items():
            property_.update(_range(name, property_))
    bodies = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.header is not None:
            continue  # Another route of the same path and method describes it.
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, bodies, needs_key)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-tandem", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {"Error": _error(_BODY)},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(route: Route, path: str, bodies: dict[type[Struct], Any], needs_key: bool) -> dict[str, Any]:
    """Return the operation object of a route. `bodies` has the reference to each body's schema."""
    is_public = not needs_key or route.scope == "public"
    scopes = [] if route.scope == "any" else [route.scope]
    error = {"$ref": "#/components/responses/Error"} if route.errors is None else _error(route.errors.schema)
    operation: dict[str, Any] = {
        # Two paths may differ in the slash at their end.
        "operationId": "_".join(re.findall(r"\w+|/$", f"{route.method.lower()} {path}")).replace("/", ""),
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in route.parameters
            ),
            *({"name": name, "in": "query", "schema": schema} for name, schema in _query(route).items()),
        ],
        "responses": {
            str(route.status): {"description": "The answer."},
            **dict.fromkeys(map(str, ERRORS), error),
        },
        "security": [] if is_public else [{"bearer": scopes}, {"key": scopes}],
    }
    if route.reads == "bytes":
        binary: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
        content = dict.fromkeys(route.media or ("application/x-protobuf",), binary)
        if FORM in content:
            content[FORM] = {"schema": _FORM}
        if "application/json" in content:
            content["application/json"] = {"schema": {"type": ["array", "object"]}}
        operation["requestBody"] = {"required": True, "content": content}
    if path == "/health":
        content = {"application/json": {"schema": _UNHEALTHY}}
        operation["responses"]["503"] = {"description": "No requests are accepted now.", "content": content}
    if route.body is not None:
        content = {"application/json": {"schema": bodies[route.body]}}
        operation["requestBody"] = {"required": route.needs_body, "content": content}
    return operation


def _query(route: Route) -> dict[str, Any]:
    """Return the schema of each parameter of a route's query."""
    if route.query is None:
        return {}
    schema: dict[str, Any] = msgspec.json.schema_components([route.query])[1][route.query.__name__]["properties"]
    return schema


def _error(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response object for errors whose bodies have this schema."""
    return {"description": "What is wrong.", "content": {"application/json": {"schema": schema}}}


def _range(name: str, property_: dict[str, Any]) -> dict[str, Any]:
    """Return the additions to the schema of the field `name`. `property_` is the schema that msgspec made of it."""
    if set(property_) != {"default"}:
        return {}  # Its own type describes it.
    if (r := limits.PARAMETERS.get(name)) is None:
        return _WRITTEN_OUT.get(name, {})
    return {"type": ["integer" if r.integer else "number", "null"], "minimum": r.low, "maximum": r.high}
