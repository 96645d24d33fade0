"""The contract between the scheduler and a runner: plans of steps and their results. Plain data; no arrays, no
requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

from msgspec import Struct

from mlx_tandem.types import DraftSource, Image, Pooling, SamplingParams, TokenLogprob

CARRY = -1
"""Placeholder in `Row.tokens` for the token that the same seat drew in the step before, which is
still on the device.
"""

UNKNOWN = -1
"""Placeholder for a token that nobody knows yet."""

Bytes = bytes | memoryview
"""The content of a block."""

Mask = bytes | memoryview
"""The tokens that may be drawn, one bit each: bit t % 8 of byte t // 8, counted from the lowest, stands for token t.
Its length is a multiple of 4 bytes.
"""

LONGEST_READ = 8
"""Most tokens of a row in a plan with `drafts`. If a sequence has more to read, a forward of its own does it first."""


def mask_words(vocab_size: int) -> int:
    """Return how many words of 32 bits a mask has."""
    return -(-vocab_size // 32)


Tables = tuple[tuple[int, ...], ...]
"""The blocks of one sequence in each cache group of its model. A changed table is a new object."""


@dataclass(frozen=True, slots=True)
class Seating:
    """The assignment of a sequence to a seat, which is an index into the runner's per-sequence state.

    `history` has the sequence's tokens so far (prompt and output), the first `prompt_length` of which are the prompt.
    With `params.min_tokens`, none of `stop_ids` is drawn before that many tokens of output.
    """

    seat: int
    params: SamplingParams
    choice: int
    prompt_length: int
    history: tuple[int, ...]
    stop_ids: frozenset[int] = frozenset()


class RowKind(IntEnum):
    """The purpose of a row. It must not be inferred from the number of the row's tokens."""

    PROMPT = 0
    """A chunk of tokens that the host knows, of any length; the last chunk of a sequence draws the token after it."""
    DECODE = 1
    """The newest token of a sequence, all of whose other tokens are computed; the row draws the next token."""
    VERIFY = 2
    """The newest token and drafts of the tokens that may follow it. Each position draws a token. Drafts are accepted up
    to the first that differs from what the position before it drew."""


class Shown(Struct, frozen=True, gc=False):
    """Adjacent placeholders of an image in a row: `count` of them, from number `at` of the row's tokens on.

    The image's embeddings from number `first` on replace those of the placeholders. `image` is the image's digest.

    In models whose positions have several axes the image's tokens form a grid with `columns` columns. `shift` is added
    to the index of the image's first placeholder to get its position, and `after` to the indices of the tokens behind
    the image. `time` is added to the positions of all of its tokens on the axis of time.
    """

    image: bytes
    at: int
    first: int
    count: int
    shift: int = 0
    after: int = 0
    columns: int = 0
    time: int = 0


class Row(Struct, frozen=True, gc=False):
    """One sequence's share of one step: `tokens` at positions start, start + 1, … .

    The keys and values of position p go to block `table[p // block_size]`, and each position attends to all positions
    up to its own, or to the layer's window of them. There is a table for each cache group, in which 0 stands for a
    block that was given back; `kv/groups` describes a group's table. With `sample` the step draws the token after the
    last of `tokens`, and in a VERIFY row after each of them. `targets` are the prompt's tokens after each of `tokens`,
    as far as the prompt goes; their logprobs are wanted. With `pooling` the hidden states of `tokens` are wanted. The
    tokens of a `piggybacked` PROMPT row share a forward with the rows that decode.

    With `slack` the row follows a VERIFY row of its sequence that the host has not read. Its first token is CARRY, and
    it begins where that row's last accepted token is, which the device knows: at `start` if all drafts were accepted,
    and up to `slack` positions before `start` if not. The tables have blocks for the former.

    `following` is the prompt's token after the last of `tokens`, where the row does not draw that one; a head for
    multi-token prediction reads it.

    `images` are the placeholders of images among the tokens of a PROMPT row; no other row has any. `shift` is added
    to the index of a token before the first of them to get its position; it is 0 unless images came before the row
    in a model whose positions have several axes.

    `version` and `background` say for whom the row runs, and `source` is the source of its drafts; the runner ignores
    all three.
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
    slack: int = 0
    pooling: Pooling | None = None
    source: DraftSource | None = None  # source of the drafts of a VERIFY row
    following: int = UNKNOWN
    images: tuple[Shown, ...] = ()
    shift: int = 0

    @property
    def draws(self) -> int:
        """Number of positions that draw a token."""
        return len(self.tokens) if self.kind is RowKind.VERIFY else int(self.sample)


Wait = Callable[[], None]
"""A function that blocks until launched work is done, and raises the error of that work."""

SliceKind = Literal["open", "close", "forward_backward", "optim_step", "settle", "publish", "save"]
"""The message to a trainer that a slice belongs to."""


class Slice(Struct, frozen=True, gc=False):
    """The name of one slice of learning: piece number `index`, from 0, of the first message of these trainers."""

    trainers: tuple[str, ...]
    kind: SliceKind
    index: int

    @property
    def is_brief(self) -> bool:
        """Whether the slice is short and rare, so that it need not wait for learning's share of the time."""
        return self.kind not in ("forward_backward", "optim_step")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One unit of device work, done in this order: slice of learning, saves, uploads, copies, loads, seatings, drops,
    encodes, rows.

    A plan may have no rows. Rows show only images that an earlier plan has encoded.

    If `drafts` is not 0, each row draws that many tokens, one after the other. Only the keys and values of the rows'
    own tokens stay in the cache. The drawn tokens leave nothing there; they neither become their seats' newest tokens
    nor count for penalties. All rows of such a plan are PROMPT rows of the base model that sample, without masks,
    logprobs, targets or images.
    """

    rows: tuple[Row, ...]
    uploads: tuple[tuple[int, str], ...] = ()  # (slot, adapter digest)
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block)
    seatings: tuple[Seating, ...] = ()
    saves: tuple[int, ...] = ()  # blocks whose bytes are wanted
    loads: tuple[tuple[int, Bytes], ...] = ()  # (block, bytes that it gets)
    masked: tuple[int, ...] = ()  # indices of rows that draw by the masks that `Runner.sample` is given
    slice: Slice | None = None
    proposes: bool = False  # the model's head for multi-token prediction drafts for the rows that draw
    drops: tuple[bytes, ...] = ()  # digests of images whose embeddings are not kept any longer
    encodes: tuple[Image, ...] = ()  # images whose embeddings are computed and kept
    drafts: int = 0  # tokens that each row draws, one after the other; 0: a row draws as its kind does

    @property
    def has_step(self) -> bool:
        """Whether the plan has work for the runner, besides a slice."""
        return bool(self.rows or self.saves or self.loads or self.encodes)

    @property
    def background_share(self) -> float:
        """Fraction of the plan's tokens that belong to rows made for training."""
        background = sum(len(row.tokens) for row in self.rows if row.background)
        return background / sum(len(row.tokens) for row in self.rows) if background else 0.0

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in its chunks of prompts."""
        return sum(len(row.tokens) for row in self.rows if row.kind is RowKind.PROMPT)

    @property
    def has_streams(self) -> bool:
        """Whether users' requests get a token from it that is not their first."""
        return any(row.kind is not RowKind.PROMPT and row.start and not row.background for row in self.rows)


