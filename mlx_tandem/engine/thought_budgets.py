"""Budgets of thoughts: a thought that has used up its tokens is ended by tokens that are forced."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.engine.masks import MaskMaker, Place
from mlx_tandem.engine.plan import Mask, mask_words
from mlx_tandem.types import Request, ThoughtBudget

MOST_DRAFTS = 64
"""Most tokens at the end of an output that may differ from those of the mask before: drafts that were not accepted.
These tokens also suffice to find the marks of a thought, which are shorter.
"""


class _Thoughts:
    """The thoughts of one choice so far.

    `spent` counts the tokens inside of thoughts. `forced` is the number of tokens of the closing that have been drawn
    since the budget was spent.
    """

    __slots__ = ("_recent", "budget", "forced", "is_open", "length", "spent")

    def __init__(self, budget: ThoughtBudget):
        self.budget = budget
        self.is_open = budget.is_open
        self.length = self.spent = self.forced = 0
        self._recent: Sequence[int] = []

    @property
    def next_forced(self) -> int | None:
        """The token that has to follow; None if any may."""
        closing = self.budget.closing
        if self.forced:
            return closing[self.forced] if self.forced < len(closing) else None
        return closing[0] if self.is_open and self.spent >= self.budget.tokens else None

    def read(self, tokens: Sequence[int], begin: int) -> bool:
        """Read the new tokens of the output, which is `tokens[begin:]`.

        Return False and read nothing if the output does not begin with what was read before. This happens after drafts
        that were not accepted.
        """
        budget, known = self.budget, len(self._recent)
        output = list(tokens[begin + self.length - known :])  # what came before does not matter any more
        if output[:known] != self._recent:
            return False
        for end in range(known + 1, len(output) + 1):
            forced = self.next_forced
            if forced is not None and output[end - 1] == forced:
                self.forced += 1
            elif self.forced >= len(budget.closing):
                self.forced = 0
            if self.is_open:
                self.spent += 1
                self.is_open = not _ends_with(output, end, budget.close)
            else:
                self.is_open = _ends_with(output, end, budget.open)
        self.length += len(output) - known
        self._recent = output[-MOST_DRAFTS:]
        return True


class ThoughtBudgets:
    """A maker of masks for requests whose thoughts have a budget, and for those that another maker constrains.

    Its states belong to choices that have not ended.
    """

    def __init__(self, vocab_size: int, others: MaskMaker):
        """Make masks for so many tokens, and ask `others` where no token is forced."""
        self._others = others
        self._size = mask_words(vocab_size) * 4
        self._everything = b"\xff" * self._size
        self._choices: dict[tuple[int, int], _Thoughts] = {}

    def constrains(self, request: Request) -> bool:
        """Return whether the request has a budget or is constrained otherwise."""
        return request.params.thoughts is not None or self._others.constrains(request)

    def masks(self, places: Sequence[Place]) -> list[Mask | None]:
        """Return which tokens may follow at each place: a single one where a thought has to end."""
        forced = [self._of_thought(place) for place in places]
        made: list[Mask | None] = [self._everything if mask is None else mask for mask in forced]
        others = [at for at, mask in enumerate(forced) if mask is None and self._others.constrains(places[at].request)]
        if others:
            for at, mask in zip(others, self._others.masks([places[at] for at in others]), strict=True):
                made[at] = mask
        return made

    def is_slow(self, request: int, choice: int) -> bool:
        """Return whether the other maker's masks of a choice should be ready before its rows."""
        return self._others.is_slow(request, choice)

    def prepare(self, place: Place) -> None:
        """Let the other maker begin to make the mask of a place."""
        self._others.prepare(place)

    def is_ready(self, request: int, choice: int) -> bool:
        """Return whether the mask that the other maker has prepared is there."""
        return self._others.is_ready(request, choice)

    def _of_thought(self, place: Place) -> Mask | None:
        """Return the mask of the only token that may follow; None if the thoughts leave it open."""
        forced = self._forced(*place)
        if forced is None:
            return None
        mask = bytearray(self._size)
        mask[forced // 8] = 1 << forced % 8
        return bytes(mask)

    def _forced(self, request: Request, choice: int, tokens: Sequence[int]) -> int | None:
        """Return the token that has to follow; None if the thoughts leave it open."""
        budget = request.params.thoughts
        if budget is None:
            return None
        key, begin = (request.id, choice), len(request.prompt)
        thoughts = self._choices.get(key)
        if thoughts is None or not thoughts.read(tokens, begin):
            thoughts = self._choices[key] = _Thoughts(budget)
            thoughts.read(tokens, begin)
        return thoughts.next_forced

    def forget(self, request: int, choice: int) -> None:
        """Drop the state of a choice that has ended."""
        self._choices.pop((request, choice), None)
        self._others.forget(request, choice)


def _ends_with(tokens: Sequence[int], end: int, part: Sequence[int]) -> bool:
    """Return whether `tokens` up to `end` end with `part`."""
    return end >= len(part) and tuple(tokens[end - len(part) : end]) == tuple(part)
