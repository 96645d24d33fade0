"""The rewards `regex` and `json_schema`. Both engines take time linear in the text; sizes are capped all the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema_rs
import msgspec
import re2
from msgspec import Struct

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.limits import MAX_JSON_DEPTH, MAX_PATTERN, MAX_REWARD_TEXT, MAX_SCHEMA_BYTES
from mlx_tandem.training.rewards.messages import Sample
from mlx_tandem.training.rewards.said import said, unfenced

PATTERN_BYTES = 1 << 20  # of a compiled pattern
KEPT = 64  # compiled patterns and schemas


# -- regex ----------------------------------------------------------------------------------------------------------


class RegexOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `regex`."""

    pattern: str | None = None  # None: metadata.pattern
    full: bool = False  # the whole completion must match

    def __post_init__(self) -> None:
        if self.pattern is not None:
            compiled_pattern(self.pattern)


def regex(sample: Sample, options: RegexOptions) -> float:
    """Return 1 when the completion matches somewhere, or wholly with `full`; else 0, and for more than 128 KiB."""
    pattern = compiled_pattern(sample.metadata["pattern"] if options.pattern is None else options.pattern)
    text = unfenced(said(sample.completion)).encode()
    if len(text) > MAX_REWARD_TEXT:
        return 0.0
    return float((pattern.fullmatch(text) if options.full else pattern.search(text)) is not None)


def needs_pattern(options: RegexOptions, metadata: Mapping[str, Any]) -> None:
    """Raise InvalidRequest when neither options nor metadata have a pattern."""
    if options.pattern is None:
        _check(compiled_pattern, metadata, "pattern", str, "a string")


@lru_cache(maxsize=KEPT)
def compiled_pattern(pattern: str) -> Any:
    """Return a compiled pattern. Raises ValueError for one that RE2 has no syntax for, or that is too large."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"the pattern is longer than {MAX_PATTERN} characters")
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as e:
        reason = e.args[0].decode(errors="replace") if e.args and isinstance(e.args[0], bytes) else "not valid"
        raise ValueError(f"RE2 does not take the pattern: {reason}") from None


# -- json_schema ----------------------------------------------------------------------------------------------------


class SchemaOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `json_schema`."""

    schema: dict[str, Any] | None = None  # None: metadata.schema

    def __post_init__(self) -> None:
        if self.schema is not None:
            compiled_schema(self.schema)


def json_schema(sample: Sample, options: SchemaOptions) -> float:
    """Return 1 when the completion, or its one fenced block, is JSON that the schema holds for; else 0.

    At most 128 KiB are read.
    """
    schema = compiled_schema(sample.metadata["schema"] if options.schema is None else options.schema)
    text = unfenced(said(sample.completion)).encode()
    if len(text) > MAX_REWARD_TEXT:
        return 0.0
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return 0.0
    return float(_depth(value) <= MAX_JSON_DEPTH and schema.is_valid(value))


def needs_schema(options: SchemaOptions, metadata: Mapping[str, Any]) -> None:
    """Raise InvalidRequest when neither options nor metadata have a schema."""
    if options.schema is None:
        _check(compiled_schema, metadata, "schema", dict, "an object")


def compiled_schema(schema: dict[str, Any]) -> Any:
    """Return a compiled schema.

    Raises ValueError for one that is not valid, too large or too deep, or that refers to another document.
    """
    try:
        text = msgspec.json.encode(schema)
    except (TypeError, ValueError, RecursionError, OverflowError):
        raise ValueError("the schema is not JSON") from None
    return _compiled_schema(text)


@lru_cache(maxsize=KEPT)
def _compiled_schema(text: bytes) -> Any:
    if len(text) > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema is longer than {MAX_SCHEMA_BYTES} bytes")
    schema = msgspec.json.decode(text)
    if _depth(schema) > MAX_JSON_DEPTH:
        raise ValueError(f"the schema is nested deeper than {MAX_JSON_DEPTH}")
    size = PATTERN_BYTES
    try:
        return jsonschema_rs.validator_for(
            schema,
            offline=True,
            pattern_options=jsonschema_rs.RegexOptions(size_limit=size, dfa_size_limit=size),
        )
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as e:
        reason = getattr(e, "message", None) or str(e)
        raise ValueError(f"the schema is not valid: {reason[:200]}") from None


def _depth(value: object) -> int:
    """Return how deep lists and objects are within each other."""
    depth, level = 0, [value]
    while level:
        below: list[object] = []
        for v in level:
            if isinstance(v, dict):
                below.extend(v.values())
            elif isinstance(v, list):
                below.extend(v)
        depth += any(isinstance(v, (dict, list)) for v in level)
        level = below
    return depth


def _check(compiled: Any, metadata: Mapping[str, Any], field: str, kind: type, kind_name: str) -> None:
    param = f"metadata.{field}"
    if metadata.get(field) is None:
        raise InvalidRequest(f"{param} is missing: neither it nor the option '{field}' is given", param=param)
    if not isinstance(metadata[field], kind):
        raise InvalidRequest(f"{param} must be {kind_name}", param=param, code="invalid_type")
    try:
        compiled(metadata[field])
    except ValueError as e:
        raise InvalidRequest(f"{param}: {e}", param=param) from None
