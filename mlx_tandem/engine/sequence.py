"""Sequences: the engine's mutable state of one choice of one request."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from mlx_tandem.engine.plan import Seating, Tables
from mlx_tandem.kv.hashing import Chain, content_of
from mlx_tandem.types import AdapterRef, FinishReason, Image, Request, TokenLogprob

NEVER = 1 << 62
"""The start of an adapter whose invocation tokens do not occur in the prompt. It lies beyond every position, so that
the base model computes the whole sequence.
"""


def adapter_start_of(adapter: AdapterRef | None, prompt: tuple[int, ...]) -> int:
    """Return the position of the first token that `adapter` computes: the start of the last occurrence of its
    invocation tokens in `prompt`.

    It is 0 for an adapter without such tokens and for the base model, and NEVER if they do not occur.
    """
    wanted = adapter.invocation if adapter is not None else ()
    return _last_occurrence(wanted, prompt) if wanted else 0


def _last_occurrence(wanted: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """Return where `wanted` begins in `tokens` for the last time, or NEVER, in linear time (Knuth-Morris-Pratt)."""
    backwards = wanted[::-1]
    borders = [0]  # of each prefix: the length of the longest one that it ends with, other than itself
    matched = 0
    for token in backwards[1:]:
        matched = _matched(backwards, borders, matched, token)
        borders.append(matched)
    matched = 0
    for at in range(len(tokens) - 1, -1, -1):
        matched = _matched(backwards, borders, matched, tokens[at])
        if matched == len(wanted):
            return at
    return NEVER


def _matched(wanted: tuple[int, ...], borders: list[int], matched: int, token: int) -> int:
    """Return how many tokens of `wanted` are matched after one more token, where `matched` were before."""
    while matched and wanted[matched] != token:
        matched = borders[matched - 1]
    return matched + (wanted[matched] == token)


class Run(NamedTuple):
    """Adjacent placeholders of an image: `length` of them from position `start` on.

    `first` is the number, within the image, of the first of them. The others are as in `plan.Shown`.
    """

    image: Image
    start: int
    first: int
    length: int
    shift: int = 0
    after: int = 0
    columns: int = 0
    time: int = 0

    @property
    def end(self) -> int:
        """The position after the last of them."""
        return self.start + self.length


class Sequence:
    """The state of one choice of a request, from its arrival to its end.

    `tokens` are the ids that the host knows: the prompt and the output that has been read. `scheduled` positions have
    been handed to the runner; `pending` tokens have been drawn on the device and are not known to the host yet. While
    drafts are on the device, both are bounds: `slack` of them count only if all drafts are accepted. A sequence holds
    blocks, a seat and an adapter slot only while it runs.
    """

    __slots__ = (
        "adapter",
        "adapter_start",
        "announced",
        "aside",
        "boundaries",
        "cached",
        "chain",
        "charged",
        "choice",
        "has_drawn",
        "id",
        "is_masked",
        "is_pure",
        "is_seated",
        "most_tokens",
        "next_adapter",
        "overtaken",
        "pending",
        "pooled",
        "prompt_length",
        "published",
        "request",
        "room",
        "runs",
        "scheduled",
        "scores",
        "seat",
        "siblings",
        "slack",
        "slot",
        "stop_ids",
        "tables",
        "tokens",
        "turn",
    )

    def __init__(self, id: int, request: Request, choice: int, stop_ids: frozenset[int]):
        self.id = id
        self.request = request
        self.choice = choice
        self.stop_ids = stop_ids
        self.adapter = request.adapter
        self.adapter_start = 0  # position of the first token that its adapter computes; the base computes those before
        self.next_adapter: AdapterRef | None = None  # a version under which it continues once that has a slot
        self.tokens = list(request.prompt)
        self.prompt_length = len(request.prompt)
        self.most_tokens = self.prompt_length + request.params.max_tokens  # prompt and output together
        self.scheduled = 0
        self.pending = 0
        self.slack = 0  # drafts in rows that are on the device
        self.tables: Tables = ()  # while it runs
        self.room = 0  # positions for which all tables have blocks
        self.chain: Chain | None = None  # keys of its blocks under its adapter; None until they are needed
        self.published = 0  # whole blocks of the table that it has published or found
        self.announced: bytes | None = None  # key of the block that it computes next, as others are told
        self.aside = b""  # key of the blocks that were set aside at preemption; empty if there are none
        self.boundaries: set[int] = set()  # in blocks: where a snapshot of its state is worth keeping
        self.has_drawn = False  # whether it has drawn a finite token since it has had its seat
        self.is_masked = False  # whether each token is drawn by a mask
        self.is_pure = True  # whether everything computed so far was computed under its present adapter
        self.pooled: list[float] = []  # sum of the hidden states so far, or the last one, if the request wants them
        self.cached: int | None = None  # prompt tokens that its request found cached when it began
        self.seat = -1
        self.slot = -1
        self.is_seated = False  # whether the runner has been told of this seat
        self.turn = 0  # its place among the requests of all clients, while it waits
        self.charged = 0  # tokens that the request's turn counts for this choice
        self.overtaken = 0  # by how many requests, while it waits for an adapter slot
        self.scores: list[TokenLogprob] | None = None
        """Logprobs of the prompt's tokens from the second on, as far as computed; all choices of a request share the
        list. None when they are not wanted, or have been handed out.
        """
        self.runs: tuple[Run, ...] = ()  # the placeholders of its images
        self.siblings: list[Sequence] = []
        """The other choices of the request, until the shared part of the prompt is computed; only the first choice has
        any.
        """

    @property
    def table(self) -> tuple[int, ...]:
        """The sequence's blocks in the first group."""
        return self.tables[0] if self.tables else ()

    @property
    def content(self) -> list[int]:
        """Its tokens as the prefix cache compares them: placeholders are replaced by numbers that name the images."""
        if not self.runs:
            return self.tokens
        content = self.tokens[:]
        for run in self.runs:
            content[run.start : run.end] = content_of(run.image.digest, run.first, run.length)
        return content

    @property
    def cost(self) -> int:
        """The tokens that the turn of its request counts."""
        return self.prompt_length + self.charged * (1 + len(self.siblings))

    @property
    def generated(self) -> int:
        """Number of tokens drawn, including those still on the device."""
        return len(self.tokens) - self.prompt_length + self.pending

    @property
    def total(self) -> int:
        """Number of tokens of prompt and output, including those still on the device."""
        return len(self.tokens) + self.pending

    @property
    def wants_decode(self) -> bool:
        """Whether all tokens but the newest are computed, and another token may follow it."""
        total = len(self.tokens) + self.pending
        return self.scheduled == total - 1 and total < self.most_tokens

    @property
    def wants_prefill(self) -> bool:
        """Whether more than the newest of the known tokens are left to be computed, and none is pending."""
        return not self.pending and self.scheduled < len(self.tokens) - 1 and not self.is_complete

    @property
    def unread(self) -> int:
        """Number of known tokens that no step has read. While siblings share the prompt, its last token is left to
        them.
        """
        return (self.prompt_length - 1 if self.siblings else len(self.tokens)) - self.scheduled

    @property
    def is_complete(self) -> bool:
        """Whether it has as many tokens as it may have, including those still on the device."""
        return self.total >= self.most_tokens

    @property
    def priority(self) -> tuple[bool, int]:
        """Key by which sequences are ordered, the smallest first: users' requests come before those
        made for training.
        """
        return self.request.background, self.request.priority

    def targets(self, start: int, end: int) -> tuple[int, ...]:
        """Return the prompt tokens after positions start … end - 1 if their logprobs are wanted and not all known."""
        if self.scores is None or end <= len(self.scores):
            return ()
        return self.request.prompt[start + 1 : end + 1]

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every position of the prompt has to be computed for this request, so that nothing cached is used."""
        return self.scores is not None or self.request.pooling is not None

    def pool(self, start: int, hidden: list[float]) -> None:
        """Add the pooled hidden states of the row that began at `start`. After a preemption they begin anew."""
        if start == 0 or self.request.pooling == "last":
            self.pooled = hidden
        else:
            self.pooled = [a + b for a, b in zip(self.pooled, hidden, strict=True)]

    @property
    def embedding(self) -> bytes:
        """The pooled hidden states of the whole prompt as float32 numbers."""
        count = self.prompt_length if self.request.pooling == "mean" else 1
        return array("f", [value / count for value in self.pooled]).tobytes()

    @property
    def adapter_digest(self) -> str | None:
        """Digest of its present adapter; None for the base model."""
        return self.adapter.digest if self.adapter else None

    def take_seat(self) -> Seating:
        """Return the message by which the runner learns of the sequence's seat, and note that it was made."""
        self.is_seated = True
        history = tuple(self.tokens)
        return Seating(self.seat, self.request.params, self.choice, self.prompt_length, history, self.stop_ids)

    def cut(self, length: int) -> None:
        """Drop all tokens of the prompt behind the first `length`."""
        del self.tokens[length:]
        self.prompt_length = length
        self.runs = tuple([r._replace(length=min(r.end, length) - r.start) for r in self.runs if r.start < length])

    def go_under(self, ref: AdapterRef) -> None:
        """Continue under `ref`, or begin under it."""
        if ref.digest != self.adapter_digest:
            self.chain = None
            self.adapter_start = adapter_start_of(ref, self.request.prompt)
        self.adapter, self.next_adapter = ref, None

    def follows(self, ref: AdapterRef) -> bool:
        """Return whether the sequence should continue under `ref`, another version of the name that it follows."""
        adapter = self.next_adapter or self.adapter
        return self.request.follow and adapter is not None and adapter.name == ref.name and adapter != ref

    def finish_reason(self, token: int) -> FinishReason | None:
        """Return why the sequence ends with `token`, the newest of its tokens; None if it does not end."""
        if token in self.stop_ids:
            return "stop"
        if len(self.tokens) >= self.most_tokens:
            return "length"
        return None

    def say(self, drawn: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Add drawn tokens up to the one that ends it; return the added ones, and why it ends if it does."""
        for n, token in enumerate(drawn, 1):
            self.tokens.append(token)
            finish = self.finish_reason(token)
            if finish:
                return drawn[:n], finish
        return drawn, None


def sequences_of(
    request: Request, first_id: int, stop_ids: frozenset[int], is_masked: bool, runs: tuple[Run, ...] = ()
) -> list[Sequence]:
    """Return the sequences of a request's choices, with ids from `first_id` on; the others are
    siblings of the first. `runs`: the placeholders of its images.
    """
    choices = [Sequence(first_id + i, request, i, stop_ids) for i in range(request.n)]
    choices[0].siblings = choices[1:]
    scores: list[TokenLogprob] | None = None
    if request.params.prompt_logprobs is not None and len(request.prompt) > 1:
        scores = []
    adapter_start = adapter_start_of(request.adapter, request.prompt)
    for s in choices:
        s.is_masked, s.scores, s.runs, s.adapter_start = is_masked, scores, runs, adapter_start
    return choices
