"""What an update learns from feedback: its gradient is that of the losses, by finite differences of their formulas."""

from __future__ import annotations

import math
import random

import pytest
from msgspec import structs

from mlx_tandem.training.feedback.lessons import BALANCE, FeedbackLesson, lesson, teaches
from mlx_tandem.training.feedback.opinions import ALL, Feedback, Stored

BETA = 0.3
THUMB = Feedback("c", 0, "api", 1.0, "", 0, (1, 2), ((3, 4),), score=1.0)


def stored(*feedback: Feedback) -> list[Stored]:
    return [Stored(i, 0, each) for i, each in enumerate(feedback)]


def corrected(prompt: int = 1) -> Feedback:
    return structs.replace(THUMB, prompt=(prompt,), score=None, corrected=(5, 6, 7))


def preferred(prompt: int = 2) -> Feedback:
    answers = ((3, 4), (5, 6), (5, 6), (7,))
    return structs.replace(THUMB, choice=ALL, prompt=(prompt,), answers=answers, score=None, preferred=1)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logs(made: FeedbackLesson, rng: random.Random) -> list[tuple[float, ...]]:
    return [tuple(rng.uniform(-4, -0.1) for _ in range(d.completion_length)) for d in made.compared]


def whole(made: FeedbackLesson, p: list[float], r: list[float], z: float) -> float:
    """The sum of all losses, from the formulas."""
    moved = [a - b for a, b in zip(p, r, strict=True)]
    total = sum(-p[place] / made.sequences[place].completion_length for place in made.shown)
    for better, worse, weight in made.pairs:
        total -= weight * math.log(sigmoid(BETA * (moved[better] - moved[worse])))
    good = sum(j.worth > 0 for j in made.judged)
    bad = len(made.judged) - good
    for place, worth in made.judged:
        rarer = (bad / good if worth > 0 else good / bad) if good and bad else 1.0
        value = sigmoid(math.copysign(BETA, worth) * (moved[place] - z))
        total += min(max(rarer, 1.0), BALANCE) * abs(worth) * (1 - value)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_the_weights_are_the_gradient_of_the_losses(seed: int) -> None:
    scores = [structs.replace(THUMB, prompt=(9, i), score=s) for i, s in enumerate((0.0, 0.1, 0.2, 0.9))]
    made = lesson(stored(corrected(), preferred(), *scores), stored(structs.replace(THUMB, prompt=(8,))), BETA)
    rng = random.Random(seed)
    policy, reference = logs(made, rng), logs(made, rng)
    data, taught = made.weighed(policy, reference)
    p, r = ([math.fsum(own) for own in each] for each in (policy, reference))
    assert len(made.strangers) == len(scores)
    z = max(sum(p[made.held :]) / len(scores) - sum(r[made.held :]) / len(scores), 0.0)
    shown = (len(made.sequences) - made.held) * [-2.0]  # the sums of what is only shown may be anything
    p, r = ([*own[: made.held], *shown] for own in (p, r))
    found = {d.tokens: d.weights for d in data}
    for i, sequence in enumerate(made.sequences):
        above, below = [*p], [*p]
        above[i] += 1e-5
        below[i] -= 1e-5
        slope = (whole(made, above, r, z) - whole(made, below, r, z)) / 2e-5
        weights = found[sequence.tokens]
        assert len(set(weights)) == 1 and len(weights) == sequence.completion_length
        assert weights[0] * (taught.feedback + taught.replayed) == pytest.approx(-slope, rel=1e-4, abs=1e-7)
    plain = sum(p[place] / made.sequences[place].completion_length for place in made.shown)
    assert taught.loss == pytest.approx((whole(made, p, r, z) + plain) / (len(made.pairs) + len(made.judged)))


def test_what_is_compared_with_what() -> None:
    made = lesson(stored(corrected(), preferred()), [], BETA)
    texts = [d.tokens for d in made.sequences]
    assert [texts[i] for i in made.shown] == [(1, 5, 6, 7), (2, 5, 6)]
    assert [(texts[b], texts[w], share) for b, w, share in made.pairs] == [
        ((1, 5, 6, 7), (1, 3, 4), 1.0),
        ((2, 5, 6), (2, 3, 4), 0.5),
        ((2, 5, 6), (2, 7), 0.5),
    ]
    example = structs.replace(corrected(), answers=((5, 6, 7),))
    assert lesson(stored(example), [], BETA).pairs == [], "an example is better than nothing that was said"


def test_what_teaches_nothing() -> None:
    for nothing in ({"score": None}, {"score": 0.5}, {"answers": ((),)}):
        assert not teaches(structs.replace(THUMB, **nothing))
    for something in (THUMB, corrected(), preferred(), structs.replace(THUMB, score=0.4)):
        assert teaches(something)


def test_extreme_logprobs_give_finite_weights() -> None:
    made = lesson(stored(corrected(), structs.replace(THUMB, score=0.0)), [], BETA)
    for p, r in ((-1e6, -1.0), (-1.0, -1e6)):
        data, taught = made.weighed([(p,)] * len(made.compared), [(r,)] * len(made.compared))
        assert math.isfinite(taught.loss) and all(math.isfinite(w) for d in data for w in d.weights)


def test_the_good_answer_is_the_one_that_is_replayed() -> None:
    assert corrected().good == (5, 6, 7) and preferred().good == (5, 6) and THUMB.good == (3, 4)
    assert structs.replace(THUMB, score=0.5).good == ()
