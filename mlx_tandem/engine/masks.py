"""Masks: which tokens a sequence may draw next, decided on the host while the device computes the logits.

The forward of a row may begin before the host knows the row's newest token. The mask is made once it knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, overload

from mlx_tandem.engine.plan import NOT_A_NUMBER, Mask, RowKind, StepPlan, mask_words
from mlx_tandem.engine.sequence import Sequence as EngineSequence
from mlx_tandem.types import Request

Tokens = tuple[int, ...]


class Place(NamedTuple):
    """A place in the text of a choice that needs a mask: `tokens` (prompt and output) are before it."""

    request: Request
    choice: int
    tokens: Sequence[int]


class MaskMaker(Protocol):
    """A source of masks for the requests that need them."""

    def constrains(self, request: Request) -> bool:
        """Return whether every token of the request needs a mask."""

    def masks(self, places: Sequence[Place]) -> Sequence[Mask | None]:
        """Return which tokens may follow at each place. No choice has two places. A request fails when its mask is
        empty.

        A mask that is late is None. The scheduler asks for it again when `is_ready` says that it has been prepared.
        """

    def is_slow(self, request: int, choice: int) -> bool:
        """Return whether no row of a choice should be launched before its mask is ready. Asked of masked choices."""

    def prepare(self, place: Place) -> None:
        """Begin to make the mask of a place. Nothing may be asked of this choice until it `is_ready`, but `masks`."""

    def is_ready(self, request: int, choice: int) -> bool:
        """Return whether the mask that was prepared last is there."""

    def forget(self, request: int, choice: int) -> None:
        """Drop what is kept of a choice that has ended."""


def masks_of_plan(
    maker: MaskMaker,
    plan: StepPlan,
    sequences: Mapping[int, EngineSequence],
    vocab_size: int,
    drawn: Mapping[int, Tokens] = MappingProxyType({}),
) -> list[list[Mask] | None]:
    """Return the masks of each masked row of a plan, whose sequences are looked up by their id; None where one is late.

    A row has one mask for what follows its newest token, and one for each of its drafts. After a draft that its own
    mask forbids or that ends the text, no draft is accepted, so the maker is not asked for the masks after it. `drawn`
    has, by the sequence, tokens that have been drawn and that the sequence does not have yet. The draws of sequences
    that have ended since the launch, or end with these tokens, are dropped, so every token is allowed for them.
    """
    everything = b"\xff" * (mask_words(vocab_size) * 4)
    made: list[list[Mask] | None] = []
    waiting: list[tuple[int, EngineSequence, tuple[int, ...], list[Mask]]] = []
    for at, row in enumerate([plan.rows[i] for i in plan.masked]):
        s, newest = sequences.get(row.sequence), drawn.get(row.sequence, ())
        if s is None or NOT_A_NUMBER in newest or not s.stop_ids.isdisjoint(newest):
            made.append([everything] * row.draws)
            continue
        own: list[Mask] = []
        made.append(own)
        waiting.append((at, s, row.tokens[1:] if row.kind is RowKind.VERIFY else (), own))
    depth = 0
    while waiting:
        behind = [(*drawn.get(s.id, ()), *drafts[:depth]) for _, s, drafts, _ in waiting]
        places = [
            Place(s.request, s.choice, ExtendedTokens(s.tokens, new) if new else s.tokens)
            for (_, s, _, _), new in zip(waiting, behind, strict=True)
        ]
        following = []
        for (at, s, drafts, own), mask in zip(waiting, maker.masks(places), strict=True):
            if mask is None:
                made[at] = None
                continue
            rest = len(drafts) - depth
            if rest and (drafts[depth] in s.stop_ids or not allows(mask, drafts[depth])):
                own += [mask] * (1 + rest)
                continue
            own.append(mask)
            if rest:
                following.append((at, s, drafts, own))
        waiting = following
        depth += 1
    return made


def allows(mask: Mask, token: int) -> bool:
    """Return whether a mask lets a token be drawn."""
    return bool(mask[token // 8] >> token % 8 & 1)


class ExtendedTokens(Sequence[int]):
    """The tokens of a sequence followed by others. The sequence's tokens, which may be many, are not copied."""

    __slots__ = ("_first", "_rest")

    def __init__(self, first: Sequence[int], rest: Tokens):
        self._first = first
        self._rest = rest

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        known = len(self._first)
        if not isinstance(at, slice):
            at = range(len(self))[at]
            return self._first[at] if at < known else self._rest[at - known]
        begin, end, step = at.indices(len(self))
        assert step == 1
        return [*self._first[begin:end], *self._rest[max(begin - known, 0) : max(end - known, 0)]]
