"""Drafts from a smaller model, which runs beside the served one on a runner and in a pool of its own.

All sequences of a plan draft together. Where the runner can draw several tokens a row in one step, one step reads their
newest tokens and draws all of their drafts, and only the keys and values of the tokens that were read stay. Elsewhere
each draft after the first takes one more step for all of them. A draft is drawn as its sequence will draw, with the
noise of its position, so that it is accepted where the two models agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

from msgspec import structs

from mlx_tandem.engine import sequence
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.plan import CARRY, LONGEST_READ, Row, RowKind, Runner, Seating, StepPlan
from mlx_tandem.engine.proposers import Asked
from mlx_tandem.kv.groups import CacheGroup

READ_AT_ONCE = 256
"""Most tokens of one sequence that the draft model reads before a plan. Until it has read the others, there are no
drafts."""

Key = tuple[int, int]
"""A request's id and the number of a choice."""

_Launched = tuple[list[int], Any]
"""The indices, in the round, of the readers that have a row in a step, and the step's handle."""


@dataclass(slots=True)
class _Reader:
    """One sequence as the draft model has read it. `s` has its blocks, its seat, and how many positions are right."""

    s: sequence.Sequence
    known: int = 0  # number of its tokens when it was read last
    computed: tuple[int, ...] = ()  # drafts behind these tokens whose keys and values are in the pool, too
    is_foreign: bool = False  # whether a token of it is not in the draft model's vocabulary


@dataclass(slots=True)
class _Round:
    """The rows of one round of drafting."""

    readers: list[_Reader] = field(default_factory=list)
    most: list[int] = field(default_factory=list)  # drafts of each
    rows: list[Row] = field(default_factory=list)  # one for each reader, with the tokens that are read of it
    seatings: list[Seating] = field(default_factory=list)


