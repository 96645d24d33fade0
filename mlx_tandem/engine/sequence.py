"""The engine's mutable state of one choice of one request."""

from __future__ import annotations

from mlx_tandem.engine.plan import Tables
from mlx_tandem.kv.hashing import Chain
from mlx_tandem.types import AdapterRef, Request, TokenLogprob


class Sequence:
    """`tokens` are the ids known to the host: the prompt and what has been settled of the output.

    `scheduled` positions have been handed to the runner; `pending` tokens have been drawn on the device and are not
    known to the host yet. Blocks, seat and slot are held while the sequence runs, and only then.
    """

    __slots__ = (
        "adapter",
        "announced",
        "cached",
        "chain",
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
        "prompt_length",
        "published",
        "request",
        "room",
        "scheduled",
        "scores",
        "seat",
        "siblings",
        "slot",
        "spare",
        "stop_ids",
        "tables",
        "tokens",
    )

    def __init__(self, id: int, request: Request, choice: int, stop_ids: frozenset[int]):
        self.id = id
        self.request = request
        self.choice = choice
        self.stop_ids = stop_ids
        self.adapter = request.adapter
        self.next_adapter: AdapterRef | None = None  # a version to go on under once it has a slot
        self.tokens = list(request.prompt)
        self.prompt_length = len(request.prompt)
        self.most_tokens = self.prompt_length + request.params.max_tokens  # prompt and output together
        self.scheduled = 0
        self.pending = 0
        self.tables: Tables = ()  # while it runs
        self.spare: Tables = ()  # blocks in each group that only the drafts in flight have
        self.room = 0  # positions that all of them have blocks for
        self.chain: Chain | None = None  # the keys of its blocks under its adapter, once they are asked for
        self.published = 0  # whole blocks of the table that others can find, as far as it knows
        self.announced: bytes | None = None  # the key of the block under which others find that it computes it
        self.has_drawn = False  # a token that is a number, since it was seated
        self.is_masked = False  # each of its tokens needs a mask, which needs the token before it
        self.is_pure = True  # what it has computed, it has computed under its adapter
        self.cached: int | None = None  # tokens of the prompt that its request found computed, when it began
        self.seat = -1
        self.slot = -1
        self.is_seated = False  # the runner has been told of this seat
        self.overtaken = 0  # by how many, while it waits for an adapter slot
        self.scores: list[TokenLogprob] | None = None
        """Of the prompt's tokens from the second on, as far as computed; one list for all choices of the request. None
        when they were not asked for, or have been handed out."""
        self.siblings: list[Sequence] = []
        """The other choices of the request, until the shared part of the prompt is computed."""

    @property
    def table(self) -> tuple[int, ...]:
        """Its blocks in the first group."""
        return self.tables[0] if self.tables else ()

    @property
    def generated(self) -> int:
        """Tokens drawn, those still on the device among them."""
        return len(self.tokens) - self.prompt_length + self.pending

    @property
    def total(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def wants_decode(self) -> bool:
        """Everything but the newest token is in the cache, and the newest may be followed by another."""
        total = len(self.tokens) + self.pending
        return self.scheduled == total - 1 and total < self.most_tokens

    @property
    def wants_prefill(self) -> bool:
        return not self.pending and self.scheduled < len(self.tokens) - 1 and not self.is_complete

    @property
    def unread(self) -> int:
        """Tokens of its prompt that no step has read; the last is left for the choices that share it."""
        return (self.prompt_length - 1 if self.siblings else len(self.tokens)) - self.scheduled

    @property
    def is_complete(self) -> bool:
        return self.total >= self.most_tokens

    @property
    def priority(self) -> tuple[bool, int]:
        """Users' requests come before those made for training."""
        return self.request.background, self.request.priority

    def targets(self, start: int, end: int) -> tuple[int, ...]:
        """Prompt tokens after positions start … end - 1 whose logprobs are wanted and not all known."""
        if self.scores is None or end <= len(self.scores):
            return ()
        return self.request.prompt[start + 1 : end + 1]

    @property
    def adapter_digest(self) -> str | None:
        return self.adapter.digest if self.adapter else None

    def go_under(self, ref: AdapterRef) -> None:
        """From here on it is computed under `ref`."""
        if ref.digest != self.adapter_digest:
            self.chain = None
        self.adapter, self.next_adapter = ref, None

    def follows(self, ref: AdapterRef) -> bool:
        """Whether it is to go on under `ref`."""
        adapter = self.next_adapter or self.adapter
        return self.request.follow and adapter is not None and adapter.name == ref.name and adapter != ref
