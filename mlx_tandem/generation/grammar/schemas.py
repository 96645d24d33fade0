"""Checking JSON schemas: what cannot be enforced is refused by its keyword, and what enforces nothing is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import jsonschema_rs

from mlx_tandem.generation.grammar.alternatives import are_disjoint

UNSUPPORTED = frozenset(
    """
    not if then else contains minContains maxContains propertyNames dependentRequired dependentSchemas dependencies
    unevaluatedProperties unevaluatedItems uniqueItems $dynamicRef $recursiveRef x-guidance
    """.split()
)
"""Keywords that cannot be enforced. `x-guidance` would change llguidance's own rules."""

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
"""Formats that are enforced."""

OTHER_FORMATS = frozenset(
    """
    idn-email idn-hostname uri-reference uri-template iri iri-reference json-pointer relative-json-pointer regex
    """.split()
)
"""Formats that JSON Schema defines and that cannot be enforced. It defines no others, and says to ignore those."""

DIALECTS = frozenset(
    f"http{s}://json-schema.org/{path}{end}"
    for s in ("", "s")
    for path in (
        "draft/2020-12/schema",
        "draft/2019-09/schema",
        "draft-07/schema",
        "draft-06/schema",
        "draft-04/schema",
    )
    for end in ("", "#")
)
"""The values of `$schema` that are known. Others would have to be fetched."""

_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "prefixItems")
_SINGLE = ("additionalProperties", "items", "additionalItems")
MOST_REFERENCES = 64
"""Most references that lead from one to the next."""

Path = tuple[str | int, ...]


class SchemaError(Exception):
    """Raised for a schema that cannot be enforced. `where` is the path of the keyword, such as `.properties.a.not`."""

    def __init__(self, message: str, path: Path):
        super().__init__(message)
        self.where = written(path)


def written(path: Sequence[str | int]) -> str:
    """Return a path inside of a JSON value as errors write it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def checked(schema: Any, *, is_lenient: bool = False) -> Any:
    """Return a schema without the keywords that enforce nothing. Raises SchemaError for one that cannot be enforced.

    If `is_lenient`, keywords that cannot be enforced are left out, too.
    """
    if isinstance(schema, dict) and schema.get("$schema", next(iter(DIALECTS))) not in DIALECTS:
        raise SchemaError("this dialect of JSON Schema is not known", ("$schema",))
    _check_form(schema)
    return _Walk(schema, is_lenient).run()


def _check_form(schema: Any) -> None:
    """Raise SchemaError for a value that is no schema of its dialect."""
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as e:
        raise SchemaError(str(e.message), tuple(e.instance_path)) from e
    except Exception as e:
        raise SchemaError(f"this is no JSON schema: {e}", ()) from e


class _Walk:
    """One pass over all parts of a schema that can matter: those under its keywords and those that `$ref` names."""

    def __init__(self, schema: Any, is_lenient: bool):
        self._root = schema
        self._is_lenient = is_lenient
        self._todo: list[tuple[Any, Path]] = []
        self._met: set[int] = set()

    def run(self) -> Any:
        """Return the root without the keywords that enforce nothing."""
        made = self._copied(self._root)
        self._root = made
        self._todo.append((made, ()))
        while self._todo:
            part, path = self._todo.pop()
            if isinstance(part, dict) and id(part) not in self._met:
                self._met.add(id(part))
                self._check(part, path)
                self._todo += self._parts(part, path)
        return made

    def _copied(self, value: Any) -> Any:
        """Return a copy of plain data, whose objects the walk may change."""
        if isinstance(value, dict):
            return {key: self._copied(inner) for key, inner in value.items()}
        return [self._copied(inner) for inner in value] if isinstance(value, list) else value

    def _check(self, part: dict[str, Any], path: Path) -> None:
        """Raise SchemaError for a keyword of this object that cannot be enforced, and drop those without effect."""
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        asked = part.get("format")
        if asked is not None and asked not in FORMATS | OTHER_FORMATS:
            del part["format"]
        for keyword in list(part):
            if why := self._problem(part, keyword, path):
                if not self._is_lenient:
                    raise SchemaError(why, (*path, keyword))
                inner = part.pop(keyword)
                if keyword == "oneOf":
                    part.setdefault("anyOf", inner)
        if "oneOf" in part:
            part["anyOf"] = part.pop("oneOf")

    def _problem(self, part: dict[str, Any], keyword: str, path: Path) -> str:
        """Return why a keyword of a schema cannot be enforced; empty if it can."""
        value = part[keyword]
        if keyword in UNSUPPORTED:
            return f"the keyword {keyword} cannot be enforced"
        if keyword == "$id" and path:
            return "only the whole schema may have an $id"
        if keyword == "format" and value in OTHER_FORMATS:
            return f"the format {value} cannot be enforced"
        # Keys that `properties` does not list may come twice, and then count once.
        if keyword == "minProperties" and value > max(len(part.get("required", ())), 1):
            return "minProperties can be at most the number of required properties"
        if keyword == "oneOf" and ("anyOf" in part or not are_disjoint(value, lambda inner: self._end(inner, path))):
            return (
                "the alternatives of oneOf must differ in their types, or in a required property with fixed values; "
                "anyOf has no such condition"
            )
        return ""

    def _parts(self, part: dict[str, Any], path: Path) -> Iterator[tuple[Any, Path]]:
        """Yield the schemas directly inside of one, with their paths."""
        for keyword in _MAPS:
            for key, inner in part.get(keyword, {}).items():
                yield inner, (*path, keyword, key)
        for keyword in _LISTS:
            for i, inner in enumerate(part.get(keyword, ())):
                yield inner, (*path, keyword, i)
        for keyword in _SINGLE:
            inner = part.get(keyword)
            for i, each in enumerate(inner) if isinstance(inner, list) else ():
                yield each, (*path, keyword, i)
            if isinstance(inner, dict):
                yield inner, (*path, keyword)
        if "$ref" in part:
            yield self._resolved(part["$ref"], (*path, "$ref"))

    def _end(self, part: Any, path: Path) -> Any:
        """Return the schema at the end of a chain of references; {} for a chain that has no end."""
        for _ in range(MOST_REFERENCES):
            if not isinstance(part, dict) or "$ref" not in part:
                return part
            part, _place = self._resolved(part["$ref"], (*path, "$ref"))
        return {}

    def _resolved(self, ref: str, path: Path) -> tuple[Any, Path]:
        """Return the schema that a reference names, and its path. Raises SchemaError for one outside of this schema."""
        if ref != "#" and not ref.startswith("#/"):
            raise SchemaError("references can only name a place in the same schema, as #/… does", path)
        found, steps = self._root, []
        for written_step in ref.split("/")[1:]:
            step: str | int = unquote(written_step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and str(step).isdecimal() and int(step) < len(found):
                step = int(step)
                found = found[step]
            elif isinstance(found, dict) and step in found:
                found = found[step]
            else:
                raise SchemaError("the reference names nothing", path)
            steps.append(step)
        return found, tuple(steps)
