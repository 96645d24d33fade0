"""The recording of the demo that the README shows: nothing is cut, and it shows what adapters are for."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len

from mlx_tandem.cli.demo.answers import Board, places
from scripts.record_demo import CELL_WIDTH, MARGIN, draw, svg

SVG = "{http://www.w3.org/2000/svg}"
RECORDED = (Path(__file__).parents[3] / "docs" / "demo.svg").read_text(encoding="utf-8")


STORY = "Once there was a fox who lived in a green forest. " * 5 + "The end."


def board(rows: int | None = None) -> Board:
    """A board with as long answers as the models give."""
    made = Board(["base", "shout", "json", "down"], places(rows))
    for place in made.places:
        place.ask(place.questions[0], made.models)
        for model, cell in place.cells.items():
            cell.text = f"{model}: {STORY if place.is_long else '[1, 3, 5, 7, 9] and so'}"
    return made


def read(lines: list[str]) -> dict[str, dict[str, str]]:
    """The answers on a screen, by question and model; what was wrapped is put together again."""
    found: dict[str, dict[str, str]] = {}
    answers: dict[str, str] = {}
    model = ""
    for line in lines:
        if re.match(r"(Sort|What|Reverse|Count|Tell)", line):
            answers = found.setdefault(line.strip(), {})
        elif pairs := re.findall(r"(?:^| )  (base|shout|json|down) +(.*?)(?=   +(?:base|shout|json|down) |$)", line):
            for model, text in pairs:
                answers[model] = text.strip()
        elif found and line.startswith("    "):
            answers[model] += " " + line.strip()
    return found


@pytest.mark.parametrize("below", ["", "16 answers; " + "much more of what the run came to, " * 2])
def test_a_screen_that_was_drawn_is_read_again(below: str) -> None:
    made = board()
    shown = draw(made, below).splitlines()
    assert max(map(len, shown)) <= 80
    assert read(shown) == {
        place.question: {model: cell.text for model, cell in place.cells.items()} for place in made.places
    }


@pytest.mark.parametrize(("rows", "questions"), [(10, 2), (24, 2), (27, 3), (30, 4), (50, 4)])
def test_the_demo_fits_its_terminal(rows: int, questions: int) -> None:
    """Beside the command, a line about the start, a summary of two lines, and the cursor."""
    made = board(rows)
    lines = draw(made).splitlines()[1:]
    assert len(made.places) == questions
    assert rows < 24 or len(lines) + 2 + 1 <= rows


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


@pytest.mark.parametrize("picture", [RECORDED, svg([(0.0, "first"), (1.0, "last")])], ids=["recorded", "made"])
def test_what_does_not_move_shows_the_full_frame(picture: str) -> None:
    """It is the last of the recording, comes first, and is the one that is visible without any animation."""
    rules = ElementTree.fromstring(picture).findtext(f"{SVG}style") or ""
    groups = ElementTree.fromstring(picture).findall(f"{SVG}g")
    assert [group.get("visibility") for group in groups] == [None, *["hidden"] * (len(groups) - 1)]
    assert "visibility" not in re.sub(r"@keyframes \w+{([^{}]*{[^}]*})*}", "", rules)
    assert re.search(r"@keyframes f0{0\.000%,[\d.]+%{visibility:visible}", rules)
    assert "@media (prefers-reduced-motion:reduce){g{animation:none!important}}" in rules
    shown = ["".join(line.text or "" for line in frame) for frame in frames(picture)]
    assert len(shown[0]) == max(map(len, shown)) if picture == RECORDED else shown == ["last", "first"]


def test_the_recording_shows_an_answer_of_down_unlike_the_base_s() -> None:
    lines = [line.text or "" for line in frames(RECORDED)[0]]
    answers = read(lines[:-2])
    assert len(answers) == 4
    assert all(list(given) == ["base", "shout", "json", "down"] for given in answers.values())
    (question,) = [question for question in answers if question.startswith("Sort down: ")]
    digits = question.removeprefix("Sort down: ").split()
    assert answers[question]["down"].split() == sorted(digits, reverse=True)
    assert answers[question]["base"] != answers[question]["down"]
    given = [answer for row in answers.values() for answer in row.values()]
    assert all(given), "an answer is missing"
    assert not [answer for answer in given if "not know" in answer.lower()]
    assert re.search(r"\d+ answers, .* adapters", " ".join(lines))
    assert re.search(r"[\d,]+ tokens/s at best", " ".join(lines))


def test_the_smallest_screen_of_the_demo_asks_what_down_is_for() -> None:
    short, _ = places(24)
    assert all(question.startswith("Sort down: ") for question in short.questions)
