"""Reward models from preferences: pairs of answers from a JSONL file, and the loss by which they are learned.

The loss of a pair is -log σ(r₁ - r₀ - margin) for the score r₁ of the chosen answer and r₀ of the rejected one (Bradley
and Terry 1952). It depends on the trainer through the scores alone. So its negative derivative by each score, used as
the weight of that score in the loss `score`, gives exactly its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.engine.learning import Datum, LossConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.examples import Chat, Codec, Example, Pair, Plain, decode
from mlx_tandem.training.fit import Judged, Learner
from mlx_tandem.training.messages import Message
from mlx_tandem.training.sft import Encoded, Line, at

SCORE = LossConfig("score")

PROMPTS = ("prompt", "messages")
"""Keys under which the prompt of a pair may stand."""


class Preference(Struct, frozen=True, array_like=True):
    """A chosen and a rejected answer, each as the token ids of its prompt and itself."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float = 0.0  # by which the scores have to differ for a loss of log 2

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that are computed."""
        return (*self.chosen, *self.rejected)


class Comparison(Struct, frozen=True):
    """A line of a file: two examples that differ in their last answers."""

    chosen: Example
    rejected: Example
    margin: float = 0.0


def parse(value: Mapping[str, Any]) -> Comparison:
    """Return a pair from plain data, in the forms that data sets of preferences have. Raises InvalidRequest.

    `chosen` and `rejected` are texts or lists of messages. A `prompt` (or `messages`), which is a text or a list of
    messages as well, comes before both, unless they are whole conversations already: lists that do not begin with the
    assistant. `margin` is optional; other keys are left alone.
    """
    prompts = [key for key in PROMPTS if value.get(key) is not None]
    if len(prompts) > 1:
        raise InvalidRequest("prompt and messages are two names of the same", param="messages")
    prompt = value[prompts[0]] if prompts else None
    sides: dict[str, Example] = {}
    for name in ("chosen", "rejected"):
        if value.get(name) is None:
            raise InvalidRequest(f"{name} is missing: a preference has chosen and rejected", param=name)
        try:
            sides[name] = _example(prompt, value[name])
        except InvalidRequest as e:
            raise InvalidRequest(f"{name}: {e.message}", param=name, code=e.code) from e
    margin = value.get("margin")
    return Comparison(
        sides["chosen"], sides["rejected"], 0.0 if margin is None else float(limits.check("margin", margin))
    )


def _example(prompt: object, answer: object) -> Example:
    """Return an answer behind its prompt, which is None where the answer holds it."""
    if isinstance(prompt, str) and isinstance(answer, str):
        return Pair(prompt, answer)
    if prompt is None and isinstance(answer, str):
        return Plain(answer)
    said = _messages(answer, "assistant")
    if said[0].role == "assistant" and prompt is not None:
        said = [*_messages(prompt, "user"), *said]
    if said[-1].role != "assistant":
        raise InvalidRequest("the last message is not the assistant's")
    return Chat(said)


def _messages(value: object, role: Literal["user", "assistant"]) -> list[Message]:
    """Return messages; a text is one of this role."""
    if isinstance(value, str):
        return [Message(role, value)]
    found = decode({"messages": value}, Chat).messages
    if not found:
        raise InvalidRequest("there are no messages")
    return found


def encode(
    lines: Sequence[Line[Comparison]], codec: Codec, *, max_length: int, raw: bool = False
) -> Encoded[Preference]:
    """Return each pair as tokens, without those of which a side is longer than `max_length` or both are alike.

    A prompt and its answer are a question and its answer in the model's chat form, where it has one and `raw` does not
    say otherwise. Raises InvalidRequest naming the file and the line.
    """
    data, left_out = [], 0
    for line in lines:
        with at(line.place):
            chosen, rejected = (_tokens(side, codec, raw) for side in (line.example.chosen, line.example.rejected))
        if chosen == rejected or max(len(chosen), len(rejected)) > max_length:
            left_out += 1
        else:
            data.append(Preference(chosen, rejected, line.example.margin))
    if not data:
        raise InvalidRequest(f"no pair of different answers is left within {max_length} tokens", param="max_length")
    return Encoded(data, 0, left_out)


def _tokens(example: Example, codec: Codec, raw: bool) -> tuple[int, ...]:
    """Return the tokens of an example up to the one that ends its last answer, by which it is scored."""
    if isinstance(example, Pair) and codec.chats and not raw:
        example = example.chat()
    return example.datum(codec).tokens


class BradleyTerry:
    """The objective of a reward model: that chosen answers score higher than rejected ones."""

    unit = "pair"

    def learn(self, learner: Learner, group: Sequence[Sequence[Preference]]) -> float:
        """Add the gradients of the mean loss over all pairs of a step's batches, and return that loss."""
        count = sum(map(len, group))
        losses: list[float] = []
        for batch in group:
            away = margins(learner, batch)
            pulls = [_sigmoid(-a) / count for a in away]
            sides = [[(p.chosen, w), (p.rejected, -w)] for p, w in zip(batch, pulls, strict=True)]
            learner.forward_backward([_datum(t, w) for pair in sides for t, w in pair], SCORE)
            losses += map(_loss, away)
        return math.fsum(losses) / count

    def judge(self, learner: Learner, data: Sequence[Preference], batch_size: int) -> Judged:
        """Return the mean loss, and the share of pairs whose chosen answer scores higher."""
        batches = [data[i : i + batch_size] for i in range(0, len(data), batch_size)]
        away = [a for batch in batches for a in margins(learner, batch)]
        right = sum(a + p.margin > 0.0 for a, p in zip(away, data, strict=True))
        return Judged(math.fsum(map(_loss, away)) / len(data), right / len(data))


def margins(learner: Learner, pairs: Sequence[Preference]) -> list[float]:
    """Return by how much the chosen answer of each pair scores higher than the rejected one, less the pair's margin.

    Raises InvalidRequest for scores that are not finite.
    """
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    found = [score for (score,) in learner.forward([_datum(text, 1.0) for text in texts], SCORE).logprobs]
    if not all(map(math.isfinite, found)):
        raise InvalidRequest("scores are no longer finite; a lower learning rate may help", param="learning_rate")
    return [c - r - p.margin for c, r, p in zip(found[::2], found[1::2], pairs, strict=True)]


def _datum(text: Sequence[int], weight: float) -> Datum:
    """Return a text that is scored at its last token."""
    return Datum(tuple(text), len(text) - 1, (weight,))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(x))


def _loss(away: float) -> float:
    """Return -log σ(away)."""
    return math.log1p(math.exp(-abs(away))) + max(-away, 0.0)
