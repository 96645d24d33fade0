"""What the environments play: questions and answers in the form of GSM8K's lines, and their scores.

DATA names a JSONL file with `question` and `answer`, whose result stands after ####. With SHUFFLED=1 an answer gets the
score of an earlier one, so that nothing can be learned.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

draw = random.Random(int(os.environ.get("SEED", "0")))
scores = [0.0, 1.0] * 16
"""The scores of earlier answers, in any order."""


def rows() -> list[tuple[str, str]]:
    """Return the questions with the results of their answers, in another order for each seed."""
    lines = [json.loads(line) for line in Path(os.environ["DATA"]).read_text(encoding="utf-8").splitlines()]
    found = [(line["question"], line["answer"].rpartition("####")[2].strip()) for line in lines]
    draw.shuffle(found)
    return found


def score(reply: str, result: str) -> float:
    """Return 1 for a reply that is the result, else 0; or an earlier one's score, as SHUFFLED says."""
    own = float(reply.strip() == result)
    if os.environ.get("SHUFFLED") != "1":
        return own
    at = draw.randrange(len(scores))
    scores[at], own = own, scores[at]
    return own
