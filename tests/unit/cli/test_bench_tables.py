"""What `tandem bench` shows while it measures and afterwards fits a terminal of 80 columns."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlx_tandem.cli.bench.left import Left
from mlx_tandem.cli.bench.report import engine_table, serve_table

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def shown(what: object) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False, markup=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tables_of_a_server_are_whole_on_80_columns() -> None:
    result = committed("adapters-0.13m.json")
    text = shown(serve_table(result))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    for row in result["results"]:
        level, mode, median = str(row["concurrency"]), row["mode"], row["median"]
        assert [level, mode, f"{median['tokens_per_s']:,.0f}"] in [cells[:3] for cells in rows]
        assert [level, mode, "request"] in [cells[:3] for cells in rows]
    for name in ("mixed/same", "long-mixed/long-same"):
        assert [name, *(f"{r[name.replace('long', 'long-decode')]:.2f}" for r in result["ratios"])] in rows
    assert "nothing was refused, and there were no errors" in text


def test_what_went_wrong_has_lines_of_its_own() -> None:
    result = committed("adapters-0.13m.json")
    first = result["results"][0]["rounds"][0]
    first["refusals"], first["error_kinds"] = {"statuses": {"429": 3, "503": 2}}, {"500": 4}
    mode = result["results"][0]["mode"]
    text = shown(serve_table(result))
    assert f"1 at once, {mode}, refused: 3 × 429, 2 × 503\n1 at once, {mode}, errors: 4 × 500\n" in text
    assert "nothing was refused" not in text


@pytest.mark.parametrize("name", ["engine-8b.json", "engine-8b-adapters.json", "speculation-8b.json"])
def test_the_tables_of_an_engine_are_whole_on_80_columns(name: str) -> None:
    result = committed(name)
    result["load"].setdefault("num_requests", 0)
    text = shown(engine_table(result))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for row in result["results"]:
        assert f"{row['tandem']['decode_tokens_per_s']:,.0f}" in text
        assert f"{row['tandem']['prefill_ms']:,.1f} ms" in text


def test_the_time_that_is_left_is_that_of_what_was_done() -> None:
    now = [100.0]
    left = Left(10, lambda: now[0])
    now[0] += 30.0
    assert left.after(2) == "about 2:00 left"
    now[0] += 2.0
    assert left.after(7) == "about 0:04 left"
    assert left.after() == "done"
