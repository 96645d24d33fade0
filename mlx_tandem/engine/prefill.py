"""Which tokens of which prompts a step reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.cost import LENGTHS, CostModel, longest_within, padded_length
from mlx_tandem.engine.plan import scored_positions
from mlx_tandem.engine.sequence import Sequence

_HURRY = 8
"""How many streams that decode one waiting prompt outweighs. A single long prompt beside sixteen streams gets the plain
share of their time; a burst of short ones is read at once, since every chunk has a fixed cost and a batch that is not
full wastes more."""

_PIGGYBACKED_END = 1024
"""The position up to which tokens of prompts go beside rows that decode: each reads all that is before it by itself."""

_IDLE_MS, _MOST_IDLE_MS = 200.0, 1500.0
"""Milliseconds of a step of prompts while nobody decodes: at least, and at most where each chunk has a high fixed cost.
Whoever comes meanwhile waits for the step."""

_FIXED_SHARE = 16
"""A step of prompts while nobody decodes takes so many times the fixed cost of a chunk, so that a device that needs
long to read the weights does not read them again for every few tokens."""

_WHOLE = 4 / 3
"""How far over its budget a prompt may go to be finished in one chunk."""


class Take(Protocol):
    """Puts the next so many tokens of a prompt into the plan; how many of them are scored, padded. None: there is no
    room for them in the pool.
    """

    def __call__(self, s: Sequence, tokens: int, *, piggybacked: bool = False) -> int | None: ...


class Prefill:
    """What is known from step to step. `cost` follows what steps take."""

    def __init__(self, config: SchedulerConfig, limits: StepLimits, vocab_size: int):
        self.cost = CostModel()
        self._config = config
        self._scored_positions = scored_positions(vocab_size)
        self._chunk_tokens = config.max_chunk_tokens or limits.tokens
        self._piggybacked = min(limits.piggybacked, self._chunk_tokens)
        self._pairs = limits.pairs * 4 // 5  # tables are padded, by at most a quarter
        self._saved = 0.0  # milliseconds of streams' time that prompts may take and have not taken yet

    def plan(self, reading: list[Sequence], streams: int, take: Take) -> None:
        """Chunks of prompts for a step in which so many streams decode. They give a share of their time to prompts, a
        larger one when many wait; it is saved up for a chunk that is worth its fixed cost. Where the device can, chunks
        share the streams' forward instead, unless there are more prompts than streams.
        """
        most = self._config.prefill_batch_size or len(reading)
        if streams and self._piggybacked and len(reading) <= streams:
            room = self.cost.tokens(self._share(len(reading), streams))
            reading = self._plan_piggybacked(reading, min(self._piggybacked, max(room, LENGTHS[0])), most, take)
        if not reading:
            return
        budget = idle = self.idle_ms()
        if streams:
            budget = min(idle, self._saved + self._share(len(reading), streams))
            if budget < min(idle, self.cost.least()) and _WHOLE * budget < self._whole(reading[0]):
                self._saved = budget
                return
        self._saved = 0.0
        self._plan_apart(reading, budget, most, take)

    def idle_ms(self) -> float:
        """Return the milliseconds of a step of prompts while nobody decodes."""
        return self._config.idle_prefill_ms or min(max(_IDLE_MS, _FIXED_SHARE * self.cost.fixed()), _MOST_IDLE_MS)

    def _share(self, prompts: int, streams: int) -> float:
        """Milliseconds of a step that so many streams give to so many prompts."""
        return self._config.prefill_share * max(1.0, _HURRY * prompts / streams) * self.cost.decode(streams)

    def _plan_piggybacked(self, reading: Iterable[Sequence], room: int, most: int, take: Take) -> list[Sequence]:
        """So many tokens of the first `most`. Returns who has to be read in a forward of its own."""
        taken, rest = 0, list[Sequence]()
        for s in reading:
            if taken + len(rest) == most:
                break
            n = min(s.unread, _PIGGYBACKED_END - s.scheduled)
            if n <= 0 or s.targets(s.scheduled, s.scheduled + n):
                rest.append(s)
                continue
            n = min(n, room)
            if n and take(s, n, piggybacked=True) is not None:
                room -= n
                taken += 1
        return rest

    def _plan_apart(self, reading: Iterable[Sequence], budget: float, most: int, take: Take) -> None:
        """While their predicted time and their tokens fit, at least one."""
        room = self._chunk_tokens
        chunks = scored = 0
        for s in reading:
            if s.seat < 0:  # one before this may have taken its blocks
                continue
            longest = min(self._chunk_tokens, longest_within(self._pairs, s.scheduled))
            n = min(s.unread, longest)
            if s.targets(s.scheduled, s.scheduled + n):
                n = min(n, self._scored_positions - scored)
                if n <= 0:
                    continue
            if chunks and padded_length(n) > room:
                break
            cost = self.cost.predict(padded_length(n), s.scheduled)
            if cost > _WHOLE * budget:  # else the rest goes in one chunk: cutting it costs more than it saves
                if chunks:
                    break
                n = min(n, self.cost.affordable(s.scheduled, budget, longest))
                cost = self.cost.predict(padded_length(n), s.scheduled)
            more = take(s, n)
            if more is not None:
                scored += more
                budget -= cost
                room -= padded_length(n)
                chunks += 1
                if chunks == most:
                    break

    def _whole(self, s: Sequence) -> float:
        """Milliseconds of the rest of its prompt, or of the longest chunk."""
        return self.cost.predict(padded_length(min(s.unread, self._chunk_tokens)), s.scheduled)
