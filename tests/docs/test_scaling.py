"""The figures of docs/scaling.md: outputs of commands, arithmetic with them, and measurements."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli_tools import tandem

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```sh\ntandem plan ([^\n]*)\n```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S)
LINES = re.findall(r"^([^`|\n]+?): +([\d.,*/+ ]+) = ([\d.,]+)$", PAGE, re.M)

GIVEN = {"1,000", "512", "128", "10,000", "0.8", "2", "64", "640"}
"""Numbers that nothing computes: the traffic, a share of time, and how much larger float32 is than 16 bits."""

MEASURED = {
    "7,268": ("serve-8b.json", lambda d: d["results"][0]["median"]["tokens_per_s"]),
    "252": ("registry.json", lambda d: d["servers"]["few slots"]["first_uses_per_s"]),
    "0.127": ("publish_to_follower.json", lambda d: d["published_summary"]["follower_s"]["max"]),
}


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_plan_prints_what_the_page_shows(command: str, printed: str) -> None:
    done = tandem("plan", *command.split())
    assert (done.returncode, done.stdout) == (0, printed)


def test_the_page_shows_plans_and_arithmetic() -> None:
    assert len(SHOWN) == PAGE.count("tandem plan --") == 4
    assert len(LINES) >= 12


def test_arithmetic_is_right_and_begins_with_figures_of_the_page() -> None:
    known = GIVEN | set(re.findall(r"[\d.,]*\d", "".join(printed for _, printed in SHOWN)))
    for name, expression, result in LINES:
        terms = re.findall(r"[\d.,]*\d|[*/+]", expression)
        value = number(terms[0])
        for operator, term in zip(terms[1::2], terms[2::2], strict=True):
            value = {"*": value * number(term), "/": value / number(term), "+": value + number(term)}[operator]
        assert value == pytest.approx(number(result), rel=5e-3), name
        assert {term for term in terms[::2] if term not in known} == set(), name
        known.add(result)
        known.add(f"{math.ceil(number(result)):,}")  # of devices there are whole ones


@pytest.mark.parametrize("text", MEASURED)
def test_measured_figures_are_those_of_the_results(text: str) -> None:
    file, found = MEASURED[text]
    data: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
    assert text in PAGE and f"results/{file}" in PAGE
    assert found(data) == pytest.approx(number(text), abs=0.51 if number(text) > 1 else 6e-4)
