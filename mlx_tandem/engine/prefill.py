"""The choice of the prompt tokens that a step reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.cost import LENGTHS, CostModel, longest_within, padded_length
from mlx_tandem.engine.images import shown
from mlx_tandem.engine.plan import scored_positions
from mlx_tandem.engine.sequence import Sequence

_HURRY = 8
"""Number of decoding streams that one waiting choice outweighs. With eight or more streams, a prompt of one choice gets
the plain share of their time. A burst of prompts gets more, and so does a prompt of many choices, since every chunk has
a fixed cost and a batch that is not full wastes more time.
"""

_PIGGYBACKED_END = 1024
"""Position up to which prompt tokens are piggybacked. Each such token reads all positions before it by itself."""

_IDLE_MS, _MOST_IDLE_MS = 200.0, 1500.0
"""Least and most milliseconds of a step of prompts while nobody decodes. The most applies where chunks have a high
fixed cost. A request that arrives meanwhile waits for the step.
"""

_FIXED_SHARE = 16
"""Length of a step of prompts while nobody decodes, as a multiple of a chunk's fixed cost, so that a device that reads
weights slowly does not read them again for every few tokens.
"""

WHOLE = 4 / 3
"""Factor by which a prompt may exceed its budget to be finished in one chunk."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a prompt that is in the plan. `scored`: number of its positions whose logprobs are wanted, padded."""

    scored: int


class Take(Protocol):
    """A function that adds a chunk of a prompt to the plan."""

    def __call__(self, s: Sequence, tokens: int, *, piggybacked: bool = False) -> Chunk | None:
        """Add the next `tokens` of a prompt and return the chunk; return None if there are no blocks for it."""


def _whole(s: Sequence, tokens: int) -> int:
    return tokens


class Prefill:
    """The planner of prompt chunks, with the time saved up for them. `cost` follows what steps take."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: StepLimits,
        vocab_size: int,
        chunk: Callable[[Sequence, int], int] = _whole,
    ):
        """Create it without time saved up.

        `chunk`: returns how many of the next tokens of a prompt one row may have.
        """
        self.cost = CostModel()
        self._config = config
        self._chunk = chunk
        self._scored_positions = scored_positions(vocab_size)
        self._chunk_tokens = config.max_chunk_tokens or limits.tokens
        self._piggybacked = min(limits.piggybacked, self._chunk_tokens)
        self._pairs = limits.pairs * 4 // 5  # tables are padded, by at most a quarter
        self._saved = 0.0  # milliseconds of streams' time that prompts have been given and have not used yet

    def plan(self, reading: list[Sequence], streams: int, take: Take) -> None:
        """Take chunks of the prompts in `reading` for a step in which so many streams decode.

        Streams give a share of their time to prompts, a larger one when many prompts wait. The share is saved up until
        it pays for a chunk that is worth its fixed cost. Where the runner can, prompt tokens share the streams' forward
        instead (piggybacked prefill), unless there are more prompts than streams.
        """
        most = self._config.prefill_batch_size or len(reading)
        if streams and self._piggybacked and len(reading) <= streams:
            room = self.cost.tokens(self._share(reading, streams))
            reading = self._plan_piggybacked(reading, min(self._piggybacked, max(room, LENGTHS[0])), most, take)
        if not reading:
            return
        budget = idle = self.idle_ms()
        if streams:
            budget = min(idle, self._saved + self._share(reading, streams))
            if budget < min(idle, self.cost.least()) and WHOLE * budget < self._whole(reading[0]):
                self._saved = budget
                return
        self._saved = 0.0
        self._plan_apart(reading, budget, most, take)

    def idle_ms(self) -> float:
        """Return the milliseconds of a step of prompts while nobody decodes."""
        return self._config.idle_prefill_ms or min(max(_IDLE_MS, _FIXED_SHARE * self.cost.fixed()), _MOST_IDLE_MS)

    def chunk_alone(self, position: int, left: int) -> int:
        """Return the number of tokens of a chunk when no row decodes; `left` tokens of the prompt are left."""
        return min(left, self.cost.affordable(position, self.idle_ms(), self._longest(position)))

    def _longest(self, position: int) -> int:
        """Return the tokens of the longest chunk at a position that a forward has memory for."""
        return min(self._chunk_tokens, longest_within(self._pairs, position))

    def _share(self, reading: Iterable[Sequence], streams: int) -> float:
        """Return the milliseconds per step that so many streams give to prompts."""
        choices = sum(1 + len(s.siblings) for s in reading)
        return self._config.prefill_share * max(1.0, _HURRY * choices / streams) * self.cost.decode(streams)

    def _plan_piggybacked(self, reading: Iterable[Sequence], room: int, most: int, take: Take) -> list[Sequence]:
        """Piggyback up to `room` tokens of the first prompts; return the prompts that need a forward of their own.

        `most`: the largest number of prompts in a step.
        """
        taken, rest = 0, list[Sequence]()
        for s in reading:
            if taken + len(rest) == most:
                break
            n = min(s.unread, _PIGGYBACKED_END - s.scheduled)
            if n <= 0 or s.targets(s.scheduled, s.scheduled + n) or s.request.pooling is not None:
                rest.append(s)
                continue
            if s.runs and shown(s, s.scheduled, s.scheduled + n):
                rest.append(s)
                continue
            n = self._chunk(s, min(n, room)) if room else 0
            if n and take(s, n, piggybacked=True) is not None:
                room -= n
                taken += 1
        return rest

    def _plan_apart(self, reading: Iterable[Sequence], budget: float, most: int, take: Take) -> None:
        """Take chunks in forwards of their own, at least one, while their predicted milliseconds and their tokens fit.

        `most`: the largest number of chunks.
        """
        room = self._chunk_tokens
        chunks = scored = 0
        for s in reading:
            if s.seat < 0:  # a chunk taken before may have taken its blocks
                continue
            longest = self._longest(s.scheduled)
            n = min(s.unread, longest)
            if s.targets(s.scheduled, s.scheduled + n):
                n = min(n, self._scored_positions - scored)
                if n <= 0:
                    continue
            if chunks and padded_length(n) > room:
                break
            cost = self.cost.predict(padded_length(n), s.scheduled)
            if cost > WHOLE * budget:  # else the rest is one chunk, since cutting it saves nothing
                if chunks:
                    break
                n = min(n, self.cost.affordable(s.scheduled, budget, longest))
                cost = self.cost.predict(padded_length(n), s.scheduled)
            n = self._chunk(s, n)
            chunk = take(s, n)
            if chunk is not None:
                scored += chunk.scored
                budget -= cost
                room -= padded_length(n)
                chunks += 1
                if chunks == most:
                    break

    def _whole(self, s: Sequence) -> float:
        """Return the milliseconds of the rest of a prompt, or of the longest chunk if that is shorter."""
        return self.cost.predict(padded_length(min(s.unread, self._chunk_tokens)), s.scheduled)
