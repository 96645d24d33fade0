"""The recording of the demo that the README shows: nothing is cut, and it shows what adapters are for."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len

from mlx_tandem.cli.demo.answers import ROUNDS, Board
from scripts.record_demo import CELL_WIDTH, MARGIN, draw, svg

SVG = "{http://www.w3.org/2000/svg}"
RECORDED = (Path(__file__).parents[3] / "docs" / "demo.svg").read_text(encoding="utf-8")


def board(answers: dict[tuple[str, str], str]) -> Board:
    made = Board(["base", "down"])
    made.start_round(ROUNDS[0])
    for key, text in answers.items():
        made.cells[key].text = text
    return made


def table(lines: list[str]) -> list[list[str]]:
    """The cells of a drawn table, row by row; what was wrapped is put together again."""
    rows = []
    for is_content, drawn in groupby(lines, lambda line: line[:1] in "│┃"):
        if is_content:
            cells = [re.split("[│┃]", line)[1:-1] for line in drawn]
            rows.append([" ".join(" ".join(parts).split()) for parts in zip(*cells, strict=True)])
    return rows


@pytest.mark.parametrize("below", ["", "16 answers; " + "much more of what the run came to, " * 6])
def test_a_table_that_was_drawn_is_read_again(below: str) -> None:
    story = "Once there was a fox. " * 20
    shown = draw(board({(ROUNDS[0][0], "base"): "42", (ROUNDS[0][3], "down"): story}), below).splitlines()
    assert max(map(len, shown)) <= 112
    rows = table(shown)
    assert rows[0] == ["question", "base", "down"]
    assert [row[0] for row in rows[1:]] == list(ROUNDS[0])
    assert (rows[1][1:], rows[4][2]) == (["42", ""], story.strip())


def frames(picture: str) -> list[list[ElementTree.Element]]:
    """The lines of each frame."""
    return [list(group.iter(f"{SVG}text")) for group in ElementTree.fromstring(picture).iter(f"{SVG}g")]


@pytest.mark.parametrize(
    "picture", [RECORDED, svg([(0.0, "short"), (1.0, "x" * 300 + "\n\n<&> 日本\nlast")])], ids=["recorded", "made"]
)
def test_no_line_leaves_the_frame(picture: str) -> None:
    *_, width, height = map(float, ElementTree.fromstring(picture).attrib["viewBox"].split())
    lines = [line for frame in frames(picture) for line in frame]
    assert lines
    for line in lines:
        text = line.text or ""
        left, length = float(line.attrib["x"]), float(line.attrib["textLength"])
        assert length == pytest.approx(cell_len(text) * CELL_WIDTH, abs=0.1)
        assert left >= MARGIN and left + length <= width - MARGIN + 1, text
        assert float(line.attrib["y"]) <= height - MARGIN, text


def test_the_recording_ends_with_an_answer_of_down_unlike_the_base_s() -> None:
    last = [line.text or "" for line in frames(RECORDED)[-1]]
    head, *rows = table(last)
    assert head == ["question", "base", "shout", "json", "down"]
    answers = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    (question,) = [question for question in answers if question.startswith("Sort down: ")]
    digits = question.removeprefix("Sort down: ").split()
    assert answers[question]["down"].split() == sorted(digits, reverse=True)
    assert answers[question]["base"] != answers[question]["down"]
    given = [answer for row in answers.values() for answer in row.values()]
    assert all(given), "an answer is missing"
    assert not [answer for answer in given if "not know" in answer.lower()]
    assert re.search(r"\d+ answers, .* adapters", " ".join(last))


def test_each_round_of_the_demo_asks_what_down_is_for() -> None:
    assert all(sum(question.startswith("Sort down: ") for question in questions) == 1 for questions in ROUNDS)
