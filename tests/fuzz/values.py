"""Values that nobody expects, and trees of JSON with one of them somewhere."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

TEXTS = (
    "",
    " ",
    "lora",
    "none",
    "LORA",
    "../../etc/passwd",
    "\ud800",
    "\udfff\ud800",
    "a\nb",
    "\x00",
    "\x1b[31mred\x1b[0m",
    "\u2028\u202e\ufeff",
    "🦊é中",
    "%s %d {} {0.__class__}",
    "(a+)+$",
    "x" * 300,
    "x" * 20_000,
    "{{ 1/0 }}",
    "1",
    "-1",
    "NaN",
    "true",
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, 9, 64, 255, 256, 65_535, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32),
    *(2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 10**300, 10**4000),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e-30, 1e5, 1e30, 1e308, -1e308, 4.0),
    *(float("nan"), float("inf"), float("-inf")),
)
PLAIN = (None, True, False)


def nested(depth: int, of: str) -> Any:
    """Lists or objects in each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if of == "list" else {"a": value}
    return value


def hostile(rng: Random) -> Any:
    """A value of any kind."""
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(TEXTS)
    if kind == 6:
        return rng.choice(PLAIN)
    if kind == 7:
        return [hostile(rng) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {key(rng): hostile(rng) for _ in range(rng.randrange(4))}
    return nested(rng.choice((1, 5, 60, 70, 400)), rng.choice(("list", "object")))


def key(rng: Random) -> str:
    """A name that may be any text."""
    return rng.choice(TEXTS) if rng.random() < 0.7 else "".join(chr(rng.randrange(1, 0xFFFF)) for _ in range(3))


def changed(rng: Random, tree: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`tree` with one thing changed, and the key at its top under which that is; of one that is renamed both names."""
    tree = copy.deepcopy(tree)
    at: Any = tree
    top: str | None = None
    while True:
        names = list(at) if isinstance(at, dict) else range(len(at))
        if not names or rng.random() < 0.15:
            break
        name = rng.choice(list(names))
        top = str(name) if top is None else top
        inner = at[name]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            at = inner
            continue
        what = rng.random()
        if what < 0.7:
            at[name] = hostile(rng)
        elif what < 0.85 or not isinstance(at, dict):
            del at[name]
        else:
            new = key(rng)
            at[new] = at.pop(name)
            return tree, (top or "", new)
        return tree, (top or "",)
    if isinstance(at, dict):
        new = key(rng)
        at[new] = hostile(rng)
        return tree, (new if top is None else top,)
    at.append(hostile(rng))
    return tree, (top or "",)
