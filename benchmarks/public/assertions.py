"""The assertions of unittest's test cases."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from public.expressions import compared, is_of, skip
from public.values import Unknown, Unread, is_none, same


def assertions(count: Callable[[], None], failed: Callable[[str, Any, Any], None]) -> dict[str, Callable[..., Any]]:
    """Return the methods of unittest's test cases."""

    def check(name: str, holds: Callable[..., bool]) -> Callable[..., None]:
        def method(*args: Any, **kwargs: Any) -> None:
            if any(isinstance(each, Unknown) for each in args[:2]):
                return
            try:
                found = holds(*args[:2])
            except Unread:
                return
            count()
            if not found:
                failed(name, args[0], args[1] if len(args) > 1 else None)

        return method

    signs: dict[str, type[ast.cmpop]] = {
        "assertGreater": ast.Gt,
        "assertGreaterEqual": ast.GtE,
        "assertIn": ast.In,
        "assertIs": ast.Is,
        "assertIsNot": ast.IsNot,
        "assertLess": ast.Lt,
        "assertLessEqual": ast.LtE,
        "assertNotEqual": ast.NotEq,
        "assertNotIn": ast.NotIn,
    }
    made = {name: check(name, lambda a, b, sign=sign: compared(sign(), a, b)) for name, sign in signs.items()}
    for name in ("assertEqual", "assertListEqual", "assertDictEqual", "assertMultiLineEqual", "assertAlmostEqual"):
        made[name] = check(name, same)
    made["assertTrue"] = check("assertTrue", lambda a, *b: bool(a))
    made["assertFalse"] = check("assertFalse", lambda a, *b: not a)
    made["assertIsNone"] = check("assertIsNone", lambda a, *b: is_none(a))
    made["assertIsNotNone"] = check("assertIsNotNone", lambda a, *b: not is_none(a))
    made["assertIsInstance"] = check("assertIsInstance", lambda a, kind: is_of(a, kind))
    made["assertCountEqual"] = check("assertCountEqual", lambda a, b: same(sorted(a), sorted(b)))
    made["fail"] = check("fail", lambda *a: False)
    made["skipTest"] = skip
    made["subTest"] = lambda *args, **kwargs: None
    return made