def scored_positions(vocab_size: int) -> int:
    """Return for how many prompt positions one step may have `targets`. Each of them needs its own row of logits."""
    return max((1 << 24) // vocab_size, 16)


NOT_A_NUMBER = -1
"""Placeholder in `StepResult.tokens` for a token that could not be drawn because the logits were not finite."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: for each row of its plan, in order, the tokens that were drawn and their logprobs.

    A row that does not sample has no tokens; a VERIFY row has its accepted drafts and one more token. The last token of
    a row is NOT_A_NUMBER where the logits of any of its positions, accepted or not, were not finite. In the result of a
    plan with `drafts`, each token whose own logits were not finite is NOT_A_NUMBER. `scores` has the logprobs of the
    rows' `targets`, by the row's index. `pooled` has for each row with `pooling` the sum of its tokens'
    hidden states for a mean, or the last token's hidden state. `drafts` has by the row's index what the model's head
    expects after the row's last token, if the plan `proposes`; masked rows have none. `unencoded` has
    the reason why an image could not be encoded, by its digest.
    """

    tokens: list[tuple[int, ...]]
    logprobs: list[tuple[TokenLogprob, ...] | None] = field(default_factory=list)  # empty when no row wants any
    scores: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    saves: list[bytes] = field(default_factory=list)  # of each of the plan's `saves`
    first_use: bool = False  # a shape was used for the first time, so the time of the step says nothing
    pooled: dict[int, list[float]] = field(default_factory=dict)
    drafts: dict[int, int] = field(default_factory=dict)
    unencoded: dict[bytes, str] = field(default_factory=dict)


class DeviceError(Exception):
    """Raised when the device or the runtime failed in a step, whose rows are lost; the engine may continue.

    With `again` the cause is gone, so that the sequences of the rows can be computed again.
    """

    def __init__(self, message: str, *, again: bool = False):
        super().__init__(message)
        self.again = again


class OutOfMemory(DeviceError):
    """Raised when the device had too little memory for one piece of work; smaller pieces may succeed."""


class Runner(Protocol):
    """The interface of a runner, which executes plans in the order of their launch.

    There are two implementations: the MLX runner and the reference runner of the tests.
    """

    one_at_a_time: bool
    """Whether a step begins only when the step before it has been read."""

    drafting_positions: int
    """The most positions that a plan with `drafts` may have. A plan counts as many as its number of rows times twice
    the number of tokens of its longest sequence. 0: no plan may have drafts."""

    def launch(self, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Any:
        """Start the step and return a handle at once. Raises DeviceError.

        When nothing is in flight and nothing is to be done, an empty plan says so, once, and its handle is not waited
        for.

        on_built: is called at most once, when the step is built and only its dispatch is left, which releases Python's
        global lock.
        """

    def place(self, masks: list[list[Mask]]) -> Any:
        """Return masks as `sample` takes them: for each masked row of the newest plan, a mask per drawing position.

        It may be called on another thread during `launch`, but only after `on_built` was called.
        """

    def sample(self, handle: Any, masks: Any) -> None:
        """Let the `masked` rows of this handle's plan draw by masks that were placed.

        It is called once for a plan with such rows, after its launch, after the step before it was read, and before the
        next launch. The host makes the masks while the forward is launched and computed. Raises DeviceError.
        """

    def drawn(self, handle: Any) -> list[tuple[int, ...]]:
        """Block until the rows of a step have drawn, and return `StepResult.tokens`. Raises DeviceError.

        Unless `one_at_a_time`, another thread may call it while the next plan is launched, and nothing else.
        """

    def launch_waits(self, plan: StepPlan) -> bool:
        """Return whether `launch` would wait for much of the step instead of returning at once."""

    def wait(self, handle: Any) -> StepResult:
        """Block until a step is done and return its result. Raises DeviceError."""

    def reset(self) -> None:
        """Drop everything in flight after a failed step, and start again from an empty cache."""
