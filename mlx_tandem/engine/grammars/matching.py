"""The place of a choice in its grammar, and the masks that are made there, on whatever thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from mlx_tandem.engine.grammars.compiling import STATES, compiled, has_broken_lexer, reason
from mlx_tandem.engine.grammars.shared import SharedGrammar, Store
from mlx_tandem.errors import InvalidRequest

MOST_DRAFTS = 64
"""Most tokens at the end of a text that may differ from those of the mask before: drafts that were not accepted."""

RENEWING_TOKENS = 32
"""Fewest tokens between two lexers that a choice exhausts by itself. If it needs another one earlier, it fails."""

MASKS_SECONDS = 20.0
"""Most seconds that the masks of one choice may take in all, beside those made within steps."""

WAITING_SECONDS = 10.0
"""Most seconds that a choice waits for one mask."""

Clock = Callable[[], float]


class Matching:
    """The place of one choice: a matcher and the output tokens that it has consumed.

    Attributes:
        grammar: The grammar of the matcher.
        job: The mask that is being made ahead of a step or was late, or was made so.
        exhausted: How many lexers it has exhausted, not counting those that others had exhausted before.
        since: How many tokens it had when it got its present lexer.
        is_alone: Whether nobody else uses that lexer.
        spent: Seconds that its masks have taken in the lanes.
    """

    __slots__ = ("consumed", "exhausted", "grammar", "is_alone", "job", "matcher", "since", "spent")

    def __init__(self, grammar: SharedGrammar):
        """Begin a text."""
        self.grammar = grammar
        self.matcher: LLMatcher = grammar.root.deep_copy()
        self.consumed: list[int] = []
        self.job: Job | None = None
        self.exhausted = self.since = 0
        self.is_alone = False
        self.spent = 0.0

    def change(self, tokens: Sequence[int], begin: int) -> tuple[int, list[int]]:
        """Return how many tokens to take back and which to consume to be behind the output, `tokens` from `begin` on.

        No thread may be at work on it.
        """
        consumed = self.consumed
        same = min(len(consumed), len(tokens) - begin)
        first = max(same - MOST_DRAFTS, 0)
        if consumed[first:same] != list(tokens[begin + first : begin + same]):
            same = next(i for i in range(first, same) if consumed[i] != tokens[begin + i])
        return len(consumed) - same, list(tokens[begin + same :])


class Job:
    """One mask to make: after `back` tokens have been taken back and `new` ones consumed.

    Attributes:
        why: Why the mask is empty, if it is.
        is_open: Whether a thread runs it or will run it. Nobody else touches its place meanwhile.
        is_done: Whether the mask is there.
        renews: Whether the lexer has failed, so that the choice has to get another one first.
        asked: When it was asked for, in seconds of the clock.
    """

    __slots__ = ("address", "asked", "back", "is_done", "is_open", "mask", "new", "place", "renews", "why")

    def __init__(self, place: Matching, change: tuple[int, list[int]], mask: Any, address: int, asked: float):
        """Make the mask of a place in the array `mask`, [words] int32, which lies at this address."""
        self.place = place
        self.back, self.new = change
        self.mask = mask
        self.address = address
        self.asked = asked
        self.why = ""
        self.is_done = not (place.consumed or self.new)  # all texts begin with one mask
        self.is_open, self.renews = not self.is_done, False
        if self.is_done:
            self.mask = place.grammar.first

    def run(self) -> None:
        """Make the mask within a step. If that fails because of the lexer, it is not done, and `renews` is set."""
        place = self.place
        grammar = place.grammar
        with grammar.lock:
            begun = time.perf_counter()
            self.advance(place.matcher.consume_tokens)
            self.make()
            grammar.note(time.perf_counter() - begun)
        self.is_done = not self.renews
        self.is_open = False

    def advance(self, consume: Callable[[list[int]], object]) -> None:
        """Bring the matcher behind the output."""
        place = self.place
        if self.back:
            place.matcher.rollback(self.back)
            del place.consumed[len(place.consumed) - self.back :]
        if self.new:
            consume(self.new)
            place.consumed += self.new
        self.back, self.new = 0, []

    def make(self) -> None:
        """Make the mask there."""
        matcher = self.place.matcher
        matcher.unsafe_compute_mask_ptr(self.address, self.mask.nbytes)
        if matcher.is_error():
            grammar = self.place.grammar
            if has_broken_lexer(matcher) or grammar.has_broken_lexer():
                self.place.exhausted += not grammar.is_exhausted
                grammar.is_exhausted = self.renews = True
            else:
                self.fail(reason(matcher.get_error()))

    def fail(self, why: str) -> None:
        """Make the mask empty."""
        self.mask[:] = 0
        self.why = why


class Lane:
    """The state of a thread that runs jobs ahead of steps. It never waits for llguidance with Python's global lock."""

    def __init__(self, tokenizer: LLTokenizer, store: Store, clock: Clock):
        """Prepare the thread."""
        self._tokenizer = tokenizer
        self._store = store
        self._clock = clock
        self._executor = LLExecutor(1)
        self._failed = LLMatcher(tokenizer, "start: (", log_level=0)

    def run(self, job: Job) -> None:
        """Run a job to its end, with another lexer if the present one has failed."""
        begun = self._clock()
        try:
            with job.place.grammar.lock:
                if not job.renews:
                    job.advance(lambda tokens: self._consume(job.place.matcher, tokens))
                    job.make()
            if job.renews:
                self._renew(job)
        except InvalidRequest as e:
            job.fail(e.message)
        seconds = self._clock() - begun
        job.place.grammar.note(seconds)
        job.place.spent += seconds
        if job.place.spent > MASKS_SECONDS:
            job.fail("its masks take too long")
        job.is_done = True
        job.is_open = False

    def _consume(self, matcher: LLMatcher, tokens: Sequence[int]) -> None:
        """Consume tokens. llguidance releases Python's global lock only where several matchers consume together."""
        for token in tokens:
            if not self._executor.consume_token_par([(matcher, token), (self._failed, 0)])[0]:
                return

    def _renew(self, job: Job) -> None:
        """Go on with another lexer, which others share; who has exhausted two of them gets one of its own."""
        place = job.place
        tokens = [*place.consumed[: len(place.consumed) - job.back], *job.new]
        is_largest = place.is_alone and place.grammar.level == len(STATES) - 1
        if is_largest and len(tokens) - place.since < RENEWING_TOKENS:
            known = has_broken_lexer(place.matcher)
            raise InvalidRequest(reason(place.matcher.get_error()) if known else "its lexer needs too many states")
        alone = place.exhausted > 1
        place.grammar = self._store.renew(
            place.grammar, lambda text, states: compiled(self._tokenizer, text, states), alone=alone
        )
        place.is_alone, place.since = alone, len(tokens)
        with place.grammar.lock:
            place.matcher, place.consumed = place.grammar.root.deep_copy(), []
            job.back, job.new, job.renews = 0, tokens, False
            job.advance(lambda tokens: self._consume(place.matcher, tokens))
            job.make()
        if job.renews:
            self._renew(job)
