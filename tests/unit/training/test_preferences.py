"""Preferences: the forms of a file's lines, the loss of Bradley and Terry, and what a course of it learns."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.engine.learning import BatchResult, Datum, LossConfig, StepDone
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.fit import Course, Evaluation, Step, fit
from mlx_tandem.training.preferences import BradleyTerry, Preference, encode, margins, parse
from mlx_tandem.training.sft import SftConfig, read
from tests.unit.training.test_sft_data import BARE, CODEC, TOKENIZER

USER, GOOD, BAD = (
    {"role": r, "content": t} for r, t in (("user", "Sort: 3 1"), ("assistant", "1 3"), ("assistant", "3"))
)
CHAT = "<|im_start|>user\nSort: 3 1<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"


class Scores:
    """A trainer whose score of a text is a weight for each token."""

    def __init__(self) -> None:
        self.weights: dict[int, float] = {}
        self.gradients: dict[int, float] = {}

    def forward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        assert loss.kind == "score" and all(len(d.weights) == 1 for d in data)
        scores = tuple((math.fsum(self.weights.get(t, 0.0) for t in d.tokens),) for d in data)
        return BatchResult("s", 0.0, len(data), scores, scores)

    def forward_backward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        for d in data:
            for token in d.tokens:  # the loss is -weight x score
                self.gradients[token] = self.gradients.get(token, 0.0) - d.weights[0]
        return self.forward(data, loss)

    def step(self, learning_rate: float, *, weight_decay: float, grad_norm: float) -> StepDone:
        for token, gradient in self.gradients.items():
            self.weights[token] = self.weights.get(token, 0.0) - learning_rate * gradient
        self.gradients = {}
        return StepDone("s", 1, 1.0, True)


def lines(tmp_path: Path, *values: dict[str, Any]) -> Any:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return read(path, parse)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "Sort: 3 1", "chosen": "1 3", "rejected": "3"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "source": "a column of its own"},
        {"messages": [USER], "chosen": "1 3", "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Sort: 3 1", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Sort: 3 1", "chosen": [GOOD], "rejected": [BAD]},
    ],
)
def test_every_form_is_a_question_with_two_answers(tmp_path: Path, value: dict[str, Any]) -> None:
    (pair,) = encode(lines(tmp_path, value), CODEC, max_length=99).data
    said = [TOKENIZER.decode(side, show_special=True) for side in (pair.chosen, pair.rejected)]
    assert said == [CHAT.format("1 3"), CHAT.format("3")]


def test_plain_texts(tmp_path: Path) -> None:
    """Without a chat form, or where it is not wanted, and texts that hold their prompts."""
    value = {"prompt": "Sort: 3 1", "chosen": " 1 3", "rejected": " 3"}
    whole = {"chosen": "Sort: 3 1 1 3", "rejected": "Sort: 3 1 3"}
    for found in (
        encode(lines(tmp_path, value), BARE, max_length=99),
        encode(lines(tmp_path, value), CODEC, max_length=99, raw=True),
        encode(lines(tmp_path, whole), CODEC, max_length=99),
    ):
        (pair,) = found.data
        assert TOKENIZER.decode(pair.chosen) == "Sort: 3 1 1 3" and pair.chosen[-1] in CODEC.ends


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ({"chosen": "a"}, "rejected", "rejected is missing"),
        ({"prompt": "a", "rejected": "b"}, "chosen", "chosen is missing"),
        ({"prompt": "a", "messages": [USER], "chosen": "b", "rejected": "c"}, "messages", "two names"),
        ({"prompt": "a", "chosen": 5, "rejected": "c"}, "chosen", "array"),
        ({"prompt": "a", "chosen": [USER], "rejected": "c"}, "chosen", "not the assistant's"),
        ({"prompt": "a", "chosen": [], "rejected": "c"}, "chosen", "no messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "margin", "number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e9}, "margin", "margin"),
    ],
)
def test_a_line_that_is_no_preference_is_refused_by_its_field(
    tmp_path: Path, value: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as e:
        lines(tmp_path, {"chosen": "a", "rejected": "b"}, value)
    assert e.value.param == param and says in e.value.message and "line 2" in e.value.message


def test_pairs_that_are_too_long_or_alike_are_left_out(tmp_path: Path) -> None:
    long = {"prompt": "1 " * 60, "chosen": "a", "rejected": "b"}
    same, good = ({"prompt": "a", "chosen": "b", "rejected": text} for text in ("b", "c"))
    found = encode(lines(tmp_path, long, same, good), CODEC, max_length=40)
    assert (len(found.data), found.left_out) == (1, 2)
    with pytest.raises(InvalidRequest):
        encode(lines(tmp_path, long, same), CODEC, max_length=40)


@given(st.lists(st.tuples(*[st.floats(-30, 30)] * 3), min_size=1, max_size=5), st.integers(1, 3))
def test_the_weights_of_scores_are_the_gradient_of_the_loss(pairs: list[tuple[float, ...]], size: int) -> None:
    """Against differences of the loss itself, however a step is cut into batches."""
    learner = Scores()
    data = []
    for i, (chosen, rejected, margin) in enumerate(pairs):
        learner.weights |= {2 * i: chosen, 2 * i + 1: rejected}
        data.append(Preference((2 * i,), (2 * i + 1,), margin / 10))
    group = [data[i : i + size] for i in range(0, len(data), size)]

    def loss() -> float:
        total = (-math.log(1 / (1 + math.exp(-m))) for m in margins(learner, data))
        return math.fsum(total) / len(data)

    assert BradleyTerry().learn(learner, group) == pytest.approx(loss(), rel=1e-6, abs=1e-9)
    for token, gradient in learner.gradients.items():
        kept, ends = learner.weights[token], []
        for step in (1e-4, -1e-4):
            learner.weights[token] = kept + step
            ends.append(loss())
        learner.weights[token] = kept
        assert gradient == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-3, abs=1e-6)


def test_a_course_learns_which_answers_are_chosen() -> None:
    train = [Preference((1, 5, i), (2, 5, i)) for i in range(10, 20)]
    held = [Preference((1, 6), (2, 6)), Preference((1, 7), (2, 7))]
    events = list(fit(Scores(), Course(SftConfig(epochs=2, learning_rate=0.5), train, held, BradleyTerry())))
    judged = [e for e in events if isinstance(e, Evaluation)]
    assert (judged[0].loss, judged[0].accuracy) == (pytest.approx(math.log(2)), 0.0)
    assert judged[-1].accuracy == 1.0 and judged[-1].loss < 0.5
    assert next(e.loss for e in events if isinstance(e, Step)) == pytest.approx(math.log(2))


def test_scores_that_are_not_finite_end_the_course() -> None:
    learner = Scores()
    learner.weights[1] = math.nan
    with pytest.raises(InvalidRequest, match="finite"):
        BradleyTerry().learn(learner, [[Preference((1,), (2,))]])
