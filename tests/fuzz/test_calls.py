"""Damaged texts of every family's calls: arguments of a complete call are JSON, and no word of the text is lost."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from mlx_tandem.generation.tools.table import PARSERS
from tests.unit.generation.reading_tools import Heard, heard, joined
from tests.unit.generation.tools.test_written_calls import TOOLS, prose
from tests.unit.generation.tools.writing import MARKUP, WRITERS, Call

TEXTS = 20_000
SPLIT = 8
"""Each so manieth text is read in pieces, too."""
WORD = re.compile(r"w[0-9]{4}w")
"""Words that stand for all that is no markup."""
MARKS = [mark for marks in MARKUP.values() for mark in marks]
PIECES = (*"{}[]()\"'`,:=\\\n <>/", "null", "True", "<think>", "</think>", "```", ', "x": ', "\\u00", "&lt;", "\ufffd")


def drawn(rng: Random) -> str:
    """A text of some words, with what is in code between them."""
    words = [f"w{rng.randrange(10_000):04}w" for _ in range(rng.randint(0, 4))]
    return rng.choice((" ", "\n", ', "', "'", " } ", "</parameter>", "\\n", " <b>")).join(words)


def call(rng: Random) -> Call:
    arguments = {
        "content": drawn(rng),
        "path": drawn(rng),
        "count": rng.randrange(100),
        "note": rng.choice(([drawn(rng)], {"a": drawn(rng)}, None, 1.5, drawn(rng))),
    }
    keys = rng.sample(sorted(arguments), rng.randint(0, 4))
    return rng.choice(("write", "write", "stop", "other")), {key: arguments[key] for key in keys}


def damaged(family: str, rng: Random) -> str:
    """A text with calls, from which pieces were taken, and into which others were put."""
    before = rng.choice(("", prose(family, drawn(rng))))
    text = before + WRITERS[family]([call(rng) for _ in range(rng.randint(1, 3))]) + rng.choice(("", drawn(rng)))
    for _ in range(rng.randint(0, 4)):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        end = min(end, at + rng.choice((1, 2, 8, 60)))
        piece = rng.choice((rng.choice(PIECES), rng.choice(MARKUP[family]), rng.choice(MARKS), text[at:end]))
        text = rng.choice(
            (text[:at] + text[end:], text[:at] + piece + text[at:], text[:at] + piece + text[end:], text[:end])
        )
    return text


def lost(text: str, found: Heard) -> set[str]:
    """The words of a text that are in nothing of what was said."""
    said = " ".join(part for event in found for part in event)
    return set(WORD.findall(text)) - set(WORD.findall(said))


@pytest.mark.promise("E11")
@pytest.mark.parametrize("family", PARSERS)
def test_damaged_calls(family: str) -> None:
    for seed in range(TEXTS // len(PARSERS) + 1):
        rng = Random(f"{family} {seed}")
        text = damaged(family, rng)
        parser = PARSERS[family](0, TOOLS)
        found = joined([*parser.push(text), *parser.flush()])
        for event in found:
            if event[0] == "call":
                assert isinstance(json.loads(event[2]), dict), (seed, text, event)
        assert not lost(text, found), (seed, text, found)
        assert parser.scan.scanned <= 30 * len(text) + 2000, (seed, text)
        if seed % SPLIT == 0:
            assert heard(PARSERS[family](0, TOOLS), text) == found, (seed, text)
