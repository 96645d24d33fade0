"""The OpenAPI document of the routes: bodies from the types that they are decoded into, ranges from limits.py."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from mlx_tandem import __version__, limits
from mlx_tandem.dialects import adapters, training
from mlx_tandem.dialects.openai import ChatBody, CompletionBody
from mlx_tandem.dialects.perplexity import PerplexityBody
from mlx_tandem.dialects.tokenize import DetokenizeBody, TokenizeBody
from mlx_tandem.server.auth import PUBLIC

BODIES: dict[str, type[Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/completions": CompletionBody,
    "/v1/perplexity": PerplexityBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/adapters": adapters.AdapterBody,
    "/v1/load_lora_adapter": adapters.VllmLoadBody,
    "/v1/unload_lora_adapter": adapters.VllmUnloadBody,
    "/v1/aliases/{name}": adapters.AliasBody,
    "/v1/training/update": training.UpdateBody,
    "/v1/training/start": training.NoBody,
    "/v1/training/stop": training.NoBody,
    "/v1/training/checkpoint": training.CheckpointBody,
    "/training/checkpoint": training.CheckpointBody,
    "/v1/training/rollback": training.RollbackBody,
    "/model/switch-lora": training.SwitchBody,
}
"""The body of the POST or PUT that each path takes."""

_MAY_BE_ABSENT = {training.NoBody, training.CheckpointBody, training.RollbackBody}

_WRITTEN_OUT: dict[str, dict[str, Any]] = {
    "stop": {"type": ["string", "array", "null"], "items": {"type": "string"}},
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}},
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
}
"""Fields that are checked by hand and are no numbers."""

ERRORS = (400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 500, 503, 504)
"""Statuses of error replies."""

_MEMBERS = {"message": {"type": "string"}, "type": {"type": "string"}} | {
    name: {"type": ["string", "null"]} for name in ("param", "code")
}
_OBJECT = {"type": "object", "properties": _MEMBERS, "required": list(_MEMBERS), "additionalProperties": False}
_BODY = {"type": "object", "properties": {"error": _OBJECT}, "required": ["error"], "additionalProperties": False}
_ERROR = {"description": "What is wrong.", "content": {"application/json": {"schema": _BODY}}}


def document(routes: Iterable[tuple[str, str]], *, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `routes`, pairs of a method and a path as Starlette writes it. `needs_key`:
    whether this server asks for a key."""
    kinds = list(dict.fromkeys(BODIES.values()))
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        for name, property_ in schema.get("properties", {}).items():
            property_.update(_range(name, property_))
    bodies = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, pattern in routes:
        path = pattern.replace(":path}", "}")
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, bodies, needs_key)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-tandem", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {"Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(method: str, path: str, bodies: dict[type[Struct], Any], needs_key: bool) -> dict[str, Any]:
    is_public = not needs_key or (method == "GET" and path in PUBLIC)
    operation: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {path}")),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "responses": {
            "202" if path == "/v1/training/update" else "200": {"description": "The answer."},
            **{str(status): {"$ref": "#/components/responses/Error"} for status in ERRORS},
        },
        "security": [] if is_public else [{"bearer": []}, {"key": []}],
    }
    if method in ("POST", "PUT"):
        kind = BODIES[path]
        content = {"application/json": {"schema": bodies[kind]}}
        operation["requestBody"] = {"required": kind not in _MAY_BE_ABSENT, "content": content}
    return operation


def _range(name: str, property_: dict[str, Any]) -> dict[str, Any]:
    """Return what is known beside its type of the field `name`, whose schema msgspec has made."""
    if set(property_) != {"default"}:
        return {}  # it has a type of its own
    if (r := limits.PARAMETERS.get(name)) is None:
        return _WRITTEN_OUT.get(name, {})
    return {"type": ["integer" if r.integer else "number", "null"], "minimum": r.low, "maximum": r.high}