class DraftModel:
    """The draft model's side of all sequences that draft.

    Attributes:
        first_use: Whether a step of the last round was the first of its kind, or ran without having been traced.

    Args:
        runner: The runner of the draft model.
        groups: Its cache groups.
        seats: Sequences that it can read at once.
        vocab_size: Its own.
        longest: The most tokens of a sequence that it can read.
    """

    def __init__(self, runner: Runner, groups: Iterable[CacheGroup], *, seats: int, vocab_size: int, longest: int):
        self._runner = runner
        self._blocks = BlockManager(groups)
        self._vocab_size = vocab_size
        self._longest = min(longest, self._blocks.longest)
        self._readers: dict[Key, _Reader] = {}  # those that were asked about longest ago first
        self._seats = list(range(seats - 1, -1, -1))
        self._next_id = 0
        self._at_once = False  # whether one step draws all drafts of this round
        self.first_use = False

    def draft(self, asked: Sequence[Asked]) -> dict[Key, tuple[int, ...]]:
        """Return drafts for the sequences that are asked about, as far as there are any.

        Sequences with tokens on the device, and those whose prompts are not read yet, are only read.
        """
        keys = {(a.request.id, a.choice) for a in asked}
        longest = max((len(a.tokens) for a in asked), default=0)
        self._at_once = 2 * len(asked) * longest <= self._runner.drafting_positions
        round_ = _Round()
        for a in asked:
            self._add(a, round_, keys)
        drawn = self._run(round_)
        found = {}
        for reader, most, drafts in zip(round_.readers, round_.most, drawn, strict=True):
            s = reader.s
            own = tuple(takewhile(lambda token: token >= 0, drafts[:most]))
            reader.known = s.scheduled
            reader.computed = () if self._at_once else own[:-1]
            if most:
                found[s.request.id, s.choice] = own
        return found

    def forget(self, key: Key) -> None:
        """Drop a sequence and give back what it has."""
        reader = self._readers.pop(key, None)
        if reader is not None and reader.s.seat >= 0:
            self._seats.append(reader.s.seat)
            self._blocks.leave(reader.s)

    def _add(self, asked: Asked, round_: _Round, keys: set[Key]) -> None:
        """Add the row of a sequence to the first step of a round, if there is something to read and room for it."""
        key, tokens = (asked.request.id, asked.choice), asked.tokens
        reader = self._readers.pop(key, None) or self._open(asked)
        self._readers[key] = reader
        s = reader.s
        first = _agreed(reader, tokens)
        chunk = tuple(tokens[first : first + READ_AT_ONCE])
        reader.is_foreign = reader.is_foreign or max(chunk, default=0) >= self._vocab_size
        complete = first + len(chunk) == len(tokens)
        if reader.is_foreign or not chunk or (complete and (asked.unread or not asked.most)):
            return
        most = asked.most if complete else 0
        positions = first + len(chunk) + (0 if self._at_once else max(most - 1, 0))
        s.tokens, s.scheduled = list(tokens[: first + len(chunk)]), first
        if positions > self._longest or not self._has_room(reader, positions, keys, round_, tokens):
            return
        if complete and asked.request.params.counts_tokens and not any(x.seat == s.seat for x in round_.seatings):
            round_.seatings.append(_seating(s, tokens))  # the runner has counted drafts that were rejected
        row = Row(
            RowKind.PROMPT, s.id, s.seat, 0, first, chunk, s.tables, complete, piggybacked=len(chunk) <= LONGEST_READ
        )
        s.scheduled = first + len(chunk)
        round_.rows.append(row)
        round_.readers.append(reader)
        round_.most.append(most)

    def _open(self, asked: Asked) -> _Reader:
        """Return a new reader of a sequence, without a seat."""
        self._next_id += 1
        s = sequence.Sequence(self._next_id, asked.request, asked.choice, frozenset())
        p = asked.request.params
        ids = chain([t for t, _ in p.logit_bias], p.stop_token_ids, p.allowed_token_ids, p.xtc_kept)
        return _Reader(s, is_foreign=max(ids, default=0) >= self._vocab_size)

    def _has_room(self, reader: _Reader, positions: int, keys: set[Key], round_: _Round, tokens: Sequence[int]) -> bool:
        """Give the sequence a seat and blocks for so many positions; return False where there are none.

        Sequences that nobody asks about now make room for it, those first that nobody asked about for longest.
        """
        s = reader.s
        while (s.seat < 0 and not self._seats) or not self._takes(s, positions):
            left = next((k for k, r in self._readers.items() if k not in keys and r.s.seat >= 0), None)
            if left is None:
                return False
            self.forget(left)
        if s.seat < 0:
            s.seat = self._seats.pop()
            round_.seatings.append(_seating(s, tokens))
        return True

    def _takes(self, s: sequence.Sequence, positions: int) -> bool:
        """Take the blocks for so many positions; return False where there are too few."""
        if not s.tables:
            s.tables = tuple(() for _ in self._blocks.groups)
        s.has_drawn = True  # blocks before a window are given back
        return positions <= s.room or self._blocks.reserve(s, positions)

    def _run(self, round_: _Round) -> list[list[int]]:
        """Run the steps of a round; return the drafts of each of its readers."""
        drawn: list[list[int]] = [[] for _ in round_.readers]
        self.first_use = False
        if not round_.rows:
            return drawn
        flights = self._launch_at_once(round_) if self._at_once else self._launch_each(round_)
        for members, flight in flights:
            result = self._runner.wait(flight)
            self.first_use = self.first_use or result.first_use
            for i, tokens in zip(members, result.tokens, strict=True):
                drawn[i] += tokens
        return drawn

    def _launch_at_once(self, round_: _Round) -> list[_Launched]:
        """Launch a step that only reads tokens, and a step that reads the newest tokens and draws all drafts."""
        only_read: list[tuple[int, Row]] = []
        drafting: list[tuple[int, Row]] = []
        for i, (row, most) in enumerate(zip(round_.rows, round_.most, strict=True)):
            before = len(row.tokens) if not most else len(row.tokens) - 1 if len(row.tokens) > LONGEST_READ else 0
            if before:
                only_read.append((i, structs.replace(row, tokens=row.tokens[:before], sample=False)))
            if most:
                drafting.append((i, structs.replace(row, start=row.start + before, tokens=row.tokens[before:])))
        flights: list[_Launched] = []
        copies, seatings = self._blocks.writes.take_copies(), tuple(round_.seatings)
        for rows, drafts in ((only_read, 0), (drafting, max(round_.most))):
            if rows:
                own = tuple([structs.replace(row, piggybacked=False) for _, row in rows])
                plan = StepPlan(own, copies=copies, seatings=seatings, drafts=drafts)
                flights.append(([i for i, _ in rows], self._runner.launch(plan)))
                copies, seatings = (), ()
        return flights

    def _launch_each(self, round_: _Round) -> list[_Launched]:
        """Launch a step that reads tokens and draws the first drafts, and a step for each further draft."""
        first = StepPlan(tuple(round_.rows), copies=self._blocks.writes.take_copies(), seatings=tuple(round_.seatings))
        flights: list[_Launched] = [(list(range(len(round_.rows))), self._runner.launch(first))]
        for n in range(1, max(round_.most)):
            members = [i for i, most in enumerate(round_.most) if most > n]
            rows = tuple([self._decode(round_.readers[i].s, n) for i in members])
            flights.append((members, self._runner.launch(StepPlan(rows))))
        return flights

    @staticmethod
    def _decode(s: sequence.Sequence, n: int) -> Row:
        """Return the row that draws draft number `n` of a sequence, from 0."""
        return Row(RowKind.DECODE, s.id, s.seat, 0, s.scheduled + n - 1, (CARRY,), s.tables, True)


def _agreed(reader: _Reader, tokens: Sequence[int]) -> int:
    """Return how many positions the draft model has computed from these tokens, all but the newest at most.

    It has computed the tokens that were known when it read the sequence last, and the drafts in `computed` behind them.
    """
    news = tokens[reader.known : reader.known + len(reader.computed)]
    pairs = zip(reader.computed, news, strict=False)
    agreed = next((n for n, (own, token) in enumerate(pairs) if own != token), len(news))
    return min(reader.known + agreed, len(tokens) - 1)


def _seating(s: sequence.Sequence, tokens: Sequence[int]) -> Seating:
    """Return the message by which the runner learns how the sequence draws."""
    params = structs.replace(s.request.params, logprobs=None, prompt_logprobs=None)
    return Seating(s.seat, params, s.choice, s.prompt_length, tuple(tokens), s.stop_ids)
