"""The parts of a step in flight: their way to the device, and how their results are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_tandem.engine.plan import Bytes, StepPlan
from mlx_tandem.model import backend
from mlx_tandem.model.cache.pools import KVPools
from mlx_tandem.model.cache.turns import HeldStates, kept_lines
from mlx_tandem.model.inputs import Numbers, Sent, receive, specs
from mlx_tandem.model.ops.sampling.sampler import SamplingFlags
from mlx_tandem.model.step.draw import Undrawn
from mlx_tandem.model.step.rows import take_verified
from mlx_tandem.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a step that writes the pool once: the plan's rows in it, and the arrays drawn for them.

    `marker` is evaluated when the part is done; no array in it shares the pool's buffers. `wanted` has for each row how
    many alternatives it wants; -1: no logprobs.
    """

    rows: list[int]
    flags: SamplingFlags
    drawn: list[mx.array]  # empty when no row samples
    marker: list[mx.array]
    prompt_tokens: int = 0  # rows times length of chunks of prompts; 0 for rows of one token
    scored: list[mx.array] = field(default_factory=list)
    # These are kept here because the row's seat may belong to another sequence when the part is read.
    wanted: list[int] = field(default_factory=list)
    wanted_scores: list[int] = field(default_factory=list)
    sent: Sent | None = None
    undrawn: Undrawn | None = None  # the rows that wait for masks, if any
    verifies: bool = False  # whether rows have drafts; each token of such a row has an entry in `rows`
    is_pooled: bool = False  # whether `scored` has pooled hidden states and not scores
    saves: tuple[int, ...] = ()  # blocks whose contents the marker holds
    drafts: list[mx.array] = field(default_factory=list)  # what the model's head expects behind each of `drawn`

    def take_drawn(self, plan: StepPlan, tokens: list[tuple[int, ...]]) -> None:
        """Set the entries of the part's rows in `tokens`, which has the drawn tokens of each row of the plan."""
        drawn: Any = self.drawn[0].tolist() if self.sent is None or not self.sent.room else self.sent.written_back
        if plan.drafts:
            for i, several in zip(self.rows, drawn, strict=False):
                tokens[i] = tuple(several)
            return
        if self.verifies:
            take_verified(plan, self.rows, drawn, tokens)
            return
        for i, token in zip(self.rows, drawn, strict=False):
            if plan.rows[i].sample:
                tokens[i] = (token,)

    def drafted(self, plan: StepPlan, tokens: Sequence[tuple[int, ...]]) -> dict[int, int]:
        """Return the drafts for what follows the rows' tokens, as `take_drawn` has set them, by the row of the plan."""
        values: Any = self.drafts[0].tolist()
        own: dict[int, list[int]] = {}
        for i, draft in zip(self.rows, values, strict=False):
            own.setdefault(i, []).append(draft)
        return {i: several[len(tokens[i]) - 1] for i, several in own.items() if plan.rows[i].sample}

    def logprobs(self, plan: StepPlan) -> dict[int, tuple[TokenLogprob, ...]]:
        """Return the logprobs of the drawn tokens by the row of the plan, for rows that want them."""
        lists: Any = [a.tolist() for a in self.drawn[1:]]
        model, sampled, *top = lists
        found: dict[int, tuple[TokenLogprob, ...]] = {}
        for row, i in enumerate(self.rows):
            k = self.wanted[row]
            if k < 0 or not plan.rows[i].sample:
                continue
            best = tuple(zip(top[0][row][:k], top[1][row][:k], strict=True)) if k else ()
            found[i] = (*found.get(i, ()), TokenLogprob(model[row], sampled[row], best))
        return found

    def pooled(self, plan: StepPlan) -> dict[int, list[float]]:
        """Return the pooled hidden states of the rows' tokens by the row of the plan."""
        sums, lasts = self.scored
        found: dict[int, list[float]] = {}
        for row, i in enumerate(self.rows):
            values: Any = (sums if plan.rows[i].pooling == "mean" else lasts)[row].tolist()
            found[i] = values
        return found

    def scores(self, plan: StepPlan) -> dict[int, list[TokenLogprob]]:
        """Return the logprobs of the rows' targets by the row of the plan."""
        lists: Any = [a.tolist() for a in self.scored]
        found = {}
        for row, i in enumerate(self.rows):
            k = self.wanted_scores[row]
            logprobs, ranks, *top = (values[row] for values in lists)
            found[i] = [
                TokenLogprob(
                    logprobs[at],
                    logprobs[at],
                    tuple(zip(top[0][at][:k], top[1][at][:k], strict=True)) if k else (),
                    ranks[at],
                )
                for at in range(len(plan.rows[i].targets))
            ]
        return found


