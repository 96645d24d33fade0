"""Counters of drafts by their source: since the start, for each minute, and as moving averages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_tandem.engine.plan import RowKind, StepPlan
from mlx_tandem.types import DraftCounts, DraftMinute, DraftSource

MOST_DRAFTS = 63
"""Most drafts of a row. Such a row has 64 tokens."""

MINUTES = 10
"""Number of minutes for which counters are kept, including the present one."""

DECAY = 0.98
"""Factor by which recent counts are multiplied before those of another row are added. The moving average is over about
the last 50 rows."""


@dataclass(slots=True)
class Acceptance:
    """Drafts that were verified, and the accepted ones among them."""

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    recent_drafted: float = 0.0
    recent_accepted: float = 0.0

    def add(self, drafts: int, accepted: int) -> None:
        """Count a row."""
        self.rows += 1
        self.drafted += drafts
        self.accepted += accepted
        self.recent_drafted = DECAY * self.recent_drafted + drafts
        self.recent_accepted = DECAY * self.recent_accepted + accepted

    @property
    def recent(self) -> float:
        """The moving average of the share that is accepted, 0 to 1."""
        return self.recent_accepted / self.recent_drafted if self.recent_drafted else 0.0


@dataclass(slots=True)
class Decoded:
    """Counts of the rows that decoded in one period."""

    by_source: dict[DraftSource, Acceptance] = field(default_factory=dict)
    undrafted: int = 0  # rows without drafts

    def add(self, source: DraftSource, drafts: int, accepted: int) -> None:
        """Count a row with drafts."""
        self.by_source.setdefault(source, Acceptance()).add(drafts, accepted)

    def sources(self) -> tuple[DraftCounts, ...]:
        """Return the counts of each source that has had drafts."""
        return tuple(DraftCounts(name, a.rows, a.drafted, a.accepted, a.recent) for name, a in self.by_source.items())


class Counts:
    """The counters of one proposer. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._began = clock()
        self._minutes: deque[tuple[int, Decoded]] = deque(maxlen=MINUTES)  # with their numbers since the start
        self.all = Acceptance()
        self.decoded = Decoded()
        self.per_row = 0.0  # mean number of drafts of a row, in the newest step that verified any
        self.by_position = [0] * MOST_DRAFTS  # accepted drafts

    def add(self, source: DraftSource, drafts: int, accepted: int) -> None:
        """Count a row that verified `drafts` drafts of `source`, of which `accepted` were accepted."""
        for n in range(accepted):
            self.by_position[n] += 1
        self.all.add(drafts, accepted)
        for decoded in (self.decoded, self._minute()):
            decoded.add(source, drafts, accepted)

    def observe(self, plan: StepPlan) -> None:
        """Count the rows of a step that decoded without drafts, and note how many drafts the others had."""
        drafts = [len(row.tokens) - 1 for row in plan.rows if row.kind is RowKind.VERIFY]
        if drafts:
            self.per_row = sum(drafts) / len(drafts)
        if undrafted := sum(row.kind is RowKind.DECODE for row in plan.rows):
            for decoded in (self.decoded, self._minute()):
                decoded.undrafted += undrafted

    def minutes(self) -> tuple[DraftMinute, ...]:
        """Return the counts of those of the last MINUTES minutes in which any row decoded, oldest first."""
        now = self._number()
        return tuple(
            DraftMinute(now - number, decoded.sources(), decoded.undrafted)
            for number, decoded in self._minutes
            if now - number < MINUTES
        )

    def _minute(self) -> Decoded:
        """Return the counters of the present minute."""
        number = self._number()
        if not self._minutes or self._minutes[-1][0] != number:
            self._minutes.append((number, Decoded()))
        return self._minutes[-1][1]

    def _number(self) -> int:
        """Return how many minutes have passed since the start."""
        return int((self._clock() - self._began) // 60)
