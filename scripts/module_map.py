"""Write the map of modules in ARCHITECTURE.md: one line for each, the first sentence of its docstring.

python scripts/module_map.py [--check]
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- modules: make format -->\n", "<!-- end of modules -->\n"


def first_sentence(file: Path) -> str:
    """Return the first sentence of the module's docstring on one line. Raise ValueError if it has none."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring")
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].rstrip(".")


def module_map() -> str:
    """Return a list for each package, in the order of the tree; empty files are left out."""
    files = sorted(
        (f for f in (ROOT / "mlx_tandem").rglob("*.py") if f.stat().st_size), key=lambda f: (str(f.parent), f.name)
    )
    parts = []
    for folder, members in groupby(files, key=lambda f: f.parent):
        lines = [f"- `{f.name}` {first_sentence(f)}" for f in members]
        parts.append(f"\n**`{folder.relative_to(ROOT).as_posix()}/`**\n\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def rewritten(page: str) -> str:
    """Return the page with today's map in it."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"{PAGE.name} has no place for the map: {BEGIN.strip()} … {END.strip()}")
    return f"{before}{BEGIN}{module_map()}\n{END}{after}"


def main() -> None:
    """Write the page, or with --check only compare it."""
    page = PAGE.read_text(encoding="utf-8")
    new = rewritten(page)
    if "--check" in sys.argv:
        sys.exit(0 if page == new else f"{PAGE.name}: the map of modules is not that of the tree; run make format")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
