"""The server's proposer: as many drafts for each sequence as it accepts, and none where they do not pay.

They are copied from the sequence's own tokens and from what its request predicts, or a smaller model makes them, or a
head of the model itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.plan import RowKind, StepPlan, StepResult
from mlx_tandem.engine.proposers import Asked
from mlx_tandem.engine.proposers.counts import MOST_DRAFTS, Counts
from mlx_tandem.engine.proposers.draft_model import DraftModel, Key
from mlx_tandem.engine.proposers.ngram import NgramIndex
from mlx_tandem.engine.proposers.payoff import Payoff
from mlx_tandem.engine.proposers.prediction import Prediction
from mlx_tandem.types import DraftSource, Request, SpeculationStats

log = logging.getLogger(__name__)

SURE, LIKELY = 8, 4
"""Lengths of a match from which on as many drafts are worth trying as were accepted before, and a few."""

FEW_ROWS = 12
"""Most sequences of a batch in which a match of fewer than LIKELY tokens is tried. Its drafts are right less often than
a larger batch needs (docs/decisions/speculation.md)."""

WORTH_WAITING = 1.0
"""Accepted drafts a row, on average, from which on a sequence waits for its newest token before it drafts."""

MIN_RETRY_CHANCE = 1 / 3
"""Chance of accepting all drafts of a retry from which on a sequence still gets as many drafts in retries. A retry is
the row that follows a row of which a draft was rejected."""

PRIOR_RETRIES = 4.0
"""Number of accepted drafts in retries with which the counts of a new sequence begin."""

RETRY_DECAY = 0.7
"""Factor by which the counts of drafts in retries are multiplied before those of another retry are added."""

WITHOUT_MODEL = 8
"""Tokens during which a sequence does not wait for a draft model that had nothing for it."""

PATIENCE = {"draft": 1, "mtp": 2}
"""Rows in a row of which no draft was accepted that lead to no pause, by the method; 0 for the others."""

LONGEST_PAUSE = 64
"""Most tokens during which a sequence does not draft after drafts of which none was accepted."""


@dataclass(slots=True)
class _Drafter:
    """What is known about one sequence."""

    index: NgramIndex | None  # of its own tokens, if drafts are copied from these
    prediction: Prediction | None
    drafts: int  # to copy next
    source: DraftSource | None = None  # of the last drafts
    accepted: float = 0.0  # a row, moving average
    is_copying: bool = False  # whether all of the last drafts were accepted
    retries: bool = False  # whether one of the model's last drafts was rejected
    retried: float = PRIOR_RETRIES  # decayed count of the model's drafts in retries, up to the first rejected one
    retried_accepted: float = PRIOR_RETRIES  # decayed count of the accepted ones among them
    misses: int = 0  # rows in a row of which no draft was accepted
    pause: int = 0  # tokens to let pass
    resume: int = 0  # number of tokens from which on it drafts again
    awaits_model: bool = False  # whether the draft model is expected to have drafts once its newest token is known
    offered: tuple[int, int] = (0, 0)  # a draft of the model's head, and how many tokens are before it


class Speculation:
    """The proposer. `model` makes the drafts where the method is "draft"; `clock` returns seconds."""

    def __init__(
        self,
        config: SpeculationConfig,
        model: DraftModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._config = config
        self._model = model
        self._drafted: dict[Key, tuple[int, ...]] = {}  # by the model for this plan
        self._ran_new = False  # whether the draft model has run new kinds of steps since a step was read
        self.together = model is not None
        self.in_steps = config.method == "mtp"
        self._patience = PATIENCE.get(config.method, 0)
        self._clock = clock
        self._rows = 0  # sequences of the plan that is being made
        self._longest = max(config.ngram_min, config.ngram_max)
        self._drafters: dict[tuple[int, int], _Drafter] = {}
        self.for_all = config.method != "none"
        self.payoff = Payoff()
        self.counts = Counts(clock)

    def is_on(self, rows: int) -> bool:
        """Return whether sequences draft in a batch of so many; 0: none of them may."""
        most, self._rows = self._config.disable_batch_size, rows
        if not rows or (most and rows > most):
            self.payoff.interrupt()
            return False
        return self.payoff.uses_drafts(rows) or not self._config.dynamic

    def needs_newest(self, request: Request, choice: int) -> bool:
        """Return whether drafts of a sequence are likely enough to wait for its newest token."""
        drafter = self._drafters.get((request.id, choice))
        if drafter is None:
            return False
        if self._model is not None or self.in_steps:
            return drafter.awaits_model
        return not drafter.is_copying and drafter.accepted >= WORTH_WAITING

    def prepare(self, asked: Sequence[Asked]) -> None:
        """Have the draft model make drafts for the sequences whose tokens are all known and that have nothing to copy.

        It only reads the tokens of the others.
        """
        pairs = [(a, self._drafters.get((a.request.id, a.choice)) or self._open(a.request, a.choice)) for a in asked]
        for a, drafter in pairs:
            pauses = self._pauses(drafter, len(a.tokens) + max(a.unread - 1, 0))
            copies = (not a.unread or drafter.is_copying) and self._match(drafter, a.tokens)[1] > 0
            drafter.awaits_model = not (pauses or copies)
        numbers = self._numbers([drafter for a, drafter in pairs if drafter.awaits_model and not a.unread])
        wanted = []
        for a, drafter in pairs:
            drafts = drafter.awaits_model and not a.unread
            wanted.append(a._replace(most=next((n for n in numbers if n <= a.most), 0) if drafts else 0))
        self._drafted = self._draft(wanted)
        for a, drafter in zip(wanted, (drafter for _, drafter in pairs), strict=True):
            if a.most and not self._drafted.get((a.request.id, a.choice)):
                drafter.awaits_model = False
                drafter.resume = len(a.tokens) + WITHOUT_MODEL

    def offer(self, request: Request, choice: int, tokens: int, draft: int) -> None:
        """Take in what the model's head expects after the first `tokens` tokens of a sequence."""
        drafter = self._drafters.get((request.id, choice)) or self._open(request, choice)
        drafter.offered = draft, tokens
        drafter.awaits_model = request.speculate and not self._pauses(drafter, tokens)

    def propose(self, request: Request, choice: int, tokens: Sequence[int], unread: int, most: int) -> Sequence[int]:
        """Return what follows the newest tokens in the prediction, or where they stood before if more agree there.

        Where neither has the newest tokens, return what the draft model or the model's head has drafted.
        """
        drafter = self._drafters.get((request.id, choice)) or self._open(request, choice)
        if self._pauses(drafter, len(tokens)) or (unread > 1 and not drafter.is_copying):
            return ()
        place, length, is_predicted = self._match(drafter, tokens)
        if not length and self.in_steps:
            drafter.source = "mtp"
            draft, behind = drafter.offered
            return (draft,) if behind == len(tokens) and not unread else ()
        if not length:
            drafter.source = "draft"
            return self._drafted.pop((request.id, choice), ())[:most] if not unread else ()
        drafter.source = "prediction" if is_predicted else "ngram"
        if self._config.dynamic and self._rows > FEW_ROWS and length < LIKELY and not is_predicted:
            return ()
        most = self._number(drafter, most, length)
        if drafter.prediction is not None and is_predicted:
            return drafter.prediction.copy(place, unread, most)
        return NgramIndex.copy(tokens, place, unread, most)

    def _match(self, drafter: _Drafter, tokens: Sequence[int]) -> tuple[int, int, bool]:
        """Return the place from which to copy, how many tokens agree before it, and whether it is in the prediction.

        Nothing is copied where no token agrees. A draft model is right more often than a short match: beside one, a
        match in the sequence's own tokens counts only if at least SURE tokens agree.
        """
        place, length = (-1, 0) if drafter.prediction is None else drafter.prediction.find(tokens)
        if drafter.index is None:
            return place, length, length > 0
        drafter.index.extend(tokens)
        if length < self._longest:
            earlier, agrees = drafter.index.find(tokens, tokens)
            if agrees > length and (self._model is None or agrees >= SURE):
                return earlier, agrees, False
        return place, length, length > 0

    def _draft(self, wanted: Sequence[Asked]) -> dict[Key, tuple[int, ...]]:
        """Return the draft model's drafts. A draft model that fails is given up: answers do not depend on it."""
        if self._model is None:
            return {}
        try:
            drafted = self._model.draft(wanted)
            self._ran_new = self._ran_new or self._model.first_use
            return drafted
        except Exception as e:
            log.warning("drafts are off from here on, since the draft model failed: %r", e)
            self._model, self.together, self.for_all = None, False, False
            return {}

    def _numbers(self, drafters: Sequence[_Drafter]) -> Sequence[int]:
        """Return the numbers of drafts that the draft model may make for a sequence, in descending order.

        Each sequence gets the first number for which it has room. The numbers are those of all sequences, since one
        step makes the drafts of all, and another step verifies the same number of tokens of each. They begin with the
        larger number while it suits more than half of the sequences. They are few, since each kind of step is traced.

        The larger number suits a new sequence, and one that accepted all of its last drafts. It also suits one that is
        likely to accept as many in a retry: some draft models make several wrong drafts in a row, others single ones.
        """
        most = self._config.num_tokens
        if not self._config.dynamic:
            return range(most, 0, -1)
        half = max(most // 2, 1)
        chances = [(d.retried_accepted / d.retried) ** most if d.retries else 1.0 for d in drafters]
        suits = sum(chance >= MIN_RETRY_CHANCE for chance in chances)
        return (most, half, 1) if 2 * suits > len(drafters) else (half, 1)

    def _number(self, drafter: _Drafter, most: int, length: int) -> int:
        """Return how many drafts, `most` at most, to copy where so many tokens agree."""
        if not self._config.dynamic:
            return min(most, self._config.num_tokens)
        most = min(most, drafter.drafts if length >= SURE else 7 if length >= LIKELY else 3)
        return (1 << (most + 1).bit_length() - 1) - 1  # few numbers of rows, each of which is traced

    @staticmethod
    def _pauses(drafter: _Drafter, tokens: int) -> bool:
        """Return whether a sequence with so many tokens does not draft after drafts of which none was accepted."""
        if drafter.pause:
            drafter.resume, drafter.pause = tokens + drafter.pause, 0
        return tokens < drafter.resume

    def source(self, request: Request, choice: int) -> DraftSource | None:
        """Return the source of the drafts that were last proposed for a sequence."""
        drafter = self._drafters.get((request.id, choice))
        return None if drafter is None else drafter.source

    def settle(self, request: Request, choice: int, drafts: int, accepted: int, source: DraftSource | None) -> None:
        """Note how many drafts of a row were accepted. The sequence may have proposed others since then."""
        assert source is not None, "a row with drafts has them from somewhere"
        self.counts.add(source, drafts, accepted)
        drafter = self._drafters.get((request.id, choice))
        if drafter is None:
            return
        drafter.accepted += 0.3 * (accepted - drafter.accepted)
        drafter.is_copying = accepted == drafts
        if not self._config.dynamic:
            return
        is_copied = source in ("prediction", "ngram")
        if is_copied and drafter.is_copying:
            drafter.drafts = min(2 * max(drafter.drafts, drafts) + 1, MOST_DRAFTS)
        elif is_copied:
            drafter.drafts = max(2 * accepted + 1, 1)
        else:
            if drafter.retries:
                drafter.retried = RETRY_DECAY * drafter.retried + accepted + (accepted < drafts)
                drafter.retried_accepted = RETRY_DECAY * drafter.retried_accepted + accepted
            drafter.retries = accepted < drafts
        drafter.misses = 0 if accepted else drafter.misses + 1
        if drafter.misses > self._patience:
            drafter.pause = min(1 << drafter.misses, LONGEST_PAUSE)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Take in a step that was just read."""
        if not (self.for_all or self._drafters):
            return
        self.counts.observe(plan)
        # A sequence whose prompt is cached begins with a row that decodes, perhaps after a time without work.
        begins = bool(plan.seatings)
        usual = not (begins or plan.saves or plan.loads or plan.masked or plan.slice or plan.background_share)
        usual = usual and bool(plan.rows) and all(row.kind is not RowKind.PROMPT for row in plan.rows)
        new, self._ran_new = result.first_use or self._ran_new, False
        self.payoff.note(1e3 * self._clock(), sum(map(len, result.tokens)), usual=usual, new=new)

    def forget(self, request: Request, choice: int) -> None:
        """Drop what is known about a sequence that has ended."""
        self._drafters.pop((request.id, choice), None)
        if self._model is not None:
            self._model.forget((request.id, choice))

    def stats(self) -> SpeculationStats | None:
        """Return the counters and the present decision; None if it does not draft for all and has not yet."""
        counts, size = self.counts, self.payoff.state
        if not (self.for_all or counts.all.rows):
            return None
        return SpeculationStats(
            self._config.method if self.for_all else "prediction",
            counts.all.rows,
            counts.all.drafted,
            counts.all.accepted,
            tuple(counts.by_position),
            counts.all.recent,
            counts.decoded.sources(),
            counts.decoded.undrafted,
            counts.minutes(),
            counts.per_row,
            bool(size["uses_drafts"]) or not self._config.dynamic,
            float(size["tokens_per_s_with"]),
            float(size["tokens_per_s_without"]),
        )

    def _open(self, request: Request, choice: int) -> _Drafter:
        config = self._config
        first = 0 if config.prompt_lookup else len(request.prompt)
        copies = config.method in ("ngram", "draft")
        index = NgramIndex(config.ngram_min, self._longest, first) if copies else None
        prediction = Prediction(request, config.ngram_min, self._longest) if request.prediction else None
        drafter = self._drafters[request.id, choice] = _Drafter(index, prediction, config.num_tokens)
        return drafter
