"""What the scheduler asks of a runner and what comes back. Plain data; no arrays, no requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

from msgspec import Struct

from mlx_tandem.types import SamplingParams, TokenLogprob

CARRY = -1
"""In `Row.tokens`: the token the same seat sampled in the step before, still on the device."""


Bytes = bytes | memoryview

Mask = bytes | memoryview
"""Which tokens may be drawn: bit t % 8 of byte t // 8, the lowest first, says it of token t. It has a multiple of 4
bytes."""

Tables = tuple[tuple[int, ...], ...]
"""The blocks of one sequence in each cache group of its model. A table that changes is another object."""


@dataclass(frozen=True, slots=True)
class Seating:
    """A sequence takes a seat: an index into the runner's per-sequence state.

    `history` is what it has seen so far (prompt and output), of which the first `prompt_length` are the prompt. With
    `params.min_tokens`, none of `stop_ids` is drawn before that many tokens.
    """

    seat: int
    params: SamplingParams
    choice: int
    prompt_length: int
    history: tuple[int, ...]
    stop_ids: frozenset[int] = frozenset()


class RowKind(IntEnum):
    """What a row is for. Nobody may conclude it from the number of its tokens."""

    PROMPT = 0
    """A chunk of what the host knows of a sequence, of any length; the last chunk draws the token after it."""
    DECODE = 1
    """The newest token of a sequence of which everything before it is computed; it draws the next one."""
    VERIFY = 2
    """The newest token and drafts of those that may follow it. Each position draws, and the drafts are accepted as far
    as each of them is what the position before it drew."""


class Row(Struct, frozen=True, gc=False):
    """One sequence's share of one step: `tokens` at positions start, start + 1, … .

    What is computed of them goes to the blocks of a table (position p lives in block `table[p // block_size]`), and
    each attends to everything up to its own position, or to the layer's window of that. There is a table for each cache
    group, in which 0 stands for a block that was given back; `kv/groups` says what a group's table means. With `sample`
    the step draws the token after the last one, in a VERIFY row after each one. `targets` are the prompt's tokens after
    each of `tokens`, as far as the prompt goes: their logprobs are wanted. With `beside` its tokens share a forward
    with the rows that decode. `version` and `background` say on whose behalf it runs; the runner does not care.
    """

    kind: RowKind
    sequence: int
    seat: int
    lora_slot: int  # 0 is the base model
    start: int
    tokens: tuple[int, ...]
    tables: Tables
    sample: bool
    targets: tuple[int, ...] = ()
    version: int = 0  # of the adapter, for a request that follows
    background: bool = False  # made for training
    piggybacked: bool = False


Wait = Callable[[], None]
"""Blocks until what was launched is done; raises what went wrong with it."""

SliceKind = Literal["open", "close", "forward_backward", "optim_step", "settle", "publish", "save"]


class Slice(Struct, frozen=True, gc=False):
    """The name of one slice of learning: the next piece of the first message of these trainers, counted from 0."""

    trainers: tuple[str, ...]
    kind: SliceKind
    index: int

    @property
    def is_brief(self) -> bool:
        """Whether the slice is short and rare, so that it need not wait for learning's share of the time."""
        return self.kind not in ("forward_backward", "optim_step")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One unit of device work, done in this order: slice of learning, saves, uploads, copies, loads, seatings, rows. A
    plan may have none of the last.
    """

    rows: tuple[Row, ...]
    uploads: tuple[tuple[int, str], ...] = ()  # (slot, adapter digest)
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block)
    seatings: tuple[Seating, ...] = ()
    saves: tuple[int, ...] = ()  # blocks whose bytes are wanted
    loads: tuple[tuple[int, Bytes], ...] = ()  # (block, bytes that it gets)
    masked: tuple[int, ...] = ()  # indices of rows that draw by masks which `Runner.sample` brings
    slice: Slice | None = None

    @property
    def has_step(self) -> bool:
        """Whether the runner has something to do for this plan."""
        return bool(self.rows or self.saves or self.loads)

    @property
    def background_share(self) -> float:
        """Of its tokens, how many belong to rows made for training."""
        background = sum(len(row.tokens) for row in self.rows if row.background)
        return background / sum(len(row.tokens) for row in self.rows) if background else 0.0

    @property
    def prompt_tokens(self) -> int:
        """How many tokens its chunks of prompts have."""
        return sum(len(row.tokens) for row in self.rows if row.kind is RowKind.PROMPT)

    @property
    def has_streams(self) -> bool:
        """Whether users' requests get another token from it, not their first."""
        return any(row.kind is not RowKind.PROMPT and row.start and not row.background for row in self.rows)


def scored_positions(vocab_size: int) -> int:
    """How many positions of prompts one step may have `targets` for: each needs its own row of logits."""
    return max((1 << 24) // vocab_size, 16)


NOT_A_NUMBER = -1
"""In `StepResult.tokens`: the row's logits were not finite."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, for each row of its plan in their order: the tokens that were drawn, and their logprobs.

    A row that does not sample has no tokens, and a VERIFY row has its accepted drafts and one more. The last token of a
    row is NOT_A_NUMBER where a position of it, accepted or not, was not finite. `scores` are the logprobs of the rows'
    `targets`, by the row's index.
    """

    tokens: list[tuple[int, ...]]
    logprobs: list[tuple[TokenLogprob, ...] | None] = field(default_factory=list)  # empty: nobody asked
    scores: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    saves: list[bytes] = field(default_factory=list)  # of each of the plan's blocks
    cold: bool = False  # a shape was met for the first time: how long it took says nothing


class DeviceError(Exception):
    """The device or the runtime failed in a step, whose rows are lost; the engine may go on. With `again` the cause is
    gone: whoever had a row in it can be computed again.
    """

    def __init__(self, message: str, *, again: bool = False):
        super().__init__(message)
        self.again = again


class OutOfMemory(DeviceError):
    """The device had too little memory for one piece of work; smaller ones may succeed."""


class Runner(Protocol):
    """Executes plans in the order of their launch. Two real ones: the MLX runner and the reference runner."""

    one_at_a_time: bool
    """A step begins when the one before it has been read, and not before."""

    def launch(self, plan: StepPlan) -> Any:
        """Start the step and return at once with a handle. Raises DeviceError."""

    def sample(self, handle: Any, masks: list[list[Mask]]) -> None:
        """Let the rows draw that are `masked` in the plan of this handle: a mask for each position that draws, in the
        order of these rows.

        Called once for a plan that has such rows, after its launch and before the next; the host makes the masks while
        the device computes the logits. Raises DeviceError.
        """

    def waits(self, plan: StepPlan) -> bool:
        """Whether `launch` would not return at once, but wait for much of the step."""

    def wait(self, handle: Any) -> StepResult:
        """Block until that step is done. Raises DeviceError."""

    def reset(self) -> None:
        """After a failed step: drop what was in flight; what earlier steps wrote stays readable."""
