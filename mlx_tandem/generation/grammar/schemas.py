"""Checking JSON schemas: what cannot be enforced is refused by its keyword, and what enforces nothing is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
from llguidance import LLMatcher

from mlx_tandem.generation.grammar.alternatives import are_disjoint
from mlx_tandem.generation.grammar.simplify import OTHER_FORMATS, bind_names, drop_redundant, names_allowed

UNSUPPORTED = frozenset(
    """
    not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies
    unevaluatedProperties unevaluatedItems uniqueItems $dynamicRef $recursiveRef x-guidance
    """.split()
)
"""Keywords that cannot be enforced. `x-guidance` would change llguidance's own rules."""

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
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("additionalProperties", "items", "additionalItems")
MOST_REFERENCES = 64
"""Most references that lead from one to the next."""

MOST_FAULTS = 64
"""Most keywords with a wrong form that are left out of one schema."""

Path = tuple[str | int, ...]


class SchemaError(Exception):
    """Raised for a schema that cannot be enforced. `where` is the path of the keyword, such as `.properties.a.not`."""

    def __init__(self, message: str, path: Path):
        super().__init__(message)
        self.path = path
        self.where = written(path)


def written(path: Sequence[str | int]) -> str:
    """Return a path inside of a JSON value as errors write it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def checked(schema: Any, *, is_lenient: bool = False) -> Any:
    """Return a schema without the keywords that enforce nothing. Raises SchemaError for one that cannot be enforced.

    If `is_lenient`, what cannot be enforced is left out, too, and nothing is raised.
    """
    if isinstance(schema, dict) and schema.get("$schema", next(iter(DIALECTS))) not in DIALECTS:
        if not is_lenient:
            raise SchemaError("this dialect of JSON Schema is not known", ("$schema",))
        schema = {key: value for key, value in schema.items() if key != "$schema"}
    made = _copied(schema)
    if is_lenient:
        made = _without_faults(made)
    _check_form(made)
    return _Walk(made, is_lenient).run()


def _copied(value: Any) -> Any:
    """Return a copy of plain data, whose objects may be changed."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _check_form(schema: Any) -> None:
    """Raise SchemaError for a value that is no schema of its dialect."""
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as e:
        raise SchemaError(str(e.message), tuple(e.instance_path)) from e
    except Exception as e:
        raise SchemaError(f"this is no JSON schema: {e}", ()) from e


def _without_faults(schema: Any) -> Any:
    """Return a schema without the keywords whose values have a wrong form; {} if that leaves no schema."""
    for _ in range(MOST_FAULTS):
        try:
            _check_form(schema)
        except SchemaError as e:
            names = [i for i, step in enumerate(e.path) if isinstance(step, str)]
            if not names:
                return {}
            found = schema
            for step in e.path[: names[-1]]:
                found = found[step]
            del found[e.path[names[-1]]]
        else:
            return schema
    return {}


