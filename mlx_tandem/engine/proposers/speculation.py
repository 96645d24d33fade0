"""The server's proposer: copied drafts, as many for each sequence as it accepts, and none where they do not pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.plan import RowKind, StepPlan, StepResult
from mlx_tandem.engine.proposers.ngram import NgramIndex
from mlx_tandem.engine.proposers.payoff import Payoff
from mlx_tandem.engine.proposers.prediction import Prediction
from mlx_tandem.types import Request, SpeculationStats

MOST_DRAFTS = 63
"""Most drafts of a row, with which it has 64 tokens."""

SURE, LIKELY = 8, 4
"""Lengths of a match from which on as many drafts are worth trying as were accepted before, and a few."""

WORTH_WAITING = 1.0
"""Accepted drafts a row, on average, from which on a sequence waits for its newest token before it drafts."""

LONGEST_PAUSE = 64
"""Most tokens during which a sequence does not draft after drafts of which none was accepted."""


@dataclass(slots=True)
class _Drafter:
    """What is known about one sequence."""

    index: NgramIndex | None  # of its own tokens, if drafts are copied from these
    prediction: Prediction | None
    drafts: int  # to propose next
    is_predicted: bool = False  # whether the last drafts are from the prediction
    accepted: float = 0.0  # a row, moving average
    is_copying: bool = False  # whether all of the last drafts were accepted
    misses: int = 0  # rows in a row of which no draft was accepted
    pause: int = 0  # tokens to let pass
    resume: int = 0  # number of tokens from which on it drafts again


@dataclass(slots=True)
class DraftCounts:
    """Counters since the start."""

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)  # accepted


class Speculation:
    """The proposer. `clock` returns seconds."""

    def __init__(self, config: SpeculationConfig, clock: Callable[[], float] = time.perf_counter):
        self._config = config
        self._clock = clock
        self._longest = max(config.ngram_min, config.ngram_max)
        self._drafters: dict[tuple[int, int], _Drafter] = {}
        self.for_all = config.method != "none"
        self.payoff = Payoff()
        self.counts = DraftCounts()

    def is_on(self, rows: int) -> bool:
        """Return whether sequences draft in a batch of so many; 0: none of them may."""
        most = self._config.disable_batch_size
        if not rows or (most and rows > most):
            self.payoff.interrupt()
            return False
        return self.payoff.uses_drafts(rows) or not self._config.dynamic

    def needs_newest(self, request: Request, choice: int) -> bool:
        """Return whether drafts of a sequence are likely enough to wait for its newest token."""
        drafter = self._drafters.get((request.id, choice))
        return drafter is not None and not drafter.is_copying and drafter.accepted >= WORTH_WAITING

    def propose(self, request: Request, choice: int, tokens: Sequence[int], unread: int, most: int) -> Sequence[int]:
        """Return what follows the newest tokens in the prediction, or where they stood before if more agree there."""
        drafter = self._drafters.get((request.id, choice)) or self._open(request, choice)
        if drafter.index is not None:
            drafter.index.extend(tokens)
        if drafter.pause:
            drafter.resume, drafter.pause = len(tokens) + drafter.pause, 0
        if len(tokens) < drafter.resume or (unread > 1 and not drafter.is_copying):
            return ()
        place, length = (-1, 0) if drafter.prediction is None else drafter.prediction.find(tokens)
        drafter.is_predicted = length > 0
        if drafter.index is not None and length < self._longest:
            earlier, agrees = drafter.index.find(tokens, tokens)
            if agrees > length:
                place, length, drafter.is_predicted = earlier, agrees, False
        if not length:
            return ()
        if self._config.dynamic:
            most = min(most, drafter.drafts if length >= SURE else 7 if length >= LIKELY else 3)
            most = (1 << (most + 1).bit_length() - 1) - 1  # few numbers of rows, each of which is traced
        else:
            most = min(most, self._config.num_tokens)
        if drafter.prediction is not None and drafter.is_predicted:
            return drafter.prediction.copy(place, unread, most)
        return NgramIndex.copy(tokens, place, unread, most)

    def is_from_prediction(self, request: Request, choice: int) -> bool:
        """Return whether the drafts that were proposed last for a sequence are from its request's prediction."""
        drafter = self._drafters.get((request.id, choice))
        return drafter is not None and drafter.is_predicted

    def settle(self, request: Request, choice: int, drafts: int, accepted: int) -> None:
        """Take in how many drafts of a row were accepted."""
        self.counts.rows += 1
        self.counts.drafted += drafts
        self.counts.accepted += accepted
        for n in range(accepted):
            self.counts.by_position[n] += 1
        drafter = self._drafters.get((request.id, choice))
        if drafter is None:
            return
        drafter.accepted += 0.3 * (accepted - drafter.accepted)
        drafter.is_copying = accepted == drafts
        if not self._config.dynamic:
            return
        if drafter.is_copying:
            drafter.drafts = min(2 * max(drafter.drafts, drafts) + 1, MOST_DRAFTS)
        else:
            drafter.drafts = max(2 * accepted + 1, 1)
        drafter.misses = 0 if accepted else drafter.misses + 1
        if drafter.misses:
            drafter.pause = min(1 << drafter.misses, LONGEST_PAUSE)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Take in a step that was just read.

        Steps of new shapes count, too: drafts that need ever new shapes do not pay.
        """
        usual = not (plan.saves or plan.loads or plan.masked or plan.slice or plan.background_share)
        usual = usual and bool(plan.rows) and all(row.kind is not RowKind.PROMPT for row in plan.rows)
        self.payoff.note(1e3 * self._clock(), sum(map(len, result.tokens)), usual=usual)

    def forget(self, request: Request, choice: int) -> None:
        """Drop what is known about a sequence that has ended."""
        self._drafters.pop((request.id, choice), None)

    def stats(self) -> SpeculationStats | None:
        """Return the counters and the present decision; None if it does not draft for all and has not yet."""
        counts, size = self.counts, self.payoff.state
        if not (self.for_all or counts.rows):
            return None
        return SpeculationStats(
            self._config.method if self.for_all else "prediction",
            counts.rows,
            counts.drafted,
            counts.accepted,
            tuple(counts.by_position),
            bool(size["uses_drafts"]) or not self._config.dynamic,
            float(size["tokens_per_s_with"]),
            float(size["tokens_per_s_without"]),
        )

    def _open(self, request: Request, choice: int) -> _Drafter:
        config = self._config
        first = 0 if config.prompt_lookup else len(request.prompt)
        index = NgramIndex(config.ngram_min, self._longest, first) if self.for_all else None
        prediction = Prediction(request, config.ngram_min, self._longest) if request.prediction else None
        drafter = self._drafters[request.id, choice] = _Drafter(index, prediction, config.num_tokens)
        return drafter
