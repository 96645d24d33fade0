"""From feedback to the data of an update: likelihood for what should be said, DPO for pairs, KTO for single answers.

p and r are the sums of an answer's logprobs by the trainer and by the reference, and β is a setting:

    likelihood   -p / tokens                             of corrections, preferred answers and earlier good answers
    DPO          -log σ(β (p₁ - r₁) - β (p₀ - r₀))       of a better answer 1 and a worse one 0 (Rafailov et al. 2023)
    KTO          w (1 - σ(±(β (p - r) - β z)))           of a good answer (+) or a bad one (-) (Ethayarajh et al. 2024)

A correction is preferred to what it corrects, and a preferred choice to each of the others; the likelihood of the
better one keeps DPO from making both less likely (Pang et al. 2024). z, which has no gradient, is the mean of p - r
over answers to other prompts of the update, at least 0. w is twice the distance of the score from 0.5. Where an update
has more good answers than bad ones, the bad ones count for more, at most BALANCE times as much, and the reverse.

Each loss depends on the trainer through p alone. So its derivative with respect to p, used as the weight of each token
of the answer in a cross entropy, gives exactly its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlx_tandem.engine.learning import Datum
from mlx_tandem.training.feedback.opinions import ALL, Feedback, Stored, without
from mlx_tandem.training.store.records import Taught

BALANCE = 4.0
"""The most that the rarer of good and bad answers counts for."""


class Pair(NamedTuple):
    """A better and a worse answer by their places among the sequences, and the weight of the pair."""

    better: int
    worse: int
    weight: float


class Judged(NamedTuple):
    """An answer by its place among the sequences, and how good it is, from -1 to 1."""

    place: int
    worth: float


@dataclass(frozen=True)
class FeedbackLesson:
    """What one update learns: for each prompt with an answer, whether it is only shown, in a pair, or judged alone.

    The first `held` of the sequences are in pairs or judged, and the others are only shown.
    """

    sequences: Sequence[Datum]
    held: int
    shown: Sequence[int]
    pairs: Sequence[Pair]
    judged: Sequence[Judged]
    strangers: Sequence[Datum]  # the judged answers, each behind another's prompt, for z
    beta: float
    feedback: int
    replayed: int

    @property
    def compared(self) -> Sequence[Datum]:
        """The sequences whose logprobs decide on the weights; none where all answers are only shown."""
        return [*self.sequences[: self.held], *self.strangers]

    def weighed(
        self, policy: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
    ) -> tuple[Sequence[Datum], Taught]:
        """Return the data of the update with their weights, and what it learns."""
        moved = [math.fsum(own) - math.fsum(theirs) for own, theirs in zip(policy, reference, strict=True)]
        weights = [0.0] * len(self.sequences)
        losses: list[float] = []
        for place in self.shown:
            weights[place] += 1.0 / self.sequences[place].completion_length
        for pair in self.pairs:
            margin = self.beta * (moved[pair.better] - moved[pair.worse])
            pull = self.beta * pair.weight * _sigmoid(-margin)
            weights[pair.better] += pull
            weights[pair.worse] -= pull
            losses.append(-pair.weight * math.log(max(_sigmoid(margin), 1e-300)))
        strangers = moved[self.held :]
        z = max(math.fsum(strangers) / len(strangers), 0.0) if strangers else 0.0
        counts = self._counts()
        for each in self.judged:
            good = each.worth > 0.0
            value = _sigmoid(self.beta * (moved[each.place] - z) * (1.0 if good else -1.0))
            weight = counts[good] * abs(each.worth)
            pull = self.beta * weight * value * (1.0 - value)
            weights[each.place] += pull if good else -pull
            losses.append(weight * (1.0 - value))
        loss = math.fsum(losses) / len(losses) if losses else None
        return self._data(weights), Taught(self.feedback, self.replayed, loss)

    def _counts(self) -> tuple[float, float]:
        """Return what a bad answer and a good one count for."""
        good = sum(each.worth > 0.0 for each in self.judged)
        bad = len(self.judged) - good
        if not good or not bad:
            return 1.0, 1.0
        return min(max(good / bad, 1.0), BALANCE), min(max(bad / good, 1.0), BALANCE)

    def _data(self, weights: Sequence[float]) -> list[Datum]:
        share = 1.0 / max(self.feedback + self.replayed, 1)
        return [
            Datum(d.tokens, d.prompt_length, (weight * share,) * d.completion_length)
            for d, weight in zip(self.sequences, weights, strict=True)
            if weight
        ]


def lesson(feedback: Sequence[Stored], replayed: Sequence[Stored], beta: float) -> FeedbackLesson:
    """Return what an update learns from feedback, and from earlier good answers beside it."""
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def place(prompt: tuple[int, ...], answer: tuple[int, ...]) -> int:
        return places.setdefault((prompt, answer), len(places))

    pairs: list[Pair] = []
    judged: list[Judged] = []
    for f in (stored.feedback for stored in feedback):
        better, others = _preferred(f)
        pairs += [Pair(place(f.prompt, better), place(f.prompt, other), 1.0 / len(others)) for other in others]
        if not better and f.score is not None and f.score != 0.5 and f.answers and f.answers[0]:
            judged.append(Judged(place(f.prompt, f.answers[0]), 2.0 * f.score - 1.0))
    held = len(places)
    shown = [place(f.prompt, better) for f in (s.feedback for s in feedback) if (better := _preferred(f)[0])]
    shown += [place(f.prompt, f.good) for f in (stored.feedback for stored in replayed)]
    sequences = [_datum(*key) for key in places]
    strangers = _strangers(sequences, judged)
    return FeedbackLesson(sequences, held, shown, pairs, judged, strangers, beta, len(feedback), len(replayed))


def teaches(feedback: Feedback) -> bool:
    """Return whether anything can be learned from a feedback: a comment alone teaches nothing."""
    better, _ = _preferred(feedback)
    return bool(better) or (feedback.score is not None and feedback.score != 0.5 and bool(feedback.answers[0]))


def _preferred(f: Feedback) -> tuple[tuple[int, ...], Sequence[tuple[int, ...]]]:
    """Return the answer that a feedback prefers, and those that it prefers it to; () where it prefers none."""
    if f.corrected:
        return f.corrected, [answer for answer in f.answers if answer and answer != f.corrected]
    if f.preferred != ALL:
        return f.answers[f.preferred], [answer for answer in without(f.answers, f.preferred) if answer]
    return (), ()


def _strangers(sequences: Sequence[Datum], judged: Sequence[Judged]) -> list[Datum]:
    """Return each judged answer with the prompt of the next one."""
    found = []
    for one, other in zip(judged, [*judged[1:], *judged[:1]], strict=True):
        a, b = sequences[one.place], sequences[other.place]
        prompt, answer = b.tokens[: b.prompt_length], a.tokens[a.prompt_length :]
        if prompt != a.tokens[: a.prompt_length]:
            found.append(_datum(prompt, answer))
    return found


def _datum(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Datum:
    return Datum(prompt + answer, len(prompt), (1.0,) * len(answer))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else math.exp(x) / (1.0 + math.exp(x))