class _Walk:
    """One pass over all parts of a schema that can matter: those under its keywords and those that `$ref` names."""

    def __init__(self, schema: Any, is_lenient: bool):
        self._root = schema
        self._is_lenient = is_lenient
        self._todo: list[tuple[Any, Path]] = []
        self._met: set[int] = set()
        self._names: list[tuple[dict[str, Any], str | tuple[str, ...]]] = []  # objects, and the names that they allow

    def run(self) -> Any:
        """Return the root, changed in place."""
        self._todo.append((self._root, ()))
        while self._todo:
            part, path = self._todo.pop()
            if isinstance(part, dict) and id(part) not in self._met:
                self._met.add(id(part))
                self._check(part, path)
                self._todo += self._parts(part, path)
        for part, names in self._names:  # Errors about the schemas in them have named the places that clients know.
            bind_names(part, names, self._root)
        return self._root

    def _check(self, part: dict[str, Any], path: Path) -> None:
        """Raise SchemaError for a keyword of this object that cannot be enforced, and drop those without effect."""
        drop_redundant(part)
        for pattern in list(part.get("patternProperties", ())):
            why = _problem_of_pattern(pattern)
            if part.get("additionalProperties") is False and not why:
                listed = {*part.get("properties", ()), *part.get("required", ())}
                why = "" if _allows_others(pattern, frozenset(listed)) else _NO_OTHERS
            if why:
                self._leave_out(part["patternProperties"], pattern, why, (*path, "patternProperties"))
        for keyword in list(part):
            if why := self._problem(part, keyword, path):
                self._leave_out(part, keyword, why, path)
        if "propertyNames" in part and (names := self._names_of(part, path)) is not None:
            self._names.append((part, names))
        if "pattern" in part and "format" in part and _problem_of_text(part["pattern"], part["format"]):
            del part["format"]  # which JSON Schema takes for a note; some libraries give it another meaning

    def _leave_out(self, part: dict[str, Any], key: str, why: str, path: Path) -> None:
        """Raise SchemaError for what cannot be enforced; in a lenient walk, remove it instead.

        Only `oneOf` is kept then, which the grammar takes for `anyOf`.
        """
        if not self._is_lenient:
            raise SchemaError(why, (*path, key))
        if key != "oneOf" or path[-1:] == ("patternProperties",):
            del part[key]

    def _problem(self, part: dict[str, Any], keyword: str, path: Path) -> str:
        """Return why a keyword of a schema cannot be enforced; empty if it can."""
        value = part[keyword]
        if keyword in UNSUPPORTED:
            return f"the keyword {keyword} cannot be enforced"
        if keyword == "propertyNames" and not self._binds_names(part, path):
            return (
                "propertyNames can only be a pattern, a length or a list of names, and without other keys beside them"
            )
        if keyword == "pattern":
            return _problem_of_pattern(value)
        if keyword == "$ref":
            return self._problem_of_reference(value, path)
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

    def _names_of(self, part: dict[str, Any], path: Path) -> str | tuple[str, ...] | None:
        return names_allowed(self._end(part["propertyNames"], path))

    def _binds_names(self, part: dict[str, Any], path: Path) -> bool:
        """Return whether the `propertyNames` of an object can be enforced."""
        names = self._names_of(part, path)
        if names is None or (isinstance(names, str) and _problem_of_pattern(names)):
            return False
        return names == "" or not (part.get("properties") or part.get("patternProperties"))

    def _problem_of_reference(self, ref: str, path: Path) -> str:
        """Return why a reference leads to no schema; empty if it leads to one."""
        try:
            self._resolved(ref, path)
        except SchemaError as e:
            return str(e)
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
        """Return the schema at the end of a chain of references; {} for a chain that has none."""
        for _ in range(MOST_REFERENCES):
            if not isinstance(part, dict) or "$ref" not in part:
                return part
            try:
                part, _place = self._resolved(part["$ref"], path)
            except SchemaError:  # The walk finds it, too, and names its place.
                return {}
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


def _problem_of_pattern(pattern: str) -> str:
    """Return why a regular expression cannot be enforced; empty if it can."""
    found = _REGEX_ERROR.search(_problem_of_text(pattern))
    return f"the pattern cannot be enforced: {found[1]}" if found else ""


@lru_cache(1024)
def _problem_of_text(pattern: str, form: str = "") -> str:
    """Return llguidance's error about texts that match a pattern and have a format; empty if there are some."""
    schema = {"type": "string", "pattern": pattern} | ({"format": form} if form else {})
    return str(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}")))


@lru_cache(1024)
def _allows_others(pattern: str, names: frozenset[str]) -> bool:
    """Return whether a pattern matches other texts than these."""
    if not names:
        return True
    both = {"type": "string", "allOf": [{"pattern": pattern}, {"pattern": f"^{_other_than(names)}$"}]}
    return "empty" not in LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: %json {json.dumps(both)}"))


def _other_than(texts: Collection[str]) -> str:
    """Return a pattern of every text but these."""
    by_first: dict[str, set[str]] = {}
    for text in filter(None, texts):
        by_first.setdefault(text[0], set()).add(text[1:])
    firsts = [f"\\u{{{ord(first):x}}}" for first in by_first]
    ways = [f"{first}{_other_than(rests)}" for first, rests in zip(firsts, by_first.values(), strict=True)]
    ways.append(f"[^{''.join(firsts)}][\\s\\S]*" if firsts else "[\\s\\S]+")
    return f"(?:{'|'.join([*([] if '' in texts else ['']), *ways])})"


_NO_OTHERS = "the pattern allows no other names than those that are listed"

_REGEX_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)
"""The reason in the regex library's report of several lines."""
