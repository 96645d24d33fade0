"""Write the table of parameters in docs/http-api.md from mlx_tandem/dialects/openai/parameters.py.

python scripts/parameter_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from mlx_tandem.dialects.openai.accept import rules, shown
from mlx_tandem.dialects.openai.parameters import BODIES, PARAMETERS, SCHEMAS, Parameter, Route

PAGE = Path(__file__).resolve().parents[1] / "docs" / "http-api.md"
BEGIN, END = "<!-- parameters: make format -->\n", "<!-- end of parameters -->\n"


def done(row: Parameter, route: Route) -> str:
    """Return what is done with a parameter on one route."""
    parts = ["served"] if route in row.served else []
    if row.no_effect:
        parts.append(f"accepted: {shown(row, '`')}")
    if row.idle_without:
        parts.append(f"accepted without {' and '.join(f'`{name}`' for name in row.idle_without)}")
    if row.instead and route not in row.served:
        parts.append(f"use `{row.instead}`")
    return "; ".join(parts) or "refused"


def table() -> str:
    """Return one row for each parameter, in the order of their names."""
    lines = ["| parameter | known to | here |", "|---|---|---|"]
    schemas = {p.name: ", ".join(SCHEMAS[letter] for letter in p.schemas) for p in PARAMETERS}
    own = {
        name: Parameter(name, "") for body in BODIES.values() for name in body.__struct_fields__ if name not in schemas
    }
    schemas |= dict.fromkeys(own, "mlx-tandem")
    chat, completions = (rules(route) | own for route in get_args(Route))
    for name in sorted(schemas):
        cells = done(chat[name], "chat"), done(completions[name], "completions")
        here = cells[0] if cells[0] == cells[1] else f"chat: {cells[0]}; completions: {cells[1]}"
        lines.append(f"| `{name}` | {schemas[name]} | {here} |")
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    """Return the page with today's table in it."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"{PAGE.name} has no place for the table: {BEGIN.strip()} … {END.strip()}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Write the page, or with --check only compare it."""
    page = PAGE.read_text(encoding="utf-8")
    new = rewritten(page)
    if "--check" in sys.argv:
        sys.exit(0 if page == new else f"{PAGE.name}: the table of parameters is another one; run make format")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
