"""Writes settings as YAML with an explanation of each, which the options and the comments of config.py give."""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from mlx_tandem import config as settings
from mlx_tandem.cli.options import FLAG, OPTIONS
from mlx_tandem.cli.settings import SECTIONS
from mlx_tandem.config import Config, EngineConfig

HEADER = """\
# Settings of `tandem serve --config FILE`. Options of the command line come before them.
# Each setting is here with its default; remove the # before it, and before its section, to change it.
"""

IN_YAML = {"None": "null", "True": "true", "False": "false"}
"""Words of config.py as YAML has them."""

FLAGS = {OPTIONS[name]: flag for name, flag in FLAG.items()}
"""The option of each setting that has one, by its path in config.py."""


def lines(found: Config, usual: Config | None) -> Iterator[str]:
    """Yield the lines of a file with the settings `found`. Those that are as in `usual` are commented out, where `#` is
    the first character; None: none is.
    """
    now, before = _tree(found), None if usual is None else _tree(usual)
    for name, (kind, fields) in _sections().items():
        value = now[name]
        if kind is None:
            told = _explained(Config, name, name)
            yield ""
            yield _line(f"{name}: {_yaml(value)}", told, before is not None and before[name] == value)
            continue
        changed = [field for field in fields if before is None or before[name][field] != value[field]]
        yield ""
        yield f"# {(kind.__doc__ or '').splitlines()[0]}"
        yield f"{name}:" if changed else f"#{name}:"
        for field in fields:
            place = (
                f"engine.{field}"
                if name == "engine"
                else f"engine.{name}.{field}"
                if name in SECTIONS
                else f"{name}.{field}"
            )
            told = _explained(kind, field, place)
            yield _line(f"  {field}: {_yaml(value[field])}", told, field not in changed)


def _line(setting: str, told: str, is_usual: bool) -> str:
    return f"{'#' * is_usual}{setting}" + (f"  # {told}" if told else "")


def _yaml(value: object) -> str:
    """Return a value as YAML on one line, which JSON is, too."""
    return json.dumps(value, ensure_ascii=False)


def _sections() -> dict[str, tuple[type[msgspec.Struct] | None, tuple[str, ...]]]:
    """Return the type of each key at the top of the file, None for one that is no section, and its fields."""
    top, engine = get_type_hints(Config), get_type_hints(EngineConfig)
    kinds = {name: engine[name] for name in SECTIONS} | {"engine": EngineConfig}
    kinds |= {name: kind for name, kind in top.items() if name != "engine"}
    found: dict[str, tuple[type[msgspec.Struct] | None, tuple[str, ...]]] = {}
    for name, kind in kinds.items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            found[name] = kind, tuple(f for f in kind.__struct_fields__ if name != "engine" or f not in SECTIONS)
        else:
            found[name] = None, ()
    return found


def _tree(found: Config) -> dict[str, Any]:
    """Return settings in the layout of the file, as plain data."""
    tree: dict[str, Any] = msgspec.to_builtins(found)
    tree |= {name: tree["engine"][name] for name in SECTIONS}
    tree["adapters"] = dict(tree["adapters"])
    tree["ab_tests"] = dict(tree["ab_tests"])
    tree["aliases"] = {name: {arm["adapter"]: arm["weight"] for arm in arms} for name, arms in tree["aliases"]}
    return tree


def _explained(kind: type, field: str, place: str) -> str:
    """Return the option of a setting and what config.py says of it."""
    parts = [FLAGS.get(place, ""), _comments().get((kind.__name__, field), "")]
    told = ": ".join(part for part in parts if part)
    return re.sub(r"\b(None|True|False)\b", lambda word: IN_YAML[word[0]], told)


@functools.cache
def _comments() -> Mapping[tuple[str, str], str]:
    """Return the comment on each field of config.py by its class and its name. It stands behind the field, or above
    it.
    """
    source = Path(settings.__file__).read_text(encoding="utf-8")
    comments: dict[int, str] = {}
    own_line: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.removeprefix("#").strip()
            if not token.line[: token.start[1]].strip():
                own_line.add(token.start[0])
    found = {}
    for kind in (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)):
        for each in kind.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.end_lineno:
                first = each.lineno
                while first - 1 in own_line:
                    first -= 1
                told = [comments[n] for n in range(first, each.end_lineno + 1) if n in comments]
                found[kind.name, each.target.id] = " ".join(told)
    return found
