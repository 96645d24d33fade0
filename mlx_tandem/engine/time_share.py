"""The division of the device's time: requests and learning share it by weight while both want it.

This is deficit round robin in measured milliseconds. The credit is the time that learning is owed: it grows by
learning's share of each millisecond that goes to requests, and shrinks by the requests' share of each millisecond that
goes to learning. Above a bound it grows by a slightly lower share. While one side wants nothing, the other has all of
the time, of which it pays back BOUND_MS at most.
"""

from __future__ import annotations

from collections import deque

from mlx_tandem.config import DutyConfig

BOUND_MS = 100.0
"""Most milliseconds that are paid back for time that only one side wanted: 1 % of the ten seconds over which shares
hold."""

MUCH_MS = 1.5 * BOUND_MS
"""Credit above which learning may run several slices per step. Idle time never earns that much."""

TOLERANCE = 0.02
"""Amount by which learning may fall short of its share where one slice per step gives no more; with two slices per
step, streams would wait twice as long. Together with MUCH_MS, shares hold to 0.05 over ten seconds.
"""

GAPS = 128
"""Number of the latest gaps between tokens over which the 95th percentile is taken."""


class TimeShare:
    """The account of device milliseconds. The pipeline asks it before each piece of work and notes how long it took."""

    def __init__(self, config: DutyConfig):
        """Create a share of time as `config` weighs the two sides."""
        self._mode = config.mode
        self._limit = config.inter_token_p95_ms
        whole = config.inference + config.training
        self._share = config.training / whole if whole > 0 else 0.0  # learning's
        self._least = max(self._share - TOLERANCE, 0.85 * self._share) if self._share < 1 else 1.0
        self._credit = 0.0  # milliseconds
        self._alone = False  # whether learning had nobody to wait for when last asked
        self._lent = True  # whether one side wanted nothing, or was held back, when last asked
        self._gaps: deque[float] = deque(maxlen=GAPS)  # milliseconds
        self._last_tokens: float | None = None  # when a step with streams was last read, in milliseconds
        self.serving_ms = 0.0  # since start
        self.training_ms = 0.0  # since start

    @property
    def learns(self) -> bool:
        """Whether anything is trained at all."""
        return self._mode != "inference_only"

    @property
    def is_slow(self) -> bool:
        """Whether streams get their tokens more slowly than the configuration allows."""
        if not self._limit or not self._gaps:
            return False
        return sorted(self._gaps)[(len(self._gaps) * 95 - 1) // 100] > self._limit

    def may_train(self, serving: bool, training: bool) -> bool:
        """Return whether learning runs next. `serving`, `training`: whether that side wants to run."""
        if not training or not self.learns:
            self._lent = True
            return False
        self._alone = not serving or self._mode == "training_only"
        self._lent = self._alone or self.is_slow
        return self._alone or (not self._lent and self._credit > 0)

    @property
    def may_go_on(self) -> bool:
        """Whether learning may run another piece of work without a step in between, after `may_train` has allowed one.

        Streams hardly notice one piece at a time.
        """
        return self._alone or self._credit > MUCH_MS

    def note_serving(self, ms: float) -> None:
        """Count device time of users' requests."""
        self.serving_ms += ms
        self._add(self._growth * ms)

    def note_training(self, ms: float) -> None:
        """Count device time of slices and of rows made for training."""
        self.training_ms += ms
        self._add((self._growth - 1) * ms)

    def note_tokens(self, now_ms: float, streams: bool) -> None:
        """Note that a step was read at `now_ms`. `streams`: it drew the next tokens of users' requests."""
        if streams and self._last_tokens is not None:
            self._gaps.append(now_ms - self._last_tokens)
        self._last_tokens = now_ms if streams else None

    @property
    def _growth(self) -> float:
        """Credit per millisecond of requests: learning's share, or above the bound the least share that it accepts."""
        return self._least if self._credit > BOUND_MS else self._share

    def _add(self, ms: float) -> None:
        """Change the credit, and bound it unless both sides wanted the device."""
        # While both sides want the device, the whole debt of a long piece of work counts.
        self._credit += ms
        if self._lent:
            self._credit = min(max(self._credit, -BOUND_MS), BOUND_MS)