def copying(pool: KVPools, copies: Sequence[tuple[int, int]]) -> list[Part]:
    """Return a part that reads blocks and one that writes them; in a single part, the write would copy the pool."""
    return [Part([], SamplingFlags(), [], arrays) for arrays in pool.copy(copies)]


def saving(pool: KVPools, blocks: Sequence[int]) -> list[Part]:
    """Return a part that reads blocks; `KVPools.bytes_of` makes bytes of its marker when it is done."""
    return [Part([], SamplingFlags(), [], pool.read(blocks), saves=tuple(blocks))]


def loading(pool: KVPools, loads: Sequence[tuple[int, Bytes]]) -> list[Part]:
    """Return a part that writes the contents of blocks."""
    return [Part([], SamplingFlags(), [], pool.write(loads))]


def putting(pool: KVPools, rows: Numbers, lines: Sequence[mx.array]) -> list[Part]:
    """Return a part that writes the states that the part before it has computed."""
    return [Part([], SamplingFlags(), [], pool.put_states(mx.array(rows), lines))]


def keeping(pool: KVPools, held: HeldStates, newest: mx.array, size: int, sent: Sent) -> Part:
    """Return a part that writes the states after the accepted tokens of the rows that a step has verified.

    newest: the position of each seat's newest token; size: positions of a block; sent: the numbers by which states are
    kept.
    """
    numbers = receive(sent.arrays, specs(held.numbers.for_keeping()))
    rows, taken = kept_lines(held.shape, size, numbers, held.start, newest)
    marker = pool.put_states(rows, [own[taken] for own in held.lines])
    return Part([], SamplingFlags(), [], marker, sent=sent)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched.

    `first_use`: whether a shape was used for the first time. `unencoded`: as in StepResult.
    """

    plan: StepPlan
    parts: list[Part]
    first_use: bool
    unencoded: dict[bytes, str] = field(default_factory=dict)


MANY_TOKENS = 64
"""Prompt tokens of a forward from which on its matrix products use every core of a CPU. Those of rows that decode never
do: the host launches the next operations on another core meanwhile."""


class DispatchQueue:
    """The parts of steps on their way to the device, in their order.

    Attributes:
        one_at_a_time: Whether a part is dispatched only when the part before it is done; it is built meanwhile. Where
            MLX's own operations write and operations in flight hold their inputs, a write dispatched behind a read of
            the pool would copy the pool. Whether the device needs this is measured at start (`overlap.py`).
    """

    def __init__(self) -> None:
        self.one_at_a_time = backend.current().steps.one_at_a_time
        self._waiting: deque[Part] = deque()
        self._running: Part | None = None

    def add(self, *parts: Part) -> None:
        """Put parts behind those that wait, and dispatch what can be dispatched."""
        self._waiting.extend(parts)
        self._dispatch()

    def follow(self, part: Part) -> None:
        """Dispatch a part that does not use the pool, behind the waiting ones, whose results it may need."""
        if self._waiting:
            self._waiting.append(part)
        else:
            mx.async_eval(part.marker)

    def done(self, part: Part) -> None:
        """Note that the device has computed a part, and dispatch what waited for that."""
        if part is self._running:
            self._running = None
        self._dispatch()

    def finish(self) -> None:
        """Dispatch all parts and wait until the device has computed them."""
        while self._running is not None:
            mx.eval(self._running.marker)
            mx.synchronize()  # a GPU releases the inputs of operations a little later
            self.done(self._running)

    def clear(self) -> None:
        """Forget all parts."""
        self._waiting.clear()
        self._running = None

    def _dispatch(self) -> None:
        while self._waiting and not (self.one_at_a_time and self._running is not None):
            self._running = self._waiting.popleft()
            backend.current().share_cores(every_core=self._running.prompt_tokens >= MANY_TOKENS)
            mx.async_eval(self._running.marker)
